"""How long things take."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from statistics import NormalDist
from typing import Protocol

__all__ = ["Bimodal", "Constant", "Distribution", "Exponential", "LogNormal"]

_NORMAL = NormalDist()


class Distribution(Protocol):
    """Anything that draws seconds."""

    def draw(self, rng: random.Random) -> float:
        """Return seconds >= 0; the only randomness is `rng`."""
        ...


@dataclass(frozen=True, slots=True)
class Constant:
    """Always `seconds`."""

    seconds: float

    def draw(self, rng: random.Random) -> float:
        """Return the constant."""
        return self.seconds


@dataclass(frozen=True, slots=True)
class Exponential:
    """Memoryless, `mean_s` seconds on average."""

    mean_s: float

    def draw(self, rng: random.Random) -> float:
        """Draw by inversion: one number, so that a faster server draws the same luck."""
        return -self.mean_s * math.log(1.0 - rng.random())


@dataclass(frozen=True, slots=True)
class LogNormal:
    """Half of the draws are below `median_s`; `sigma` is the spread of the logarithm.

    0.5 is a healthy service (p99 at 3.2 x the median), 1.0 a language model (p99 at 10 x the median).
    """

    median_s: float
    sigma: float = 0.5

    def draw(self, rng: random.Random) -> float:
        """Draw by inversion."""
        # 0 has no quantile; half of the smallest step above it is as good.
        return self.median_s * math.exp(self.sigma * _NORMAL.inv_cdf(rng.random() or 2.0**-54))


@dataclass(frozen=True, slots=True)
class Bimodal:
    """Mostly `short` (a hit), in `long_share` of the draws `long` (a miss); each is seconds or a distribution."""

    short: float | Distribution
    long: float | Distribution
    long_share: float

    def draw(self, rng: random.Random) -> float:
        """Draw which, then how long."""
        chosen = self.long if rng.random() < self.long_share else self.short
        return chosen if isinstance(chosen, int | float) else chosen.draw(rng)
