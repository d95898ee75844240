"""Our own settings, one changed at a time: what each rule is good for."""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass
from statistics import median

from agent_reach.config import (
    BreakerConfig,
    BulkheadConfig,
    EjectionConfig,
    HedgeConfig,
    LimitConfig,
    LocalityConfig,
    ReachConfig,
    RetryConfig,
    ScoreWeights,
    ScoringConfig,
)
from agent_reach.testing.simulation import AgentReach, Algorithm
from tests.simulation.comparing import P99, SUCCESS, Measure, Outcomes, paired

__all__ = ["CHANGES", "COMMON", "Change", "Effect", "effects"]

COMMON = (
    "one-slow-of-eleven",
    "one-fails-fast",
    "two-die",
    "gray-failure",
    "half-fail",
    "all-fail-60",
    "mixed-capacity",
    "cold-joins",
    "overload",
)
"""Where every change is tried, whether it is expected to matter there or not."""


@dataclass(frozen=True, slots=True)
class Change:
    """One setting that differs from the default; `also`: scenarios beside the common ones. `name` is its anchor."""

    name: str
    text: str
    config: ReachConfig
    also: tuple[str, ...] = ()
    ignore_zone: bool = False

    @property
    def scenarios(self) -> tuple[str, ...]:
        """Where it is tried."""
        return tuple(dict.fromkeys(COMMON + self.also))

    @property
    def variant(self) -> str:
        """A digest of the settings: results of others aren't taken for these."""
        return hashlib.blake2b(f"{self.config}{self.ignore_zone}".encode(), digest_size=6).hexdigest()

    def algorithm(self, rng: random.Random, zone: str | None) -> Algorithm:
        """Build one client's algorithm."""
        return AgentReach(rng, self.config, zone=None if self.ignore_zone else zone)


def _scoring(name: str, text: str, *also: str, **changed: object) -> Change:
    return Change(name, text, ReachConfig(scoring=ScoringConfig(**changed)), also)  # type: ignore[arg-type]


def _breaker(name: str, text: str, *also: str, **changed: object) -> Change:
    return Change(name, text, ReachConfig(breaker=BreakerConfig(**changed)), also)  # type: ignore[arg-type]


def _retry(name: str, text: str, *also: str, **changed: object) -> Change:
    return Change(name, text, ReachConfig(retry=RetryConfig(**changed)), also)  # type: ignore[arg-type]


def _bulkheads(name: str, text: str, *also: str, **changed: object) -> Change:
    return Change(name, text, ReachConfig(bulkheads=BulkheadConfig(**changed)), also)  # type: ignore[arg-type]


def _locality(name: str, text: str, spill: float) -> Change:
    return Change(name, text, ReachConfig(locality=LocalityConfig(spill=spill)), ("zone-lost",))


_SHARED = ("shared-downstream", "lone-instance", "three-hops")

_ALL = (
    _scoring("choices-2", "the better of two (`choices=2`)", "partial-views", "stale-reports", choices=2),
    _scoring("decay-5", "latencies fade in 5 s (`decay_s=5`)", "slow-of-two", "pauses", decay_s=5.0),
    _scoring("decay-20", "latencies fade in 20 s (`decay_s=20`)", "slow-of-two", "pauses", decay_s=20.0),
    _scoring("slow-start-0", "no slow start (`slow_start_s=0`)", "rolling-restart", slow_start_s=0.0),
    _scoring("slow-start-20", "slow start of 20 s (`slow_start_s=20`)", "rolling-restart", slow_start_s=20.0),
    _scoring("weights-balanced", "weighted score `BALANCED`", "slow-of-two", weights=ScoreWeights.BALANCED),
    _scoring("weights-agent", "weighted score `AGENT`", "slow-of-two", weights=ScoreWeights.AGENT),
    Change("round-robin", "`strategy='round_robin'`", ReachConfig(strategy="round_robin"), ("slow-of-two",)),
    Change(
        "weighted-random", "`strategy='weighted_random'`", ReachConfig(strategy="weighted_random"), ("slow-of-two",)
    ),
    _breaker("breaker-5", "shut out for 5 s at first (`open_s=5`)", "lone-instance", open_s=5.0),
    _breaker(
        "breaker-off",
        "breaker as good as off (`consecutive_failures=10**6, success_rate=0`)",
        "slow-of-two",
        "lone-instance",
        consecutive_failures=10**6,
        success_rate=0.0,
    ),
    Change(
        "ejection-uncapped",
        "all may be shut out, no panic (`max_share=1, panic_share=0`)",
        ReachConfig(ejection=EjectionConfig(max_share=1.0, panic_share=0.0)),
        ("shared-downstream", "lone-instance"),
    ),
    _retry("budget-off", "retry budget as good as off (`budget_ratio=10`)", *_SHARED, budget_ratio=10.0),
    _retry("budget-tiny", "retry budget of 2 % (`budget_ratio=0.02`)", *_SHARED, budget_ratio=0.02),
    _retry("patience-0", "calls don't wait for an outage (`patience_s=0`)", *_SHARED, patience_s=0.0),
    _retry("patience-2", "they wait 2 s (`patience_s=2`)", *_SHARED, patience_s=2.0),
    _retry("patience-15", "they wait 15 s (`patience_s=15`)", *_SHARED, patience_s=15.0),
    _retry("backoff-0", "no pause before a repeat (`base_s=0`)", *_SHARED, base_s=0.0),
    _retry("backoff-50ms", "shorter pauses (`base_s=0.05`)", *_SHARED, base_s=0.05),
    _retry("attempts-2", "two attempts (`max_attempts=2`)", *_SHARED, max_attempts=2),
    _retry("attempts-4", "four attempts (`max_attempts=4`)", *_SHARED, max_attempts=4),
    Change(
        "hedging",
        "second copies (`hedge=HedgeConfig()`)",
        ReachConfig(hedge=HedgeConfig()),
        ("steady", "pauses", "long-and-short"),
    ),
    _bulkheads(
        "adaptive-limit",
        "learnt limits (`adaptive=LimitConfig()`)",
        "stale-reports",
        "bursts",
        adaptive=LimitConfig(),
    ),
    _bulkheads("per-slot-2", "two calls for each slot (`per_slot=2`)", "bursts", "stale-reports", per_slot=2),
    _bulkheads("per-slot-8", "eight calls for each slot (`per_slot=8`)", "bursts", "stale-reports", per_slot=8),
    Change("zones-ignored", "zones ignored", ReachConfig(), ("zone-lost",), ignore_zone=True),
    _locality("spill-1", "calls leave their zone for the least gain (`spill=1`)", 1.0),
    _locality("spill-never", "calls stay in their zone while anybody there is usable (`spill=1e9`)", 1e9),
)
CHANGES: dict[str, Change] = {change.name: change for change in _ALL}


@dataclass(frozen=True, slots=True)
class Effect:
    """What a change does to one measure in one scenario, where that is more than chance and worth a word."""

    scenario: str
    measure: Measure
    default: float
    changed: float

    @property
    def better(self) -> bool:
        """True if the change is for the better."""
        return self.measure.better(self.changed, self.default)


def effects(default: Outcomes, changed: Outcomes, ours: str, change: str) -> list[Effect]:
    """Compare one change with the default, with the same seeds; what is within the spread is left out."""
    found = []
    for scenario, by_name in changed.items():
        after = by_name[change]
        before = default[scenario][ours]
        for measure in (SUCCESS, P99):
            one, other = measure.values(after), measure.values(before)
            was, is_now = median(other), median(one)
            # The medians, which the page shows, must say the same as the differences seed by seed.
            step = paired(one, other)
            if step.beyond_chance and measure.matters(is_now, was) and (is_now > was) == (step.mean > 0):
                found.append(Effect(scenario, measure, was, is_now))
    return found
