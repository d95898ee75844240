"""How well the index is known to match the registry."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import assert_never

from agent_reach.errors import ReachError
from agent_reach.registry.freshness import Freshness, ViewStatus

__all__ = ["WatchView", "describe"]


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


def describe(
    freshness: Freshness,
    *,
    doubts: bool,
    connected: bool,
    revision: int,
    error: ReachError | None,
    now: float,
) -> tuple[str, str] | None:
    """The status to tell of, and why in words; None before anything was tried.

    `doubts`: agents are missing that aren't believed gone.
    """
    match freshness.status:
        case "expired":
            return "expired", f"stale for {now - freshness.stale_since:.0f} s, so every agent was dropped"
        case "stale" if doubts:
            return "stale", "agents went missing after trouble with the registry; not believed yet"
        case "stale":
            return "stale", f"no proof since {now - (freshness.proof_at or 0.0):.1f} s: {error}"
        case "starting" | "fresh":
            if connected:
                return "connected", f"revision {revision}"
            return None if error is None else ("lost", str(error))
        case _:
            assert_never(freshness.status)
