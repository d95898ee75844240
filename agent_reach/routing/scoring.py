"""(candidate, now) -> cost. Lower is better; a cost is an estimate of seconds until an answer.

    cost = decayed peak latency x (calls in flight + 1) / weight

After finagle `PeakEwma.scala`. Slow start (Envoy `slow_start.rst`, linear from the floor to 1) is no part of the
cost: the better of two is picked, so a handicap would keep a newcomer from every call until it is gone. It is a
share of the draws instead, taken in selection.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agent_reach.config import ScoringConfig
from agent_reach.routing.instance import Candidate

__all__ = ["PeakEwmaScorer", "Score"]


@dataclass(frozen=True, slots=True)
class Score:
    """A cost with its parts: latency in seconds, calls in flight, announced weight.

    `warm`, 0..1, is the share of its draws that an instance takes part in. `known` is False while the instance has
    no history, so that `latency_s` is an assumption; `failed` if its latest call failed, so that `latency_s` is
    what a failure is booked as.
    """

    cost: float
    latency_s: float
    in_flight: int
    weight: float
    warm: float
    known: bool
    failed: bool

    def __str__(self) -> str:
        latency = f"{self.latency_s * 1000:.1f} ms"
        if not self.known:
            latency += " (assumed)"
        elif self.failed:
            latency += " (booked for a failure)"
        warming = f", warming up ({self.warm:.0%})" if self.warm < 1 else ""
        load = f"({self.in_flight} in flight + 1)"
        return f"cost {self.cost:.4f} = latency {latency} x {load} / weight {self.weight:g}{warming}"


class PeakEwmaScorer:
    """The default scorer."""

    __slots__ = ("_config",)

    def __init__(self, config: ScoringConfig) -> None:
        self._config = config

    def score(self, candidate: Candidate, now: float, assumed_s: float | None = None) -> Score:
        """Return the cost of sending one more call to `candidate` at `now`; `assumed_s` is its latency, in seconds,
        if it has no history.
        """
        known = candidate.latency.samples > 0
        latency_s = candidate.latency.at(now) if known else self._config.seed_latency_s
        if not known and assumed_s is not None:
            latency_s = assumed_s
        instance = candidate.instance
        weight = instance.info.weight
        warm = self._warm(now - instance.warm_from)
        # Of all calls to the instance: whatever keeps it busy, it has less time for this one.
        cost = latency_s * (instance.in_flight + 1) / weight
        return Score(cost, latency_s, instance.in_flight, weight, warm, known, candidate.latency.failed)

    def assumed_s(self, rivals: Sequence[Candidate], now: float) -> float:
        """What an instance without history is taken for: the fastest of its rivals that answered last.

        A fixed guess would either flood a newcomer or starve it.
        """
        answered = [r.latency.at(now) for r in rivals if r.latency.samples > 0 and not r.latency.failed]
        return min(answered, default=self._config.seed_latency_s)

    def _warm(self, age_s: float) -> float:
        window_s = self._config.slow_start_s
        if age_s >= window_s:
            return 1.0
        return max(self._config.slow_start_floor, age_s / window_s)
