"""How long a call may take, how often it is tried, and how many are in flight."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from agent_reach.config import checks
from agent_reach.errors import ConfigError

__all__ = ["BulkheadConfig", "RetryConfig", "TimeoutConfig"]


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

    def __post_init__(self) -> None:
        checks.whole(self, "max_attempts", least=1)
        checks.number(self, "base_s", least=0.0)
        checks.number(self, "multiplier", least=1.0)
        checks.number(self, "max_s", least=0.0)
        if self.tree_allowance is not None:
            checks.whole(self, "tree_allowance", least=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class BulkheadConfig:
    """Calls in flight from this client."""

    # To one instance that announces no limit of its own: enough for any agent, too few to drain the sockets.
    per_instance: int = 100
    # To one capability, for each call that it announces to run at a time: that one and three waiting, as agents
    # queue by default. More would be refused there, and a refusal costs an attempt.
    per_slot: int = 4

    def __post_init__(self) -> None:
        checks.whole(self, "per_instance", least=1)
        checks.whole(self, "per_slot", least=1)
