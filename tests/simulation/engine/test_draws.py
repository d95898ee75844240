"""Service times, arrivals, and luck that is tied to the attempt."""

from __future__ import annotations

import random
from itertools import islice, pairwise, takewhile

import pytest

from agent_reach.testing.simulation import (
    Bimodal,
    Bursts,
    Constant,
    Distribution,
    Exponential,
    LogNormal,
    Poisson,
    quantile,
)
from agent_reach.testing.simulation.draws import KeyedRandom, mix


@pytest.mark.parametrize(
    ("distribution", "mean_s", "median_s"),
    [
        (Constant(0.2), 0.2, 0.2),
        (Exponential(0.1), 0.1, 0.0693),
        (LogNormal(0.03, 0.5), 0.034, 0.03),
        (Bimodal(0.01, Constant(1.0), 0.1), 0.109, 0.01),
    ],
)
def test_draws_have_the_mean_and_the_median_that_they_should(
    distribution: Distribution, mean_s: float, median_s: float
) -> None:
    rng = random.Random(1)
    drawn = [distribution.draw(rng) for _ in range(20_000)]
    assert sum(drawn) / len(drawn) == pytest.approx(mean_s, rel=0.03)
    assert quantile(drawn, 0.5) == pytest.approx(median_s, rel=0.03)


def test_poisson_arrivals_follow_a_rate_that_changes() -> None:
    arrivals = Poisson([(0, 100), (10, 500), (20, 0), (30, 100)])
    times = list(takewhile(lambda t: t < 40, arrivals.times(random.Random(1), 0.0)))
    counts = [sum(a <= t < a + 10 for t in times) for a in (0, 10, 20, 30)]
    assert counts[2] == 0
    for count, expected in zip(counts, (1000, 5000, 0, 1000), strict=True):
        assert count == pytest.approx(expected, rel=0.1)
    assert times == sorted(times)


def test_poisson_arrivals_that_begin_late_begin_late_and_those_whose_rate_ends_end() -> None:
    assert next(Poisson(10).times(random.Random(1), 7.0)) > 7.0
    assert next(Poisson([(0, 1000), (5, 1)]).times(random.Random(1), 50.0)) > 50.0
    ending = list(Poisson([(0, 100), (1, 0)]).times(random.Random(1), 0.0))
    assert 70 < len(ending) < 130
    assert max(ending) < 1


def test_bursts_come_all_at_once() -> None:
    times = islice(Bursts(3, every_s=2.0).times(random.Random(1), 1.0), 7)
    assert list(times) == [1.0, 1.0, 1.0, 3.0, 3.0, 3.0, 5.0]


def test_a_key_gives_the_same_luck_whatever_was_drawn_before_and_another_key_another() -> None:
    draws = KeyedRandom()
    draws.rekey(mix(42, 1))
    first = [draws.random() for _ in range(3)]
    draws.rekey(mix(42, 2))
    second = [draws.random() for _ in range(3)]
    draws.rekey(mix(42, 1))
    assert [draws.random() for _ in range(3)] == first
    assert not set(first) & set(second)


def test_the_luck_of_neighbouring_calls_and_attempts_is_even_and_unrelated() -> None:
    draws = KeyedRandom()

    def luck(call: int, attempt: int) -> float:
        draws.rekey(mix(mix(99, call), attempt))
        return draws.random()

    firsts, seconds = [luck(i, 1) for i in range(20_000)], [luck(i, 2) for i in range(20_000)]
    assert sum(firsts) / len(firsts) == pytest.approx(0.5, abs=0.01)
    both = sum(a < 0.5 and b < 0.5 for a, b in zip(firsts, seconds, strict=True))
    in_turn = sum(a < 0.5 and b < 0.5 for a, b in pairwise(firsts))
    assert both / 20_000 == pytest.approx(0.25, abs=0.01)
    assert in_turn / 20_000 == pytest.approx(0.25, abs=0.01)
