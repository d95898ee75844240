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

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from agent_reach.config import ReachConfig, ScoreWeights, ScoringConfig
from agent_reach.routing.instance import Candidate
from agent_reach.routing.locality import distance

__all__ = ["ExpectedTimeScorer", "Rivals", "Score", "Scorer", "WeightedScorer", "scorer_of"]


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


@dataclass(frozen=True, slots=True)
class Rivals:
    """What is compared with what: the lowest latency among them, in seconds, and the highest weight."""

    latency_s: float
    weight: float


class Scorer(Protocol):
    """Gives costs. Reads only."""

    def rivals(self, candidates: Sequence[Candidate], now: float) -> Rivals:
        """Look at those that are compared with each other."""
        ...

    def cost(self, candidate: Candidate, now: float, rivals: Rivals) -> float:
        """Return the cost of sending one more call to `candidate`."""
        ...

    def score(self, candidate: Candidate, now: float, rivals: Rivals) -> Score:
        """Return the same cost with its parts."""
        ...

    def warm(self, candidate: Candidate, now: float) -> float:
        """Return the share of its draws that an instance takes part in."""
        ...


class ExpectedTimeScorer:
    """The default scorer."""

    __slots__ = ("_config", "_root")

    def __init__(self, config: ScoringConfig) -> None:
        self._config = config
        self._root = math.sqrt(config.assumed_slots)

    def rivals(self, candidates: Sequence[Candidate], now: float) -> Rivals:
        """What an instance without history is taken for: the fastest of its rivals whose calls don't fail.

        A fixed guess would either flood a newcomer or starve it.
        """
        fastest = heaviest = 0.0
        for candidate in candidates:
            latency, weight = candidate.learnt.latency, candidate.instance.info.weight
            if weight > heaviest:
                heaviest = weight
            if latency.mean_s:
                value = latency.at(now)
                if (value < fastest or not fastest) and not (latency.failed_s and latency.booked_s(now) >= value):
                    fastest = value
        return Rivals(fastest or self._config.seed_latency_s, heaviest)

    def cost(self, candidate: Candidate, now: float, rivals: Rivals) -> float:
        """Return an estimate of seconds until an answer."""
        instance, slots = candidate.instance, candidate.slots
        # Of all calls to the instance: whatever keeps it busy, it has less time for this one.
        load = 1.0 + instance.in_flight / (math.sqrt(slots) if slots else self._root)
        return self.latency_s(candidate, now, rivals) * load / instance.info.weight

    def score(self, candidate: Candidate, now: float, rivals: Rivals) -> Score:
        """Return the same cost with its parts."""
        return self.parts_of(candidate, now, rivals, self.cost(candidate, now, rivals))

    def latency_s(self, candidate: Candidate, now: float, rivals: Rivals) -> float:
        """What a call takes there, queueing left out, in seconds."""
        learnt = candidate.learnt
        latency_s = learnt.latency.at(now)
        if not learnt.latency.mean_s:
            # It never answered: what is left of a failure says nothing of how fast it is.
            latency_s = max(latency_s, rivals.latency_s)
        if learnt.began:
            age_s = learnt.age_s(now)
            if age_s > latency_s:
                return age_s
        return latency_s

    def parts_of(
        self,
        candidate: Candidate,
        now: float,
        rivals: Rivals,
        cost: float,
        parts: tuple[tuple[str, float, float], ...] = (),
    ) -> Score:
        """Put a cost and what it is made of together."""
        instance, learnt = candidate.instance, candidate.learnt
        latency_s = self.latency_s(candidate, now, rivals)
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

    def warm(self, candidate: Candidate, now: float) -> float:
        """Rises from the floor to 1 within the window."""
        age_s, window_s = now - candidate.instance.warm_from, self._config.slow_start_s
        if age_s >= window_s:
            return 1.0
        return max(self._config.slow_start_floor, age_s / window_s)

    @staticmethod
    def _latency_s(candidate: Candidate, now: float, rivals: Rivals) -> float:
        learnt = candidate.learnt
        latency_s = learnt.latency.at(now)
        if not learnt.latency.mean_s:
            # It never answered: what is left of a failure says nothing of how fast it is.
            latency_s = max(latency_s, rivals.latency_s)
        age_s = learnt.age_s(now)
        return max(latency_s, age_s)


class WeightedScorer:
    """Adds up what is good about an instance, in the shares that the settings name."""

    __slots__ = ("_latencies", "_shares", "_zone")

    def __init__(self, config: ScoringConfig, shares: ScoreWeights, zone: str | None) -> None:
        self._latencies = ExpectedTimeScorer(config)
        self._shares = shares
        self._zone = zone

    def rivals(self, candidates: Sequence[Candidate], now: float) -> Rivals:
        """The fastest and the heaviest: parts are relative to them."""
        return self._latencies.rivals(candidates, now)

    def cost(self, candidate: Candidate, now: float, rivals: Rivals) -> float:
        """Return what is missing to a perfect score."""
        return sum((1.0 - value) * share for _, value, share in self._parts(candidate, now, rivals))

    def score(self, candidate: Candidate, now: float, rivals: Rivals) -> Score:
        """Return the same cost with its parts."""
        parts = self._parts(candidate, now, rivals)
        cost = sum((1.0 - value) * share for _, value, share in parts)
        return self._latencies.parts_of(candidate, now, rivals, cost, parts)

    def warm(self, candidate: Candidate, now: float) -> float:
        """Rises from the floor to 1 within the window."""
        return self._latencies.warm(candidate, now)

    def _parts(self, candidate: Candidate, now: float, rivals: Rivals) -> tuple[tuple[str, float, float], ...]:
        shares, instance = self._shares, candidate.instance
        latency_s = self._latencies.latency_s(candidate, now, rivals)
        taken = instance.in_flight / (candidate.slots or instance.limit)
        parts = (
            ("success", candidate.learnt.success.at(now), shares.success),
            ("latency", min(1.0, rivals.latency_s / latency_s) if latency_s > 0 else 1.0, shares.latency),
            ("load", max(0.0, 1.0 - taken), shares.load),
            ("locality", 1.0 - distance(self._zone, instance.info.zone) / 2, shares.locality),
            ("weight", instance.info.weight / rivals.weight if rivals.weight else 1.0, shares.weight),
        )
        return tuple(part for part in parts if part[2])


def scorer_of(config: ReachConfig, zone: str | None) -> Scorer:
    """The scorer that the settings ask for; `zone` is the caller's own."""
    if config.scoring.weights is None:
        return ExpectedTimeScorer(config.scoring)
    return WeightedScorer(config.scoring, config.scoring.weights, zone)
