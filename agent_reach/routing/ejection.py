"""How many of a capability's instances breakers may shut out, and when health is ignored altogether.

Ejection cap: Envoy `outlier_detection.proto` counts after the ejection; a fixed "always one" hurt small
pools (envoyproxy/envoy#26877). Panic: Envoy `panic_threshold.rst`. Neither counts instances where nothing listens:
that is no opinion of their health, and they can't bear a share of the load whatever we think of the others.

An instance is shut out only while another one is well, as outliers are ejected only relative to others
(grpc/proposal A50): where all fail alike the fault is shared, and each one less only adds to the load of the
rest.
"""

from __future__ import annotations

from collections.abc import Sequence

from agent_reach.config import EjectionConfig
from agent_reach.routing.instance import Candidate, Instance

__all__ = ["may_shut_out", "panics"]


def may_shut_out(instance: Instance, candidates: Sequence[Candidate], now: float, config: EjectionConfig) -> bool:
    """True if `instance` may be shut out too: within the share, rounded down, and while another one is well."""
    reachable = out = 0
    another = False
    for candidate in candidates:
        breaker = candidate.instance.breaker
        if breaker.unreachable:
            continue
        reachable += 1
        if candidate.instance is instance or not breaker.available(now):
            out += 1
        elif breaker.well(now):
            another = True
    return another and out <= int(reachable * config.max_share)


def panics(candidates: Sequence[Candidate], now: float, config: EjectionConfig) -> bool:
    """True if so few candidates are available that the fault is probably shared and health says nothing."""
    reachable = available = 0
    for candidate in candidates:
        breaker = candidate.instance.breaker
        if not breaker.unreachable:
            reachable += 1
            available += breaker.available(now)
    return available < reachable * config.panic_share
