"""(candidate, now) -> cost. The lowest is best.

The expected time until an answer, in seconds:

    latency = the mean of what calls took, or how long most of those in flight have taken so far, whichever is more
    cost    = latency x (1 + calls in flight / sqrt(slots)) / weight

After finagle's `PeakEwma.scala`, whose cost is latency x (calls in flight + 1). Of an instance that says it runs
s calls at a time, one more of ours costs more than 1/s of a call, since we don't see those of other callers, and
less than a whole one; the root lies between, and did best in simulation (docs/routing.md).

Slow start (Envoy `slow_start.rst`, linear from the floor to 1) is no part of the cost: the best is picked, so a
handicap would keep a newcomer from every call until it is gone. It is a share of the draws instead, taken in
selection.py.

Weighted: parts of 0..1 each, times their shares; a cost is what is missing to a perfect score.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from agent_reach.config import ReachConfig, ScoreWeights, ScoringConfig
from agent_reach.routing.instance import Candidate
from agent_reach.routing.locality import distance

__all__ = ["ExpectedTimeScorer", "Score", "Scorer", "WeightedScorer", "scorer_of"]


@dataclass(frozen=True, slots=True)
class Score:
    """A cost with its parts: latency in seconds, calls of ours in flight, slots and weight as announced or assumed.

    `warm`, 0..1, is the share of its draws that an instance takes part in. `known` is False while the instance has
    no history, so that `latency_s` is an assumption; `failed` if `latency_s` is what is left of its latest failure;
    `waiting` if it is how long most calls in flight have taken so far. `parts`, of a weighted score: (name, 0..1,
    share) of each.
    """

    cost: float
    latency_s: float
    in_flight: int
    slots: int
    weight: float
    warm: float
    known: bool
    failed: bool
    waiting: bool
    parts: tuple[tuple[str, float, float], ...] = ()

    def __str__(self) -> str:
        warming = f", warming up ({self.warm:.0%})" if self.warm < 1 else ""
        if self.parts:
            total = " + ".join(f"{name} {value:.2f} x {share:g}" for name, value, share in self.parts)
            return f"cost {self.cost:.4f} = missing to {total}{warming}"
        latency = f"{self.latency_s * 1000:.1f} ms"
        if self.waiting:
            latency += " (calls in flight so far)"
        elif not self.known:
            latency += " (assumed)"
        elif self.failed:
            latency += " (booked for a failure)"
        load = f"(1 + {self.in_flight} in flight / sqrt({self.slots} slots))"
        return f"cost {self.cost:.4f} = latency {latency} x {load} / weight {self.weight:g}{warming}"


class Scorer(Protocol):
    """Gives costs to candidates that are compared with each other. Reads only."""

    def costs(self, rivals: Sequence[Candidate], now: float) -> list[float]:
        """Return the cost of sending one more call to each of `rivals`."""
        ...

    def scores(self, rivals: Sequence[Candidate], now: float) -> list[Score]:
        """Return the same costs with their parts."""
        ...

    def warm(self, candidate: Candidate, now: float) -> float:
        """Return the share of its draws that an instance takes part in."""
        ...


class ExpectedTimeScorer:
    """The default scorer."""

    __slots__ = ("_config",)

    def __init__(self, config: ScoringConfig) -> None:
        self._config = config

    def costs(self, rivals: Sequence[Candidate], now: float) -> list[float]:
        """Return an estimate of seconds until an answer for each."""
        return [
            # Of all calls to the instance: whatever keeps it busy, it has less time for this one.
            latency_s * (1.0 + c.instance.in_flight / c.slots_root) / c.instance.info.weight
            for c, latency_s in zip(rivals, self.latencies(rivals, now), strict=True)
        ]

    def scores(self, rivals: Sequence[Candidate], now: float) -> list[Score]:
        """Return the same costs with their parts."""
        costs, latencies = self.costs(rivals, now), self.latencies(rivals, now)
        return [self.parted(*one, now) for one in zip(rivals, costs, latencies, strict=True)]

    def latencies(self, rivals: Sequence[Candidate], now: float) -> list[float]:
        """Return what a call takes at each of `rivals`, queueing left out, in seconds.

        One that never answered is taken for as fast as the fastest whose calls don't fail: a fixed guess would
        either flood a newcomer or starve it.
        """
        latencies = [c.learnt.latency.at(now) for c in rivals]
        if not all(c.learnt.latency.mean_s for c in rivals):
            known = [
                latency_s
                for c, latency_s in zip(rivals, latencies, strict=True)
                if c.learnt.latency.mean_s and latency_s > c.learnt.latency.booked_s(now)
            ]
            fastest = min(known, default=self._config.seed_latency_s)
            latencies = [
                latency_s if c.learnt.latency.mean_s else max(latency_s, fastest)
                for c, latency_s in zip(rivals, latencies, strict=True)
            ]
        for place, candidate in enumerate(rivals):
            if candidate.learnt.began:
                latencies[place] = max(latencies[place], candidate.learnt.age_s(now))
        return latencies

    def warm(self, candidate: Candidate, now: float) -> float:
        """Rises from the floor to 1 within the window."""
        age_s, window_s = now - candidate.instance.warm_from, self._config.slow_start_s
        if age_s >= window_s:
            return 1.0
        return max(self._config.slow_start_floor, age_s / window_s)

    def parted(
        self,
        candidate: Candidate,
        cost: float,
        latency_s: float,
        now: float,
        parts: tuple[tuple[str, float, float], ...] = (),
    ) -> Score:
        """Put a cost and what it is made of together."""
        instance, learnt = candidate.instance, candidate.learnt
        return Score(
            cost,
            latency_s,
            instance.in_flight,
            candidate.slots or self._config.assumed_slots,
            instance.info.weight,
            self.warm(candidate, now),
            learnt.latency.samples > 0,
            learnt.latency.failed_s > 0 and learnt.latency.booked_s(now) >= latency_s,
            learnt.in_flight > 0 and learnt.age_s(now) >= latency_s,
            parts,
        )


class WeightedScorer:
    """Adds up what is good about an instance, in the shares that the settings name."""

    __slots__ = ("_expected", "_shares", "_zone")

    def __init__(self, config: ScoringConfig, shares: ScoreWeights, zone: str | None) -> None:
        self._expected = ExpectedTimeScorer(config)
        self._shares = shares
        self._zone = zone

    def costs(self, rivals: Sequence[Candidate], now: float) -> list[float]:
        """Return what is missing to a perfect score for each."""
        return [_missing(parts) for parts in self._parts(rivals, self._expected.latencies(rivals, now), now)]

    def scores(self, rivals: Sequence[Candidate], now: float) -> list[Score]:
        """Return the same costs with their parts."""
        latencies = self._expected.latencies(rivals, now)
        return [
            self._expected.parted(candidate, _missing(parts), latency_s, now, parts)
            for candidate, latency_s, parts in zip(
                rivals, latencies, self._parts(rivals, latencies, now), strict=True
            )
        ]

    def warm(self, candidate: Candidate, now: float) -> float:
        """Rises from the floor to 1 within the window."""
        return self._expected.warm(candidate, now)

    def _parts(
        self, rivals: Sequence[Candidate], latencies: Sequence[float], now: float
    ) -> list[tuple[tuple[str, float, float], ...]]:
        shares = self._shares
        fastest, heaviest = min(latencies), max(c.instance.info.weight for c in rivals)
        parts = []
        for candidate, latency_s in zip(rivals, latencies, strict=True):
            instance = candidate.instance
            taken = instance.in_flight / (candidate.slots or candidate.instance_limit)
            every = (
                ("success", candidate.learnt.success.at(now), shares.success),
                ("latency", fastest / latency_s if latency_s > 0 else 1.0, shares.latency),
                ("load", max(0.0, 1.0 - taken), shares.load),
                ("locality", 1.0 - distance(self._zone, instance.info.zone) / 2, shares.locality),
                ("weight", instance.info.weight / heaviest, shares.weight),
            )
            parts.append(tuple(part for part in every if part[2]))
        return parts


def scorer_of(config: ReachConfig, zone: str | None) -> Scorer:
    """The scorer that the settings ask for; `zone` is the caller's own."""
    if config.scoring.weights is None:
        return ExpectedTimeScorer(config.scoring)
    return WeightedScorer(config.scoring, config.scoring.weights, zone)


def _missing(parts: tuple[tuple[str, float, float], ...]) -> float:
    return sum((1.0 - value) * share for _, value, share in parts)
