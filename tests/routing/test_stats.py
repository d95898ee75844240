"""Latency average and success window."""

import pytest

from agent_reach.routing.stats import PeakEwma, SlidingPair


def test_a_peak_counts_at_once_and_a_lower_sample_pulls_down_slowly() -> None:
    latency = PeakEwma(decay_s=10.0)
    latency.observe(0.1, 0.0)
    latency.observe(2.0, 0.0)
    assert latency.at(0.0) == 2.0
    latency.observe(0.1, 1.0)
    assert 1.5 < latency.at(1.0) < 2.0


def test_an_idle_instance_fades_back_into_play_and_reading_changes_nothing() -> None:
    latency = PeakEwma(decay_s=10.0)
    latency.observe(5.0, 0.0)
    assert latency.at(10.0) == pytest.approx(5.0 / 2.718281828, rel=1e-6)
    assert latency.at(100.0) < 0.001
    assert latency.at(0.0) == 5.0


def test_a_clock_that_steps_back_does_no_harm() -> None:
    latency = PeakEwma(decay_s=10.0)
    latency.observe(1.0, 100.0)
    latency.observe(0.5, 50.0)
    assert latency.at(40.0) <= 1.0


def test_the_window_forgets_what_is_older_than_itself() -> None:
    window = SlidingPair(10.0)
    for second in range(20):
        window.count(first=second < 10, now=float(second))
    assert window.counts(19.0) == (0, 10)
    assert window.counts(24.5) == (0, 5)
    assert window.counts(1000.0) == (0, 0)


def test_the_window_starts_empty_at_any_time_of_the_clock() -> None:
    window = SlidingPair(10.0)
    assert window.counts(1e6) == (0, 0)
    window.count(first=True, now=1e6)
    window.count(first=False, now=1e6 + 3)
    assert window.counts(1e6 + 3) == (1, 1)
