"""Settings: frozen, grouped by concern, checked when built. Every default carries its reason.

Seconds are floats named `*_s`. A bad value raises `ConfigError` naming the setting and what it may be.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from agent_reach.config import checks
from agent_reach.config.calls import BulkheadConfig, HedgeConfig, LimitConfig, RetryConfig, TimeoutConfig
from agent_reach.config.choice import (
    AffinityConfig,
    LocalityConfig,
    ScoreWeights,
    ScoringConfig,
    Strategy,
    check_strategy,
)
from agent_reach.config.health import BreakerConfig, EjectionConfig
from agent_reach.config.operation import RegistryConfig, ServingConfig
from agent_reach.config.policy import Policy
from agent_reach.errors import ConfigError

__all__ = [
    "AffinityConfig",
    "BreakerConfig",
    "BulkheadConfig",
    "EjectionConfig",
    "HedgeConfig",
    "LimitConfig",
    "LocalityConfig",
    "Policy",
    "ReachConfig",
    "RegistryConfig",
    "RetryConfig",
    "ScoreWeights",
    "ScoringConfig",
    "ServingConfig",
    "Strategy",
    "TimeoutConfig",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReachConfig:
    """All settings of one client; give only those to change: `ReachConfig(retry=RetryConfig(max_attempts=2))`."""

    timeouts: TimeoutConfig = field(default_factory=TimeoutConfig)
    retry: RetryConfig = field(default_factory=RetryConfig)
    breaker: BreakerConfig = field(default_factory=BreakerConfig)
    ejection: EjectionConfig = field(default_factory=EjectionConfig)
    scoring: ScoringConfig = field(default_factory=ScoringConfig)
    locality: LocalityConfig = field(default_factory=LocalityConfig)
    affinity: AffinityConfig = field(default_factory=AffinityConfig)
    bulkheads: BulkheadConfig = field(default_factory=BulkheadConfig)
    registry: RegistryConfig = field(default_factory=RegistryConfig)
    serving: ServingConfig = field(default_factory=ServingConfig)
    # How instances are chosen, where the call doesn't say.
    strategy: Strategy = "single"
    # A second copy costs money where a model answers, so it is for those who ask for it.
    hedge: HedgeConfig | None = None
    # Depth of a call tree; real ones have 3 to 5 levels, a deeper one is a circle.
    hop_limit: int = 16

    def __post_init__(self) -> None:
        checks.whole(self, "hop_limit", least=1)
        checks.instance(self, "hedge", HedgeConfig, "or None")
        check_strategy(self.strategy)
        for concern in fields(self):
            wanted: Any = concern.default_factory
            value = getattr(self, concern.name)
            if isinstance(wanted, type) and not isinstance(value, wanted):
                raise ConfigError(f"ReachConfig.{concern.name} is {value!r}; it must be a {wanted.__name__}")
