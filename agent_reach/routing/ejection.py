"""How many of a capability's instances breakers may shut out, and when health is ignored altogether.

Ejection cap: Envoy `outlier_detection.proto` counts after the ejection; a fixed "always one" hurt small
pools (envoyproxy/envoy#26877). Panic: Envoy `panic_threshold.rst`.
"""

from __future__ import annotations

from collections.abc import Sequence

from agent_reach.config import EjectionConfig
from agent_reach.routing.instance import Candidate, Instance

__all__ = ["may_shut_out", "panics"]


def may_shut_out(instance: Instance, candidates: Sequence[Candidate], now: float, config: EjectionConfig) -> bool:
    """True if `instance` may be shut out too: within the share, rounded down, and never the last one."""
    others_out = sum(1 for c in candidates if c.instance is not instance and not c.instance.breaker.available(now))
    out = others_out + 1
    return out <= int(len(candidates) * config.max_share) and out < len(candidates)


def panics(candidates: Sequence[Candidate], now: float, config: EjectionConfig) -> bool:
    """True if so few candidates are available that the fault is probably shared and health says nothing."""
    available = sum(1 for c in candidates if c.instance.breaker.available(now))
    return available < len(candidates) * config.panic_share
