"""What makes one instance a better choice than another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

from agent_reach.config import checks
from agent_reach.errors import ConfigError

__all__ = ["AffinityConfig", "LocalityConfig", "ScoreWeights", "ScoringConfig", "Strategy", "check_strategy"]

Strategy: TypeAlias = Literal["single", "round_robin", "weighted_random"]
"""`single`: the better of a few drawn at random; `round_robin`: in turn; `weighted_random`: by announced weight."""

_STRATEGIES = ("single", "round_robin", "weighted_random")


def check_strategy(strategy: object) -> None:
    """Raise ConfigError if there is no such strategy."""
    if strategy not in _STRATEGIES:
        raise ConfigError(f"strategy={strategy!r} must be one of {', '.join(map(repr, _STRATEGIES))}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreWeights:
    """Shares of a weighted score; each part is 0..1, and the shares needn't add up to 1.

    `success`: answered of the last 50 calls; `latency`: the fastest rival's over its own; `load`: places left;
    `locality`: same zone 1, same region 0.5; `weight`: announced, relative to the heaviest rival's.
    """

    success: float = 0.0
    latency: float = 0.0
    load: float = 0.0
    locality: float = 0.0
    weight: float = 0.0

    BALANCED: ClassVar[ScoreWeights]
    AGENT: ClassVar[ScoreWeights]

    def __post_init__(self) -> None:
        for part in ("success", "latency", "load", "locality", "weight"):
            checks.number(self, part, least=0.0)
        if not self.success + self.latency + self.load + self.locality + self.weight > 0:
            raise ConfigError("ScoreWeights: at least one share must be above 0, like ScoreWeights(success=1)")


ScoreWeights.BALANCED = ScoreWeights(success=0.4, load=0.3, locality=0.2, weight=0.1)
ScoreWeights.AGENT = ScoreWeights(success=0.5, latency=0.3, load=0.2)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoringConfig:
    """The expected time of a call, with slow start (Envoy `slow_start.rst`); or a weighted score."""

    # After 10 s without news a latency has faded to 37 %: an instance ten times slower is tried again after 23 s.
    decay_s: float = 10.0
    # What an instance without history is taken for when its rival has none either (Linkerd seeds 30 ms).
    seed_latency_s: float = 0.03
    # A failure is booked as at least this slow, or an instance that fails in 1 ms would look the fastest.
    failure_latency_s: float = 5.0
    # Caches fill and pools open within seconds; ten of them at full load, on a process that can't bear it yet, are
    # an incident.
    slow_start_s: float = 10.0
    # Enough calls to learn from, few enough to lose little.
    slow_start_floor: float = 0.1
    # Of so many all are looked at for `single`; of more, so many are drawn. Two are enough where many callers share
    # many instances; of few the best is better than the better of two.
    choices: int = 8
    # How many calls at once an instance that announces no limit is taken to run without a queue.
    assumed_slots: int = 8
    # None: the expected time. Else the parts of the score that replaces it.
    weights: ScoreWeights | None = None

    def __post_init__(self) -> None:
        checks.number(self, "decay_s")
        checks.number(self, "seed_latency_s")
        checks.number(self, "failure_latency_s")
        checks.number(self, "slow_start_s", least=0.0)
        checks.number(self, "slow_start_floor", above=0.0, most=1.0)
        checks.whole(self, "choices", least=2)
        checks.whole(self, "assumed_slots", least=1)
        checks.instance(self, "weights", ScoreWeights, "or None")


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalityConfig:
    """Same zone first, then same region, then any; for a client that knows its own zone ("region/zone")."""

    # A call leaves its zone if it would take so many times longer there than further away. At 1 every short queue
    # would be answered by traffic that costs money; much higher, callers would wait for a zone that is too small.
    spill: float = 2.0

    def __post_init__(self) -> None:
        checks.number(self, "spill", least=1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class AffinityConfig:
    """Conversations (`context_id`) and the instances that hold them."""

    # At 200 bytes each that is 2 MB; what is forgotten is still found by its hash, unless the owner had changed.
    remembered: int = 10_000

    def __post_init__(self) -> None:
        checks.whole(self, "remembered", least=1)
