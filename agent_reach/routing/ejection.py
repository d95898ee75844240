"""How many of a capability's instances breakers may shut out, and when health is ignored altogether.

Ejection cap: Envoy `outlier_detection.proto` counts after the ejection; a fixed "always one" hurt small
pools (envoyproxy/envoy#26877). Panic: Envoy `panic_threshold.rst`. Neither counts instances where nothing listens:
that is no opinion of their health, and they can't bear a share of the load whatever we think of the others.
"""

from __future__ import annotations

from collections.abc import Sequence

from agent_reach.config import EjectionConfig
from agent_reach.routing.instance import Candidate, Instance

__all__ = ["may_shut_out", "panics"]


def may_shut_out(instance: Instance, candidates: Sequence[Candidate], now: float, config: EjectionConfig) -> bool:
    """True if `instance` may be shut out too: within the share, rounded down, and never the last one."""
    reachable = [c for c in candidates if not c.instance.breaker.unreachable]
    others_out = sum(1 for c in reachable if c.instance is not instance and not c.instance.breaker.available(now))
    out = others_out + 1
    return out <= int(len(reachable) * config.max_share) and out < len(reachable)


def panics(candidates: Sequence[Candidate], now: float, config: EjectionConfig) -> bool:
    """True if so few candidates are available that the fault is probably shared and health says nothing."""
    reachable = available = 0
    for candidate in candidates:
        breaker = candidate.instance.breaker
        if not breaker.unreachable:
            reachable += 1
            available += breaker.available(now)
    return available < reachable * config.panic_share
