"""When calls come."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from agent_reach.testing.simulation.distributions import Constant, Distribution

__all__ = ["Arrivals", "Bursts", "ClosedLoop", "Poisson"]


class Arrivals(Protocol):
    """Calls that come whether or not earlier ones were answered."""

    def times(self, rng: random.Random, from_s: float) -> Iterator[float]:
        """Yield the times of all calls from `from_s` on, in seconds, never falling."""
        ...


@dataclass(frozen=True, slots=True)
class Poisson:
    """Independent callers: `per_s` calls a second, or a list of (from_s, per_s) for a rate that changes.

    >>> Poisson([(0, 100), (10, 500), (20, 100)])  # a peak of ten seconds
    Poisson(per_s=[(0, 100), (10, 500), (20, 100)])
    """

    per_s: float | Sequence[tuple[float, float]]

    def times(self, rng: random.Random, from_s: float) -> Iterator[float]:
        """Yield the times: unit exponentials, stretched by the rate of the moment."""
        steps = [(0.0, self.per_s)] if isinstance(self.per_s, int | float) else list(self.per_s)
        ends = [start for start, _ in steps[1:]] + [math.inf]
        now, piece = max(from_s, steps[0][0]), 0
        while True:
            need = -math.log(1.0 - rng.random())
            while True:
                rate, end = steps[piece][1], ends[piece]
                room = (end - now) * rate if rate > 0 else 0.0
                if need <= room and rate > 0:
                    now += need / rate
                    break
                if end == math.inf:
                    return
                need -= max(0.0, room)
                now, piece = max(now, end), piece + 1
            yield now


@dataclass(frozen=True, slots=True)
class Bursts:
    """`size` calls at once, every `every_s` seconds: a timer, or one agent that fans out."""

    size: int
    every_s: float

    def times(self, rng: random.Random, from_s: float) -> Iterator[float]:
        """Yield each burst's time `size` times."""
        burst = 0
        while True:
            for _ in range(self.size):
                yield from_s + burst * self.every_s
            burst += 1


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """`workers` who each call, wait for the end, think, and call again: load that yields to slowness."""

    workers: int
    think_s: float | Distribution = 0.0

    @property
    def thinking(self) -> Distribution:
        """How long a worker thinks."""
        return Constant(self.think_s) if isinstance(self.think_s, int | float) else self.think_s
