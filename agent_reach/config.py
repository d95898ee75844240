"""Settings: frozen, grouped by concern, checked when built. Every default carries its reason.

Seconds are floats named `*_s`. A bad value raises `ConfigError` naming the setting and what it may be.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Literal

from agent_reach.errors import ConfigError

__all__ = [
    "BreakerConfig",
    "BulkheadConfig",
    "EjectionConfig",
    "ReachConfig",
    "RegistryConfig",
    "RetryConfig",
    "ScoringConfig",
    "ServingConfig",
    "TimeoutConfig",
]


def _number(
    owner: object, name: str, *, above: float = 0.0, least: float | None = None, most: float = math.inf
) -> None:
    """Check that the named setting is a finite number > `above` (or >= `least`) and <= `most`."""
    value = getattr(owner, name)
    low_ok = value_ok = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if value_ok:
        low_ok = value >= least if least is not None else value > above
    if not (value_ok and low_ok and value <= most):
        low = f">= {least:g}" if least is not None else f"> {above:g}"
        high = f" and <= {most:g}" if math.isfinite(most) else ""
        raise ConfigError(f"{type(owner).__name__}.{name} is {value!r}; it must be a number {low}{high}")


def _whole(owner: object, name: str, *, least: int) -> None:
    value = getattr(owner, name)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{type(owner).__name__}.{name} is {value!r}; it must be a whole number >= {least}")


def _file(owner: object, name: str) -> None:
    value = getattr(owner, name)
    if not isinstance(value, str | os.PathLike) or not os.fspath(value):
        raise ConfigError(f"{type(owner).__name__}.{name} is {value!r}; it must be the path of a file")
    if os.path.isdir(value) or not os.path.isdir(os.path.dirname(os.path.abspath(value))):
        raise ConfigError(f"{type(owner).__name__}.{name} is {value!r}; it must be a file in a folder that exists")


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
        _number(self, "connect_s")
        _number(self, "total_s")
        _number(self, "discovery_s")
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
        _whole(self, "max_attempts", least=1)
        _number(self, "base_s", least=0.0)
        _number(self, "multiplier", least=1.0)
        _number(self, "max_s", least=0.0)
        if self.tree_allowance is not None:
            _whole(self, "tree_allowance", least=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakerConfig:
    """When an instance is shut out, and for how long."""

    # Five in a row: at 1 % random failures that is one false trip in 10^10 calls.
    consecutive_failures: int = 5
    # Success below 80 % of at least 10 calls in 10 s (Finagle and Linkerd use 0.8; agents see few calls).
    success_rate: float = 0.8
    min_calls: int = 10
    window_s: float = 10.0
    # Equal-jittered: between half and the whole of it; doubles each time a probe fails, up to the cap.
    open_s: float = 30.0
    max_open_s: float = 300.0

    def __post_init__(self) -> None:
        _whole(self, "consecutive_failures", least=1)
        _number(self, "success_rate", least=0.0, most=1.0)
        _whole(self, "min_calls", least=1)
        _number(self, "window_s")
        _number(self, "open_s")
        _number(self, "max_open_s", least=self.open_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class EjectionConfig:
    """How many of a capability's instances breakers may shut out."""

    # At most half, rounded down, so never the only one: with one of two gone the other carries it all.
    max_share: float = 0.5
    # With fewer than half usable the fault is probably shared; ignoring health beats overloading the rest.
    panic_share: float = 0.5

    def __post_init__(self) -> None:
        _number(self, "max_share", least=0.0, most=1.0)
        _number(self, "panic_share", least=0.0, most=1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoringConfig:
    """Peak EWMA (finagle `PeakEwma.scala`) with slow start (Envoy `slow_start.rst`)."""

    # After 10 s without news a peak has decayed to 37 %: a slow instance is tried again within half a minute.
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

    def __post_init__(self) -> None:
        _number(self, "decay_s")
        _number(self, "seed_latency_s")
        _number(self, "failure_latency_s")
        _number(self, "slow_start_s", least=0.0)
        _number(self, "slow_start_floor", above=0.0, most=1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class BulkheadConfig:
    """Calls in flight from this client."""

    # To one instance that announces no limit of its own: enough for any agent, too few to drain the sockets.
    per_instance: int = 100
    # To one capability, for each call that it announces to run at a time: that one and three waiting, as agents
    # queue by default. More would be refused there, and a refusal costs an attempt.
    per_slot: int = 4

    def __post_init__(self) -> None:
        _whole(self, "per_instance", least=1)
        _whole(self, "per_slot", least=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistryConfig:
    """Registration and the cached index (DESIGN section 4)."""

    # A dead process is gone from every index within this; kept alive every third of it, two may be lost.
    lease_ttl_s: float = 15.0
    # Knowledge is fresh for refresh_s + U(0, refresh_jitter_s) after its last proof.
    refresh_s: float = 15.0
    refresh_jitter_s: float = 5.0
    # How long the last good index is served while etcd can't answer: longer than it takes a person to be called and
    # to bring it back.
    stale_grace_s: float = 900.0
    # One etcd request; a healthy etcd answers in 3 ms, an election takes 1 to 2 s.
    request_timeout_s: float = 3.0
    # Jittered back-off between attempts to reach etcd: never gives up, never a stampede. While nothing answers the
    # pause is half to the whole of it: about 15 dials in 30 s, and an agent is back within 3 s of etcd.
    backoff_base_s: float = 0.1
    backoff_max_s: float = 2.5
    # A file that keeps the last good view, for a process that starts while etcd can't be reached. One file for each
    # namespace; several processes may share it.
    snapshot_path: str | os.PathLike[str] | None = None
    # Older than this it isn't used: addresses have been given to others by then. A night's outage is covered.
    snapshot_max_age_s: float = 86_400.0
    # What entering the client does while etcd can't be reached.
    on_unavailable: Literal["keep_trying", "fail"] = "keep_trying"
    # What a contract clash with a live instance of the same capability does.
    schema_policy: Literal["warn", "refuse", "ignore"] = "warn"

    def __post_init__(self) -> None:
        # etcd counts leases in whole seconds; below 2 s three keep-alives don't fit an election.
        _number(self, "lease_ttl_s", least=2.0)
        _number(self, "refresh_s")
        _number(self, "refresh_jitter_s", least=0.0)
        _number(self, "stale_grace_s", least=0.0)
        _number(self, "request_timeout_s")
        _number(self, "backoff_base_s")
        _number(self, "backoff_max_s", least=self.backoff_base_s)
        _number(self, "snapshot_max_age_s")
        if self.snapshot_path is not None:
            _file(self, "snapshot_path")
        if self.on_unavailable not in ("keep_trying", "fail"):
            raise ConfigError(
                f"RegistryConfig.on_unavailable is {self.on_unavailable!r}; use 'keep_trying' or 'fail'"
            )
        if self.schema_policy not in ("warn", "refuse", "ignore"):
            raise ConfigError(
                f"RegistryConfig.schema_policy is {self.schema_policy!r}; use 'warn', 'refuse' or 'ignore'"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingConfig:
    """The callee's half (DESIGN section 6)."""

    # Each way, for callers too; a page of text is 10 KB, a long document 1 MB. Past it: 413.
    max_body_bytes: int = 8 * 1024 * 1024
    # Waiting places per running call; at 3 x the last in the queue waits about three service times.
    queue_factor: int = 3
    # After withdrawing, go on accepting: watchers learn within about a second.
    linger_s: float = 3.0
    # The whole drain: linger, running calls, close.
    drain_s: float = 30.0
    # How long a finished answer is kept for a repeat with the same explicit idempotency key: longer than any caller
    # goes on repeating. And how many: at 1 KB an answer that is 1 MB.
    dedupe_ttl_s: float = 300.0
    dedupe_entries: int = 1024

    def __post_init__(self) -> None:
        _whole(self, "max_body_bytes", least=1024)
        _whole(self, "queue_factor", least=0)
        _number(self, "linger_s", least=0.0)
        _number(self, "drain_s", least=self.linger_s)
        _number(self, "dedupe_ttl_s")
        _whole(self, "dedupe_entries", least=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReachConfig:
    """All settings of one client; give only those to change: `ReachConfig(retry=RetryConfig(max_attempts=2))`."""

    timeouts: TimeoutConfig = TimeoutConfig()
    retry: RetryConfig = RetryConfig()
    breaker: BreakerConfig = BreakerConfig()
    ejection: EjectionConfig = EjectionConfig()
    scoring: ScoringConfig = ScoringConfig()
    bulkheads: BulkheadConfig = BulkheadConfig()
    registry: RegistryConfig = RegistryConfig()
    serving: ServingConfig = ServingConfig()
    # Depth of a call tree; real ones have 3 to 5 levels, a deeper one is a circle.
    hop_limit: int = 16

    def __post_init__(self) -> None:
        _whole(self, "hop_limit", least=1)
        for concern in fields(self):
            value = getattr(self, concern.name)
            if concern.name != "hop_limit" and not isinstance(value, type(concern.default)):
                wanted = type(concern.default).__name__
                raise ConfigError(f"ReachConfig.{concern.name} is {value!r}; it must be a {wanted}")
