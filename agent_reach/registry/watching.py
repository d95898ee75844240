"""What is in the registry, brought to the index: list, watch from there, and list again when in doubt.

The watch brings changes within milliseconds. The list proves every `refresh_s` that the watch isn't silently dead,
and mends whatever it missed. While neither answers, the last good view is served on, marked stale.
"""

from __future__ import annotations

import copy
import logging
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import assert_never

from agent_reach.config import RegistryConfig
from agent_reach.errors import Forbidden, ReachError, RegistryUnavailable, Unauthorized
from agent_reach.events import Event, RecordSkipped, RegistryChanged
from agent_reach.ports import Clock, Registry, WatchChanges, WatchLost, WatchMessage, WatchProgress
from agent_reach.registry.freshness import Freshness, ViewStatus
from agent_reach.registry.hosting import Backoff, Host, Signal, unavailable
from agent_reach.registry.mirror import Mirror, News
from agent_reach.registry.trust import Trust
from agent_reach.routing.index import Change

__all__ = ["WatchView", "Watcher"]

_log = logging.getLogger(__name__)


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
        self._clock = clock
        self._emit = emit
        self._host = Host("agent-reach-watcher", self._run, threaded=registry.blocking, clock=clock)
        self._changed = Signal()
        self._view = WatchView()
        self._stopped = False
        # What follows belongs to the host.
        self._backoff = Backoff(config, rng)
        self._freshness = Freshness(config, rng)
        self._trust = Trust(config.lease_ttl_s)
        self._mirror = Mirror(namespace, self._trust, allow_local=not registry.blocking)
        self._mail: list[tuple[int, WatchMessage]] = []
        self._watch_number = 0
        self._cancel: Callable[[], None] | None = None
        # A watch goes on from the last list; after a loss that list comes first.
        self._listed = False
        self._watch_at = 0.0
        self._watch_failed = False
        self._error: ReachError | None = None
        # Whether list and watch worked when last tried, and the status last told.
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
        self._changed.fire()
        await self._host.stop(timeout_s)

    async def wait_loaded(self, timeout_s: float) -> None:
        """Return once a first list was applied; any number of callers share that one list.

        Raises `Unauthorized` or `Forbidden` if the registry refuses us, `RegistryUnavailable` after `timeout_s`.
        """

        def settled() -> WatchView | None:
            view = self._view
            refused = isinstance(view.error, Unauthorized | Forbidden)
            return view if view.status != "starting" or refused or self._stopped else None

        view = await self._changed.wait_for(settled, self._clock, timeout_s)
        if view is None or self._stopped:
            raise unavailable(self._registry.address, timeout_s, "no list of agents came", self._view.error)
        if view.status == "starting" and view.error is not None:
            # A copy for each caller, who adds the call to it and gets a traceback of its own.
            raise copy.copy(view.error)

    async def first_attempt(self) -> None:
        """Return once the first list was applied or has failed; `view` tells which.

        A registry does either within its own request timeout.
        """
        await self._changed.wait_for(
            lambda: self._stopped or self._view.status != "starting" or self._view.error is not None or None,
            self._clock,
        )

    # --- hosted -------------------------------------------------------------------------------------------

    @property
    def _now(self) -> float:
        return self._host.clock.now()

    @property
    def _may_watch(self) -> bool:
        return self._cancel is None and self._listed

    async def _run(self) -> None:
        # Also after a bug of ours: whatever was half done then, a list mends it.
        self._freshness.list_by(self._now)
        try:
            while not self._host.stopping:
                self._read_mail()
                if self._now >= self._freshness.list_at:
                    self._list()
                if self._may_watch and self._now >= self._watch_at and not self._host.stopping:
                    self._watch()
                self._age()
                self._tell()
                self._publish()
                next_at = self._freshness.next_at()
                await self._host.pause((min(next_at, self._watch_at) if self._may_watch else next_at) - self._now)
        finally:
            self._unwatch()

    def _read_mail(self) -> None:
        mail, self._mail = self._mail, []
        for number, message in mail:
            if number != self._watch_number or self._cancel is None:
                continue  # of a watch that was given up
            match message:
                case WatchLost():
                    self._watch_lost(message)
                case _ if self._freshness.status == "expired":
                    # The stream went on after all; but the index is empty, so only a list helps.
                    self._freshness.list_by(self._now)
                case WatchChanges():
                    self._send(self._mirror.take_changes(message, self._now))
                    self._backoff.reset()
                    self._prove()
                case WatchProgress():
                    self._mirror.take_progress(self._now)
                    self._prove()
                case _:
                    assert_never(message)

    def _list(self) -> None:
        """List, and bring the differences to the index."""
        try:
            listing = self._registry.list(self._namespace)
        except ReachError as error:
            self._listed = False
            self._lost(error)
            self._trust.store_lost(self._now)
            self._freshness.list_at = self._now + self._backoff.next()
            return
        news = self._mirror.take_list(listing, self._now)
        if news:
            # An open watch should have told. It may be silently dead, and a new one costs little.
            self._unwatch()
            self._send(news)
        self._listed = True
        self._prove()
        if self._cancel is not None:
            self._backoff.reset()
            self._works()

    def _watch(self) -> None:
        """Watch from the last list on. While that fails lists go on at their own pace, and bring what is new."""
        self._watch_number += 1
        number = self._watch_number

        def deliver(message: WatchMessage) -> None:
            self._host.call(self._mail.append, (number, message))

        try:
            self._cancel = self._registry.watch(self._namespace, self._mirror.revision + 1, deliver)
        except ReachError as error:
            self._lost(error)
            self._watch_failed = True
            self._watch_at = self._now + self._backoff.next()
            return
        if self._watch_failed:
            # The store may have been replaced since the last list; the watch would then wait in silence.
            self._watch_failed = False
            self._list()
        else:
            self._works()

    def _unwatch(self) -> None:
        cancel, self._cancel = self._cancel, None
        if cancel is not None:
            cancel()

    def _watch_lost(self, message: WatchLost) -> None:
        self._unwatch()
        self._listed = False
        if message.compacted:
            _log.info("the registry forgot changes that were not read yet; listing again")
        self._lost(RegistryUnavailable(f"the watch ended: {message.reason}", endpoints=(self._registry.address,)))
        self._trust.watch_lost()
        self._freshness.list_by(self._now + self._backoff.next())

    # --- how it stands ----------------------------------------------------------------------------------------

    def _works(self) -> None:
        """The list is good and a watch is open."""
        self._error = None
        if not self._connected:
            self._connected = True
            self._freshness.part_ways(self._now)

    def _lost(self, error: ReachError) -> None:
        self._error = error
        self._connected = False

    def _prove(self) -> None:
        """What we know was right just now."""
        self._freshness.prove(self._now, self._trust.confirm_at)

    def _age(self) -> None:
        before = self._freshness.status
        self._freshness.age(self._now)
        if before != "expired" and self._freshness.status == "expired":
            self._send(self._mirror.clear())

    def _tell(self) -> None:
        """Tell how it stands if that is news."""
        freshness = self._freshness
        match freshness.status:
            case "expired":
                status = "expired"
                detail = f"stale for {self._now - freshness.stale_since:.0f} s, so every agent was dropped"
            case "stale" if self._trust.confirm_at is not None:
                status, detail = "stale", "agents went missing after trouble with the registry; not believed yet"
            case "stale":
                status = "stale"
                detail = f"no proof since {self._now - (freshness.proof_at or 0.0):.1f} s: {self._error}"
            case "starting" | "fresh":
                if not self._connected and self._error is None:
                    return  # nothing was tried yet
                status = "connected" if self._connected else "lost"
                detail = f"revision {self._mirror.revision}" if self._connected else str(self._error)
            case _:
                assert_never(freshness.status)
        if status != self._told:
            self._told = status
            event = RegistryChanged(address=self._registry.address, status=status, detail=detail)
            self._host.post(self._emitted, event)

    # --- to the owner -----------------------------------------------------------------------------------------

    def _send(self, news: Iterable[News]) -> None:
        for one in news:
            if isinstance(one, RecordSkipped):
                self._host.post(self._emitted, one)
            else:
                self._host.post(self._applied, one)

    def _publish(self) -> None:
        view = WatchView(
            self._freshness.status,
            self._cancel is not None,
            self._freshness.proof_at,
            self._mirror.revision,
            self._mirror.skipped,
            self._error,
        )
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
