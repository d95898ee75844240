"""How long a call may take, how often it is tried, and how many are in flight."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from agent_reach.config import checks
from agent_reach.errors import ConfigError

__all__ = ["BulkheadConfig", "HedgeConfig", "LimitConfig", "RetryConfig", "TimeoutConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeoutConfig:
    """How long a call and each of its attempts may take.

    `tiers` maps a capability's declared tier to the seconds of one attempt.
    """

    # On a LAN a TCP handshake takes under 10 ms; 1 s allows one lost SYN (retransmitted after 1 s at the
    # latest on Linux) and still leaves most of a 3 s tier for another instance.
    connect_s: float = 1.0
    # Total of a call without `timeout=`: tier x attempts, but a person rarely waits longer than this.
    total_s: float = 30.0
    # How long a call waits for the first list of agents; a healthy etcd gives it in 0.1 s, an election takes 2 s.
    discovery_s: float = 5.0
    tiers: Mapping[str, float] = field(
        default_factory=lambda: MappingProxyType(
            {"light": 3.0, "interactive": 5.0, "write": 5.0, "heavy": 10.0, "long": 60.0}
        )
    )

    def __post_init__(self) -> None:
        checks.number(self, "connect_s")
        checks.number(self, "total_s")
        checks.number(self, "discovery_s")
        # A dict that somebody else holds could change under us.
        object.__setattr__(self, "tiers", MappingProxyType(dict(self.tiers)))
        for tier, seconds in self.tiers.items():
            if not isinstance(seconds, int | float) or not math.isfinite(seconds) or seconds <= 0:
                raise ConfigError(f"TimeoutConfig.tiers[{tier!r}] is {seconds!r}; it must be seconds > 0")

    def tier_of(self, timeout: str | float) -> str:
        """The tier that a capability's time belongs to: its own, or the shortest that is as long as a number."""
        if isinstance(timeout, str):
            return timeout if timeout in self.tiers else "interactive"
        by_length = sorted((seconds, tier) for tier, seconds in self.tiers.items())
        longer = [tier for seconds, tier in by_length if seconds >= timeout]
        return longer[0] if longer else by_length[-1][1] if by_length else "interactive"

    def of(self, timeout: str | float) -> float:
        """Seconds of one attempt for a tier or a number; a tier unknown here counts as `interactive`."""
        if isinstance(timeout, str):
            # A newer peer may name a tier that this version doesn't know; refusing to call it helps nobody.
            return self.tiers.get(timeout, self.tiers.get("interactive", 5.0))
        return timeout


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryConfig:
    """Attempts and the back-off between them. An attempt that never left this process isn't counted while
    an untried instance is left: a refused connection costs the peers nothing.
    """

    # First try, one more elsewhere, one for bad luck; at 3 hops the call-tree allowance bounds the product.
    max_attempts: int = 3
    # 0.2 s, then 0.6 s, each with full jitter (AWS Architecture Blog, "Exponential Backoff And Jitter").
    base_s: float = 0.2
    multiplier: float = 3.0
    # A pause as long as the most usual tier: whoever waits longer has missed its deadline.
    max_s: float = 5.0
    # What one root call's whole tree may spend on retries: two failures anywhere, not two per hop. None: as many as
    # its own attempts allow, max_attempts - 1.
    tree_allowance: int | None = None
    # Retries of one capability within the window: this share of its calls (Finagle, Envoy: 20 %), so that an outage
    # makes 1.2 times the load and not three times; but so many at least (Envoy: 3), or one call in ten seconds had
    # none.
    budget_ratio: float = 0.2
    budget_least: int = 3
    budget_window_s: float = 10.0
    # How long a call waits for a capability of which all calls fail, whichever instance they go to: long enough
    # for a restart or a fail-over of what they depend on, short for whoever waits. 0: it is sent, and fails.
    patience_s: float = 5.0

    def __post_init__(self) -> None:
        checks.whole(self, "max_attempts", least=1)
        checks.number(self, "budget_ratio", least=0.0, most=10.0)
        checks.whole(self, "budget_least", least=0)
        checks.number(self, "budget_window_s")
        checks.number(self, "patience_s", least=0.0)
        checks.number(self, "base_s", least=0.0)
        checks.number(self, "multiplier", least=1.0)
        checks.number(self, "max_s", least=0.0)
        if self.tree_allowance is not None:
            checks.whole(self, "tree_allowance", least=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class HedgeConfig:
    """A second copy of an idempotent call, elsewhere, when the first takes longer than most did; the first answer
    wins and the other is cancelled (Dean and Barroso, "The Tail at Scale", 2013; finagle `BackupRequestFilter`).
    """

    # Slower than 95 of 100: the copies are 5 % more load.
    percentile: float = 0.95
    # At most this share of a capability's calls, or an overload would be made worse by it (grafana/loki#4826).
    budget_ratio: float = 0.05
    # Below this a second copy costs more than it can win.
    least_s: float = 0.005
    # How many answers the percentile needs to mean something.
    min_samples: int = 20

    def __post_init__(self) -> None:
        checks.number(self, "percentile", above=0.0, most=1.0)
        checks.number(self, "budget_ratio", least=0.0, most=1.0)
        checks.number(self, "least_s", least=0.0)
        checks.whole(self, "min_samples", least=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitConfig:
    """Learn from latencies how many calls an instance bears at once (Netflix concurrency-limits, `Gradient2Limit`).

    For instances that announce no `max_concurrency`; off unless it is given to `BulkheadConfig.adaptive`.
    """

    initial: int = 20
    least: int = 4
    # No more than `BulkheadConfig.per_instance`, which counts as well.
    most: int = 100
    # Latency may rise by half before the limit falls.
    tolerance: float = 1.5
    smoothing: float = 0.2
    # How many answers the long average spans.
    long_window: int = 600

    def __post_init__(self) -> None:
        checks.whole(self, "least", least=1)
        checks.whole(self, "initial", least=self.least)
        checks.whole(self, "most", least=self.initial)
        checks.number(self, "tolerance", least=1.0)
        checks.number(self, "smoothing", above=0.0, most=1.0)
        checks.whole(self, "long_window", least=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class BulkheadConfig:
    """Calls in flight from this client."""

    # To one instance that announces no limit of its own: enough for any agent, too few to drain the sockets.
    per_instance: int = 100
    # To one capability, for each call that it announces to run at a time: that one and three waiting, as agents
    # queue by default. More would be refused there, and a refusal costs an attempt.
    per_slot: int = 4
    # To all capabilities of one timeout tier: half of the 1,024 sockets that a process usually may open, so that
    # calls that take minutes leave room for those that take milliseconds.
    per_tier: int = 500
    adaptive: LimitConfig | None = None

    def __post_init__(self) -> None:
        checks.whole(self, "per_instance", least=1)
        checks.whole(self, "per_slot", least=1)
        checks.whole(self, "per_tier", least=1)
        checks.instance(self, "adaptive", LimitConfig, "or None")
