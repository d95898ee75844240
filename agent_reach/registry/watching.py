"""What is in the registry, brought to the index: list, watch from there, and list again when in doubt.

The watch brings changes within milliseconds. The list proves every `refresh_s` that the watch isn't silently dead,
and mends whatever it missed. While neither answers, the last good view is served on, marked stale.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, TypeAlias, assert_never

from agent_reach.config import RegistryConfig
from agent_reach.errors import Forbidden, ReachError, RegistryUnavailable, Unauthorized
from agent_reach.events import Event, RecordSkipped, RegistryChanged
from agent_reach.model import AgentInfo
from agent_reach.ports import (
    Clock,
    Deleted,
    Listing,
    Put,
    RawRecord,
    Registry,
    WatchChanges,
    WatchLost,
    WatchMessage,
    WatchProgress,
)
from agent_reach.registry.hosting import Backoff, Host, Signal, unavailable
from agent_reach.registry.records import decode
from agent_reach.registry.trust import Trust
from agent_reach.routing.index import Change, Remove, Reset, Upsert

__all__ = ["WatchView", "Watcher"]

_log = logging.getLogger(__name__)

ViewStatus: TypeAlias = Literal["starting", "fresh", "stale", "expired"]


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


@dataclass(frozen=True, slots=True)
class _Skipped:
    value: bytes
    reason: str


class Watcher:
    """Follows one namespace for as long as it runs; it never gives up by itself.

    `apply`, `emit` and changes of `view` happen on the loop that called `start`, in revision order. With a
    blocking registry everything else, decoding too, happens on a thread.
    """

    def __init__(
        self,
        registry: Registry,
        namespace: str,
        *,
        apply: Callable[[Change], None],
        config: RegistryConfig,
        clock: Clock,
        rng: random.Random,
        emit: Callable[[Event], None],
    ) -> None:
        self._registry = registry
        self._namespace = namespace
        self._apply = apply
        self._config = config
        self._clock = clock
        self._rng = rng
        self._emit = emit
        self._host = Host("agent-reach-watcher", self._run, threaded=registry.blocking, clock=clock)
        self._changed = Signal()
        self._view = WatchView()
        self._stopped = False
        # What follows belongs to the host.
        self._backoff = Backoff(config, rng)
        self._trust = Trust(config.lease_ttl_s)
        self._records: dict[str, RawRecord] = {}
        self._infos: dict[str, AgentInfo] = {}
        self._skipped: dict[str, _Skipped] = {}
        self._mail: list[tuple[int, WatchMessage]] = []
        self._watch_number = 0
        self._cancel: Callable[[], None] | None = None
        self._cluster_id: int | None = None
        self._epoch = 0
        self._revision = 0
        self._status: ViewStatus = "starting"
        self._error: ReachError | None = None
        self._proof_at: float | None = None
        self._list_at = 0.0
        self._fresh_until = 0.0
        self._stale_since = 0.0
        self._connected = False
        self._told = ""

    @property
    def view(self) -> WatchView:
        """How well the index matches the registry now."""
        return self._view

    def start(self) -> None:
        """Begin to list and watch. Needs a running event loop; returns at once."""
        self._host.start()

    async def stop(self, timeout_s: float = 1.0) -> None:
        """Stop; nothing is applied or emitted afterwards. A stuck request is left behind after `timeout_s`."""
        self._stopped = True
        await self._host.stop(timeout_s)

    async def wait_loaded(self, timeout_s: float) -> None:
        """Return once a first list was applied; any number of callers share that one list.

        Raises `Unauthorized` or `Forbidden` if the registry refuses us, `RegistryUnavailable` after `timeout_s`.
        """

        def settled() -> WatchView | None:
            view = self._view
            refused = isinstance(view.error, Unauthorized | Forbidden)
            return view if view.status != "starting" or refused else None

        view = await self._changed.wait_for(settled, self._clock, timeout_s)
        if view is None:
            raise unavailable(self._registry.address, timeout_s, "no list of agents came", self._view.error)
        if view.status == "starting" and view.error is not None:
            raise view.error

    # --- hosted -------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        self._list_at = self._host.clock.now()
        try:
            while not self._host.stopping:
                self._read_mail()
                if self._host.clock.now() >= self._list_at:
                    self._synchronise()
                self._age()
                self._publish()
                await self._host.pause(self._next_event_at() - self._host.clock.now())
        finally:
            self._unwatch()

    def _next_event_at(self) -> float:
        if self._status == "fresh" and self._list_at > self._fresh_until:
            return self._fresh_until
        if self._status == "stale":
            return min(self._list_at, self._stale_since + self._config.stale_grace_s)
        return self._list_at

    def _read_mail(self) -> None:
        mail, self._mail = self._mail, []
        for number, message in mail:
            if number != self._watch_number or self._cancel is None:
                continue  # of a watch that was given up
            match message:
                case WatchLost():
                    self._watch_lost(message)
                case _ if self._status == "expired":
                    # The stream went on after all; but the index is empty, so only a list helps.
                    self._list_at = self._host.clock.now()
                case WatchChanges():
                    self._take_changes(message)
                    self._backoff.reset()
                    self._prove()
                case WatchProgress():
                    self._prove()
                case _:
                    assert_never(message)

    def _synchronise(self) -> None:
        """List, bring the differences to the index, and watch from there if there is no good watch."""
        try:
            listing = self._registry.list(self._namespace)
            self._take_list(listing)
            came_back, self._connected, self._error = not self._connected, True, None
            if came_back:
                self._tell("connected", f"revision {listing.revision}")
            self._prove()
            if came_back:
                self._part_ways()
            if self._host.stopping:
                return
            if self._cancel is None:
                self._watch(listing.revision + 1)
            else:
                self._backoff.reset()
        except ReachError as error:
            self._failed(error)

    def _part_ways(self) -> None:
        """Clients start together, or come back together after an outage: let each refresh at its own time."""
        latest_s = self._config.refresh_s + self._config.refresh_jitter_s
        refresh_s = self._rng.uniform(self._config.refresh_s / 3, latest_s)
        self._list_at = min(self._list_at, self._host.clock.now() + refresh_s)

    def _watch(self, from_revision: int) -> None:
        self._watch_number += 1
        number = self._watch_number

        def deliver(message: WatchMessage) -> None:
            self._host.call(self._mail.append, (number, message))

        self._cancel = self._registry.watch(self._namespace, from_revision, deliver)

    def _unwatch(self) -> None:
        cancel, self._cancel = self._cancel, None
        if cancel is not None:
            cancel()

    def _watch_lost(self, message: WatchLost) -> None:
        self._unwatch()
        if message.compacted:
            _log.info("the registry forgot changes that were not read yet; listing again")
        self._lost(RegistryUnavailable(f"the watch ended: {message.reason}", endpoints=(self._registry.address,)))
        self._trust.watch_lost()
        self._list_at = min(self._list_at, self._host.clock.now() + self._backoff.next())

    def _failed(self, error: ReachError) -> None:
        now = self._host.clock.now()
        self._lost(error)
        self._trust.store_lost(now)
        self._list_at = now + self._backoff.next()

    def _lost(self, error: ReachError) -> None:
        self._error = error
        self._connected = False
        if self._told not in ("lost", "stale", "expired"):
            self._tell("lost", str(error))

    # --- freshness ------------------------------------------------------------------------------------------

    def _prove(self) -> None:
        """What we know was right just now."""
        now = self._host.clock.now()
        self._proof_at = now
        self._fresh_until = now + self._config.refresh_s + self._rng.uniform(0.0, self._config.refresh_jitter_s)
        self._list_at = self._fresh_until
        confirm_at = self._trust.confirm_at
        if confirm_at is not None:
            # Up to a second later, so that not every client lists at once.
            self._list_at = min(self._list_at, confirm_at + self._rng.uniform(0.0, 1.0))
            self._stale("agents went missing after trouble with the registry; not believed yet")
            return
        if self._status in ("stale", "expired") and self._told != "connected":
            self._tell("connected", "fresh again")
        self._status = "fresh"

    def _stale(self, why: str) -> None:
        if self._status in ("fresh", "starting"):
            self._status = "stale"
            self._stale_since = self._host.clock.now()
            self._tell("stale", why)

    def _age(self) -> None:
        """Let knowledge grow old that nothing proved."""
        now = self._host.clock.now()
        if self._status == "fresh" and now >= self._fresh_until:
            self._stale(f"no proof since {now - (self._proof_at or 0.0):.1f} s: {self._error}")
        if self._status == "stale" and now >= self._stale_since + self._config.stale_grace_s:
            self._status = "expired"
            self._records.clear()
            self._infos.clear()
            self._trust.forget()
            self._send(Reset((), self._revision, self._epoch))
            self._tell("expired", f"stale for {now - self._stale_since:.0f} s, so every agent was dropped")

    # --- records ------------------------------------------------------------------------------------------

    def _take_list(self, listing: Listing) -> None:
        """Bring a list to the index; give up a watch that hadn't brought what the list shows."""
        now = self._host.clock.now()
        first = self._cluster_id is None
        anew = not first and self._is_another_history(listing)
        if anew:
            self._epoch += 1
            self._trust.store_lost(now)
        self._cluster_id, self._revision = listing.cluster_id, listing.revision
        records = {raw.agent_id: raw for raw in listing.records}
        believed = self._trust.believes_list(self._records.keys(), records, now)
        if records == self._records and not (first or anew or self._status == "expired"):
            return
        # An open watch should have told. It may be silently dead, and a new one costs little.
        self._unwatch()
        infos = {raw.agent_id: info for raw in listing.records if (info := self._read(raw)) is not None}
        if believed:
            self._records, self._infos = records, infos
            self._skipped = {agent_id: s for agent_id, s in self._skipped.items() if agent_id in records}
        else:
            self._records |= records
            self._infos |= infos
        self._send(Reset(tuple(infos.values()), listing.revision, self._epoch, drop_missing=believed))

    def _is_another_history(self, listing: Listing) -> bool:
        """True if the store was restored, wiped or replaced: its revisions then say nothing about ours.

        Everything up to our revision is known here, so a strange record from before it gives another history
        away, also when its revisions have caught up with ours.
        """
        if listing.cluster_id != self._cluster_id or listing.revision < self._revision:
            return True
        return self._status != "expired" and any(
            raw.revision <= self._revision and self._records.get(raw.agent_id) != raw for raw in listing.records
        )

    def _take_changes(self, message: WatchChanges) -> None:
        for change in message.changes:
            match change:
                case Put():
                    if change.record.revision >= self._revision:
                        self._revision = change.record.revision
                        self._take_put(change.record)
                case Deleted():
                    if change.revision >= self._revision:
                        self._revision = change.revision
                        self._take_deleted(change)
                case _:
                    assert_never(change)

    def _take_put(self, raw: RawRecord) -> None:
        self._trust.seen(raw.agent_id)
        info = self._read(raw)
        self._records[raw.agent_id] = raw
        if info is not None:
            self._infos[raw.agent_id] = info
            self._send(Upsert(info, raw.revision))
        elif self._infos.pop(raw.agent_id, None) is not None:
            # The last good record is no longer in the registry, and nobody can say whether its process still is.
            self._send(Remove(raw.agent_id, raw.revision))

    def _take_deleted(self, change: Deleted) -> None:
        if change.agent_id not in self._records:
            return
        if not self._trust.believes_removal(change.agent_id, self._host.clock.now()):
            return
        del self._records[change.agent_id]
        self._skipped.pop(change.agent_id, None)
        if self._infos.pop(change.agent_id, None) is not None:
            self._send(Remove(change.agent_id, change.revision))

    def _read(self, raw: RawRecord) -> AgentInfo | None:
        """Decode a record; None if it can't be read, which is told once for each content."""
        held = self._records.get(raw.agent_id)
        if held is not None and held.value == raw.value and raw.agent_id in self._infos:
            return self._infos[raw.agent_id]
        try:
            info = decode(raw, self._namespace, allow_local=not self._registry.blocking)
        except ValueError as error:
            before = self._skipped.get(raw.agent_id)
            if before is None or before.value != raw.value:
                self._skipped[raw.agent_id] = _Skipped(raw.value, str(error))
                self._host.post(self._emitted, RecordSkipped(agent_id=raw.agent_id, reason=str(error)))
            return None
        self._skipped.pop(raw.agent_id, None)
        return info

    # --- to the owner -----------------------------------------------------------------------------------------

    def _send(self, change: Change) -> None:
        self._host.post(self._applied, change)

    def _tell(self, status: str, detail: str) -> None:
        self._told = status
        event = RegistryChanged(address=self._registry.address, status=status, detail=detail)
        self._host.post(self._emitted, event)

    def _publish(self) -> None:
        skipped = MappingProxyType({agent_id: s.reason for agent_id, s in self._skipped.items()})
        connected = self._cancel is not None
        view = WatchView(self._status, connected, self._proof_at, self._revision, skipped, self._error)
        self._host.post(self._shown, view)

    def _applied(self, change: Change) -> None:
        if not self._stopped:
            self._apply(change)

    def _emitted(self, event: Event) -> None:
        if not self._stopped:
            self._emit(event)

    def _shown(self, view: WatchView) -> None:
        if not self._stopped:
            self._view = view
            self._changed.fire()
