"""How well the index is known to match the registry."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from agent_reach.errors import ReachError
from agent_reach.registry.freshness import ViewStatus

__all__ = ["WatchView"]


@dataclass(frozen=True, slots=True)
class WatchView:
    """How well the index is known to match the registry.

    `fresh`: proved within the last `refresh_s` or so. `stale`: served on without proof, or while a mass departure
    isn't believed yet. `expired`: stale for too long, the index was emptied. `connected` says that a watch is open,
    `proof_at` when the last proof came (seconds, monotonic), `skipped` which records can't be read, and why.
    """

    status: ViewStatus = "starting"
    connected: bool = False
    proof_at: float | None = None
    revision: int = 0
    skipped: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    error: ReachError | None = None
