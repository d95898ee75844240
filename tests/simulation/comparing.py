"""Numbers over several seeds, and whether two of them differ."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from tests.simulation.running import Result

__all__ = ["P99", "SUCCESS", "Difference", "Measure", "Outcomes", "Spread", "paired", "spread"]

Outcomes: TypeAlias = Mapping[str, Mapping[str, Sequence[Result]]]
"""Results by scenario and algorithm, one for each seed; the same seeds, in the same order, within a scenario."""


@dataclass(frozen=True, slots=True)
class Measure:
    """Something that a run is judged by. `least`: a smaller difference is of no interest to anybody, in the
    measure's own unit, or as a share of the greater value if `relative`.
    """

    name: str
    of: Callable[[Result], float]
    higher_is_better: bool
    least: float
    relative: bool = False

    def better(self, one: float, other: float) -> bool:
        """True if `one` is better than `other`."""
        return one > other if self.higher_is_better else one < other

    def matters(self, one: float, other: float) -> bool:
        """True if they differ by enough for anybody to care."""
        return abs(one - other) >= self.least * (max(abs(one), abs(other)) if self.relative else 1.0)

    def values(self, results: Sequence[Result]) -> list[float]:
        """Return one value for each seed."""
        return [self.of(result) for result in results]


SUCCESS = Measure("success", lambda result: result.success, higher_is_better=True, least=0.001)
P99 = Measure("p99", lambda result: result.p99_s, higher_is_better=False, least=0.05, relative=True)


@dataclass(frozen=True, slots=True)
class Spread:
    """The median over the seeds, and half of what lies between the least and the greatest."""

    median: float
    half_range: float


def spread(values: Sequence[float]) -> Spread:
    """Sum up one value for each seed."""
    return Spread(statistics.median(values), (max(values) - min(values)) / 2)


@dataclass(frozen=True, slots=True)
class Difference:
    """The mean of what two algorithms differ by, seed by seed, and its standard error; infinite for a lone seed."""

    mean: float
    error: float
    seeds: int

    @property
    def beyond_error(self) -> bool:
        """True if it is more than twice its standard error."""
        return abs(self.mean) > 2 * self.error

    @property
    def beyond_chance(self) -> bool:
        """True if chance alone would do as much in one of twenty comparisons, however few seeds there are."""
        return abs(self.mean) > _students_t(self.seeds - 1) * self.error


def paired(one: Sequence[float], other: Sequence[float]) -> Difference:
    """Compare two algorithms that were given the same seeds: `one` less `other`."""
    steps = [a - b for a, b in zip(one, other, strict=True)]
    error = statistics.stdev(steps) / math.sqrt(len(steps)) if len(steps) > 1 else math.inf
    return Difference(statistics.fmean(steps), error, len(steps))


def _students_t(freedom: int) -> float:
    """Two-sided, at 5 %; what isn't listed is a little too strict."""
    return next((t for least, t in ((9, 2.27), (4, 2.78), (3, 3.19), (2, 4.31)) if freedom >= least), 12.71)
