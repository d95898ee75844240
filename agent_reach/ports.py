"""What the library needs of the world, as small protocols. Adapters implement them; tests fake them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from agent_reach.events import Event

__all__ = [
    "Answer",
    "BadAnswer",
    "Clock",
    "Created",
    "Deleted",
    "DialRequest",
    "DialResult",
    "Dialer",
    "LeaseLost",
    "Listing",
    "MaybeExecuted",
    "NeverSent",
    "Observer",
    "Occupied",
    "Probe",
    "Put",
    "RawRecord",
    "Registry",
    "SystemClock",
    "Watch",
    "WatchChanges",
    "WatchLost",
    "WatchMessage",
    "WatchProgress",
]


class Clock(Protocol):
    """Time as the library sees it."""

    def now(self) -> float:
        """Seconds on a monotonic clock."""
        ...

    def wall(self) -> float:
        """Seconds since the epoch; for records and logs, never for decisions."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Wait; a manual clock returns once it was turned that far."""
        ...


class SystemClock:
    """The machine's own clocks."""

    def now(self) -> float:
        """Seconds on the monotonic clock."""
        return time.monotonic()

    def wall(self) -> float:
        """Seconds since the epoch."""
        return time.time()

    async def sleep(self, seconds: float) -> None:
        """Wait on the running event loop."""
        await asyncio.sleep(seconds)


class Observer(Protocol):
    """Told of what happened; called on the event loop, so it must return at once. What it raises is logged."""

    def on_event(self, event: Event) -> None:
        """Take one event."""
        ...


# --- dialing ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DialRequest:
    """One POST. `timeout_s` covers the whole exchange from pool wait to the last byte, in seconds."""

    url: str
    headers: Mapping[str, str]
    body: bytes
    timeout_s: float
    connect_timeout_s: float
    max_reply_bytes: int


@dataclass(frozen=True, slots=True)
class Answer:
    """The peer answered; `headers` have lower-case names."""

    status: int
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True, slots=True)
class NeverSent:
    """Not one byte of the request can have reached a handler. `local` if this process is at fault, not the peer.

    `phase` is `pool`, `dns`, `connect`, `tls` or `local`; `timed_out` if it took longer than allowed.
    """

    phase: str
    detail: str
    local: bool = False
    timed_out: bool = False


@dataclass(frozen=True, slots=True)
class MaybeExecuted:
    """The request left, the answer didn't come: closed, reset, or out of time."""

    detail: str
    timed_out: bool = False


@dataclass(frozen=True, slots=True)
class BadAnswer:
    """An answer came but can't be taken: larger than `max_reply_bytes`, a wrong encoding, cut off framing."""

    status: int
    detail: str
    too_large: bool = False


DialResult: TypeAlias = Answer | NeverSent | MaybeExecuted | BadAnswer


class Dialer(Protocol):
    """Sends bytes to an endpoint and says how far it got. Never raises for a network fault; cancellation
    ends the exchange at once and leaks no connection. Never follows redirects.
    """

    async def send(self, request: DialRequest) -> DialResult:
        """POST once; no retry of its own, whatever happens."""
        ...

    async def aclose(self) -> None:
        """Close what this dialer opened itself."""
        ...


# --- registry --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RawRecord:
    """One stored record, undecoded. `revision` is that of its last change, `lease` what it ends with (0: none)."""

    agent_id: str
    value: bytes
    revision: int
    lease: int = 0


@dataclass(frozen=True, slots=True)
class Listing:
    """Everything in a namespace at `revision`; `cluster_id` names the store (another id: another history)."""

    cluster_id: int
    revision: int
    records: tuple[RawRecord, ...]


@dataclass(frozen=True, slots=True)
class Probe:
    """How a namespace stands at `revision`, told without its records: how many there are, and which of those asked
    for aren't there any more as they were, under the same lease.
    """

    cluster_id: int
    revision: int
    count: int
    changed: frozenset[str]


@dataclass(frozen=True, slots=True)
class Put:
    """A record was written."""

    record: RawRecord


@dataclass(frozen=True, slots=True)
class Deleted:
    """A record went: withdrawn, or its lease ended."""

    agent_id: str
    revision: int


@dataclass(frozen=True, slots=True)
class WatchChanges:
    """Changes in revision order."""

    revision: int
    changes: tuple[Put | Deleted, ...]


@dataclass(frozen=True, slots=True)
class WatchProgress:
    """The watch has told of every change up to `revision`."""

    revision: int


@dataclass(frozen=True, slots=True)
class WatchLost:
    """The watch ended. `compacted`: the revisions asked for are gone, so only a new list helps."""

    reason: str
    compacted: bool = False


WatchMessage: TypeAlias = WatchChanges | WatchProgress | WatchLost


class LeaseLost(Exception):
    """A write named a lease that no longer lives. Between adapter and announcer only; users never see it."""


@dataclass(frozen=True, slots=True)
class Created:
    """The record was written: no other was there."""

    revision: int


@dataclass(frozen=True, slots=True)
class Occupied:
    """A record is there already."""

    holder: RawRecord


class Watch(Protocol):
    """An open watch."""

    def ask_progress(self) -> None:
        """Ask for a `WatchProgress` behind all changes so far. It may never come: then the watch is of no use."""
        ...

    def cancel(self) -> None:
        """End it; nothing is delivered once this returned. A second time does nothing."""
        ...


class Registry(Protocol):
    """A store of records under leases. Every method is synchronous and thread-safe; a blocking one returns
    within its request timeout.

    Raises `RegistryUnavailable` when the store can't be reached or answers too late, `Unauthorized` or
    `Forbidden` when it refuses us.
    """

    @property
    def blocking(self) -> bool:
        """True if methods wait for a network: they then run in threads of their own."""
        ...

    @property
    def address(self) -> str:
        """What to show a person: `etcd://127.0.0.1:2379`; no credentials."""
        ...

    def grant(self, ttl_s: float) -> int:
        """Open a lease and return its id, never 0."""
        ...

    def keep_alive(self, lease: int) -> bool:
        """Renew once; False if the lease lives no longer."""
        ...

    def revoke(self, lease: int) -> None:
        """End a lease and with it its records; a lease that is gone already is no error."""
        ...

    def time_left(self, lease: int) -> float:
        """How long a lease lives unless it is renewed, in whole seconds; 0 if it ended or is about to.

        A value that rises between two looks proves that its owner lives.
        """
        ...

    def get(self, namespace: str, agent_id: str) -> RawRecord | None:
        """One record, as it is now; None if there is none."""
        ...

    def create(self, namespace: str, agent_id: str, value: bytes, lease: int) -> Created | Occupied:
        """Write only if no record is there, atomically. Raises `LeaseLost` if the lease lives no longer."""
        ...

    def replace(self, namespace: str, held: RawRecord, value: bytes, lease: int) -> bool:
        """Write over `held` if it is still what is there, atomically; False if it isn't. Raises as `create`."""
        ...

    def list(self, namespace: str) -> Listing:
        """Everything in the namespace, with its revision."""
        ...

    def probe(self, namespace: str, known: Sequence[RawRecord]) -> Probe:
        """Ask how the namespace stands, and which of the records in `known` have changed.

        Never answered from a member that may be behind the others, and of a few bytes whatever the namespace holds.
        """
        ...

    def watch(self, namespace: str, from_revision: int, deliver: Callable[[WatchMessage], None]) -> Watch:
        """Deliver every change from `from_revision` on, then `WatchLost` once at most.

        `deliver` is called from any thread, must not block, and is not called once the watch was cancelled.
        """
        ...

    def close(self) -> None:
        """Close connections; leases are left to end by themselves unless revoked."""
        ...
