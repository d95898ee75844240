"""What a call gives back, and what the client says of itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from agent_reach.errors import Attempt, ReachError

__all__ = ["ClientState", "Outcome", "Reply"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Reply(Generic[T]):
    """The answer to one call. `attempts` lists every try, the successful one last; `elapsed_s` is their total.

    `deprecated`: answered by a newer version through a soft alias. `stale`: the registry couldn't confirm the
    instance's record at the time. `from_fallback`: `data` is what `fallback=` returned, and `agent_id` is "".
    """

    data: T
    agent_id: str
    request_id: str
    attempts: tuple[Attempt, ...]
    elapsed_s: float
    deprecated: bool = False
    stale: bool = False
    from_fallback: bool = False


@dataclass(frozen=True, slots=True)
class Outcome(Generic[T]):
    """How one instance did in a `fan_out`: a reply or an error, never both."""

    agent_id: str
    reply: Reply[T] | None = None
    error: ReachError | None = None

    @property
    def ok(self) -> bool:
        """True if it answered."""
        return self.reply is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientState:
    """How the client stands now.

    `registry`: `starting`, `fresh`, `stale` (served on, unconfirmed) or `expired`; `registration`: `idle`,
    `registering`, `registered`, `lost`, `refused` or `withdrawn`. `index_age_s`: seconds since the registry last
    proved what we know, None before the first proof. `skipped`: unreadable records, by agent id, with the reason.
    """

    agent_id: str
    connected: bool
    registered: bool
    draining: bool
    registry: str
    registration: str
    index_age_s: float | None
    instances: int
    skipped: Mapping[str, str]
    registry_error: ReachError | None
    registration_detail: str = ""

    @property
    def stale(self) -> bool:
        """True while the index is served without the registry's confirmation."""
        return self.registry != "fresh"
