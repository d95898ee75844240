"""Latency average and success window."""

import math

import pytest

from agent_reach.routing.stats import Latency, SlidingPair


def test_the_mean_is_geometric_and_the_newest_weighs_by_the_time_since_the_one_before() -> None:
    latency = Latency(decay_s=10.0)
    latency.observe(0.1, 0.0)
    latency.observe(10.0, 10.0)
    # 0.1 weighs 1/e: a mean of the logarithms, so that one long call in many is not all that is remembered.
    assert latency.at(10.0) == pytest.approx(0.1 ** (1 / math.e) * 10.0 ** (1 - 1 / math.e))
    one_long = Latency(decay_s=10.0)
    for call in range(100):
        one_long.observe(40.0 if call == 90 else 0.1, call * 0.2)
    assert one_long.at(99 * 0.2) < 0.15


def test_of_samples_at_one_time_the_longest_counts() -> None:
    latency = Latency(decay_s=10.0)
    for seconds in (0.1, 2.0, 0.5):
        latency.observe(seconds, 1.0)
    assert latency.at(1.0) == pytest.approx(2.0)


def test_a_failure_counts_at_once_fades_and_is_forgiven() -> None:
    latency = Latency(decay_s=10.0)
    latency.observe(0.1, 0.0)
    latency.fail(5.0, 1.0)
    assert latency.at(1.0) == 5.0
    latency.observe(0.1, 1.5)
    # One may be an accident, and fades twice as fast as the next one.
    assert latency.at(6.0) == pytest.approx(5.0 / math.e)
    latency.fail(5.0, 6.0)
    latency.fail(5.0, 6.0)
    assert latency.at(16.0) == pytest.approx(5.0 / math.e)
    latency.forgive()
    assert latency.at(1.5) == pytest.approx(0.1)


def test_the_first_answer_after_failures_is_all_that_is_known_of_its_speed() -> None:
    latency = Latency(decay_s=10.0)
    latency.fail(5.0, 0.0)
    latency.observe(0.1, 1.0)
    latency.forgive()
    assert latency.at(1.0) == pytest.approx(0.1)


def test_one_that_only_ever_failed_and_is_forgiven_is_unknown_and_not_infinitely_fast() -> None:
    latency = Latency(decay_s=10.0)
    latency.fail(5.0, 0.0)
    latency.forgive()
    assert latency.samples == 0
    latency.observe(0.1, 1.0)
    latency.fail(5.0, 1.0)
    latency.forgive()
    assert latency.samples > 0


def test_an_idle_instance_fades_back_into_play_and_reading_changes_nothing() -> None:
    latency = Latency(decay_s=10.0)
    latency.observe(5.0, 0.0)
    assert latency.at(10.0) == pytest.approx(5.0 / 2.718281828, rel=1e-6)
    assert latency.at(100.0) < 0.001
    assert latency.at(0.0) == pytest.approx(5.0)


def test_a_clock_that_steps_back_does_no_harm() -> None:
    latency = Latency(decay_s=10.0)
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
