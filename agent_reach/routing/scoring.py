"""(candidate, now) -> cost. Lower is better; a cost is an estimate of seconds until an answer.

    cost = decayed peak latency x (calls in flight + 1) / (weight x warm-up share)

After finagle `PeakEwma.scala`; warm-up after Envoy `slow_start.rst`, linear from the floor to 1.
"""

from __future__ import annotations

from dataclasses import dataclass

from agent_reach.config import ScoringConfig
from agent_reach.routing.instance import Candidate

__all__ = ["PeakEwmaScorer", "Score"]


@dataclass(frozen=True, slots=True)
class Score:
    """A cost with its parts: latency in seconds, calls in flight, announced weight, warm-up share 0..1.

    `known` is False while the instance has no history, so that `latency_s` is an assumption.
    """

    cost: float
    latency_s: float
    in_flight: int
    weight: float
    warm: float
    known: bool

    def __str__(self) -> str:
        latency = f"{self.latency_s * 1000:.1f} ms" if self.known else f"{self.latency_s * 1000:.0f} ms assumed"
        return (
            f"cost {self.cost:.4f} = latency {latency} x ({self.in_flight} in flight + 1)"
            f" / (weight {self.weight:g} x warm {self.warm:.2f})"
        )


class PeakEwmaScorer:
    """The default scorer."""

    __slots__ = ("_config",)

    def __init__(self, config: ScoringConfig) -> None:
        self._config = config

    def score(self, candidate: Candidate, now: float, rivals: tuple[Candidate, ...] = ()) -> Score:
        """Return the cost of sending one more call to `candidate` at `now`.

        An instance without history is taken for as fast as the fastest of its `rivals` with one: a fixed guess
        would either flood a newcomer or starve it.
        """
        known = candidate.latency.samples > 0
        latency_s = candidate.latency.at(now) if known else self._assumed(now, rivals)
        instance = candidate.instance
        weight = instance.info.weight
        warm = self._warm(now - instance.warm_from)
        cost = latency_s * (instance.in_flight + 1) / (weight * warm)
        return Score(cost, latency_s, instance.in_flight, weight, warm, known)

    def _assumed(self, now: float, rivals: tuple[Candidate, ...]) -> float:
        known = [rival.latency.at(now) for rival in rivals if rival.latency.samples > 0]
        return min(known, default=self._config.seed_latency_s)

    def _warm(self, age_s: float) -> float:
        window_s = self._config.slow_start_s
        if age_s >= window_s:
            return 1.0
        return max(self._config.slow_start_floor, age_s / window_s)
