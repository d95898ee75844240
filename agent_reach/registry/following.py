"""Following one namespace of a registry: list, watch from there, and prove now and then that nothing was missed.

The watch brings changes within milliseconds. Every `refresh_s` or so a probe asks the store how many records there
are, and the watch how far it has come. In a few bytes that proves that the watch isn't silently dead, and that what
is known is what the store holds. A watch that ends goes on from the last change taken in, after a probe has shown
that the store is still the same. Only where that doesn't hold (compaction, another history, a difference) all is
listed.
While nothing answers, the last good view is served on, marked stale.
"""

from __future__ import annotations

import logging
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias, assert_never

from agent_reach.config import RegistryConfig
from agent_reach.errors import ReachError, RegistryUnavailable
from agent_reach.events import Event, RegistryChanged
from agent_reach.ports import (
    Probe,
    RawRecord,
    Registry,
    Watch,
    WatchChanges,
    WatchLost,
    WatchMessage,
    WatchProgress,
)
from agent_reach.registry.freshness import Freshness
from agent_reach.registry.hosting import Backoff, Host
from agent_reach.registry.mirror import Mirror
from agent_reach.registry.snapshot import SnapshotKeeper
from agent_reach.registry.trust import Trust
from agent_reach.registry.view import WatchView, describe
from agent_reach.routing.index import Change

__all__ = ["Finding", "Follower"]

_log = logging.getLogger(__name__)

# Records that a probe compares besides the newest: what is wrong for whatever reason is found sooner or later.
_SPOT_CHECKS = 4
# A proof rests on the number of records, a few of them and the watch. A backup that was restored behind everybody's
# back could satisfy all three; that shouldn't stay unseen for ever. The more there are, the more a list costs, and
# the more clients make it: at 6 s for each, 10,000 agents that know each other take 2 MB/s out of etcd for it.
_LIST_EVERY_S = 600.0
_LIST_EVERY_S_EACH = 6.0
# etcd may leave a question for progress unanswered while a watch is behind: ask again.
_ASK_EVERY_S = 0.25
# An older etcd may answer a moment before it tells of the changes that it speaks of (etcd issue 15220).
_SETTLE_S = 1.0


# What there is to tell: changes for the index in revision order, events, and how it stands.
Finding: TypeAlias = Change | Event | WatchView


@dataclass(slots=True)
class _Check:
    """A probe that the watch has yet to catch up with, until when; whether it is the first of this watch; and when
    the watch is to be asked for it (again).
    """

    sample: tuple[RawRecord, ...]
    probe: Probe
    until: float
    first: bool
    ask_at: float
    # The watch has come that far, and what it told isn't what the probe said.
    disagreed: bool = False


class Follower:
    """Follows one namespace for as long as its host runs; it never gives up by itself.

    `found` is told where the host runs, of all that one turn brought.
    """

    def __init__(
        self,
        registry: Registry,
        namespace: str,
        *,
        host: Host,
        found: Callable[[Sequence[Finding]], None],
        config: RegistryConfig,
        rng: random.Random,
    ) -> None:
        self._registry = registry
        self._namespace = namespace
        self._host = host
        self._found = found
        self._findings: list[Finding] = []
        self._config = config
        self._rng = rng
        self._backoff = Backoff(config, rng)
        self._freshness = Freshness(config, rng)
        # By then an agent has noticed its loss, made one more attempt that hung, paused, and registered.
        confirm_s = config.lease_ttl_s + config.request_timeout_s + config.backoff_max_s
        self._trust = Trust(lease_s=config.lease_ttl_s, confirm_s=confirm_s)
        self._mirror = Mirror(namespace, self._trust, allow_local=not registry.blocking)
        self._snapshots = SnapshotKeeper(config, registry=registry.address, namespace=namespace, rng=rng)
        self._mail: deque[tuple[int, WatchMessage]] = deque()
        self._watch: Watch | None = None
        self._watch_number = 0
        # Whether the open watch is known to be on the store that we know.
        self._verified = False
        self._watch_at = 0.0
        self._check: _Check | None = None
        # What we know doesn't continue in the store, so that only a list helps; and when it is time for one anyway.
        self._must_list = True
        self._list_at = 0.0
        self._error: ReachError | None = None
        # Whether list and watch worked when last tried, and the status last told.
        self._connected = False
        self._told = ""

    async def run(self) -> None:
        """Follow until the host stops."""
        # Also after a bug of ours: whatever was half done then, a list mends it.
        self._must_list = True
        self._freshness.refresh_by(self._now)
        try:
            while not self._host.stopping:
                self._turn()
                await self._host.pause(self._next_at() - self._now)
        finally:
            self._unwatch()
            self._keep()

    def _turn(self) -> None:
        self._read_mail()
        if self._check is not None and self._now >= self._check.until:
            self._check_failed(self._check)
        if self._check is None and self._now >= self._freshness.refresh_at:
            self._refresh()
        if self._may_watch and self._now >= self._watch_at and not self._host.stopping:
            self._open_watch()
        if self._check is not None and self._now >= self._check.ask_at:
            self._ask_progress(self._check)
        self._age()
        self._tell()
        self._publish()
        self._keep()

    def _next_at(self) -> float:
        if self._check is not None:
            # Refreshing already; the answer of the watch wakes us.
            return min(self._check.until, self._check.ask_at)
        at = self._freshness.next_at()
        return min(at, self._watch_at) if self._may_watch else at

    @property
    def _now(self) -> float:
        return self._host.clock.now()

    @property
    def _may_watch(self) -> bool:
        return self._watch is None and not self._must_list

    # --- the watch ----------------------------------------------------------------------------------------

    def _open_watch(self) -> None:
        """Watch on from what is known. While that fails lists go on at their own pace, and bring what is new."""
        self._watch_number += 1
        number = self._watch_number

        def deliver(message: WatchMessage) -> None:
            # One and the same deque for ever: this runs on another thread, while that one reads.
            self._mail.append((number, message))
            self._host.wake()

        try:
            # From the last change itself, not the one behind it: of a watch that begins in the future newer etcds
            # tell no progress. What comes once more changes nothing.
            self._watch = self._registry.watch(self._namespace, self._mirror.revision, deliver)
        except ReachError as error:
            self._lost(error)
            self._watch_at = self._now + self._backoff.after(error)
            return
        # Before its mail is read: if the store was replaced meanwhile, none of it is for us.
        self._verified = False
        self._probe()

    def _unwatch(self) -> None:
        watch, self._watch, self._check = self._watch, None, None
        if watch is not None:
            watch.cancel()

    def _read_mail(self) -> None:
        while self._mail:
            number, message = self._mail.popleft()
            if number != self._watch_number or self._watch is None:
                continue  # of a watch that was given up
            match message:
                case WatchLost():
                    self._watch_lost(message)
                case _ if self._freshness.status == "expired":
                    # The stream went on after all; but the index is empty, so only a list helps.
                    self._unwatch()
                    self._must_list = True
                    self._freshness.refresh_by(self._now)
                case WatchChanges():
                    news = self._mirror.take_changes(message, self._now)
                    self._findings.extend(news)
                    # A new watch repeats the last change: that is no sign that it works for longer than the last.
                    if news:
                        self._backoff.reset()
                    self._freshness.hear(self._now, self._trust.confirm_at)
                case WatchProgress():
                    self._take_progress(message)
                case _:
                    assert_never(message)

    def _watch_lost(self, message: WatchLost) -> None:
        self._unwatch()
        error = RegistryUnavailable(f"the watch ended: {message.reason}", endpoints=(self._registry.address,))
        self._lost(error)
        self._trust.watch_lost()
        again_at = self._now + self._backoff.next()
        if message.compacted:
            _log.info("the registry forgot changes that were not read yet; listing again")
            self._must_list = True
            self._freshness.refresh_by(again_at)
        else:
            self._watch_at = again_at

    # --- refreshing -----------------------------------------------------------------------------------------

    def _refresh(self) -> None:
        """Prove what we know, or learn it anew."""
        if self._may_watch:
            # A watch that can be opened spares the list.
            self._open_watch()
            if self._check is not None:
                return
        due = self._must_list or self._now >= self._list_at or self._freshness.status in ("starting", "expired")
        if due or self._watch is None or self._trust.confirm_at is not None:
            self._list()
        else:
            self._probe()

    def _probe(self) -> None:
        """Ask the store how it stands, and the watch to tell when it has come that far."""
        assert self._watch is not None
        sample = self._mirror.sample(self._rng, _SPOT_CHECKS)
        try:
            probe = self._registry.probe(self._namespace, sample)
        except ReachError as error:
            self._refresh_failed(error)
            if not self._verified:
                self._unwatch()
                self._watch_at = self._freshness.refresh_at
            return
        if not self._mirror.take_probe(sample, probe, self._now):
            self._unwatch()
            self._must_list = True
            self._list()
            return
        self._check = _Check(
            sample,
            probe,
            until=self._now + self._config.request_timeout_s,
            first=not self._verified,
            ask_at=self._now,
        )
        self._verified = True

    def _ask_progress(self, check: _Check) -> None:
        assert self._watch is not None
        check.ask_at = self._now + _ASK_EVERY_S
        self._watch.ask_progress()

    def _take_progress(self, message: WatchProgress) -> None:
        check = self._check
        if check is None:
            self._mirror.take_progress(self._now)
            self._freshness.hear(self._now, self._trust.confirm_at)
        elif message.revision >= check.probe.revision:
            if self._mirror.matches(check.sample, check.probe):
                self._check = None
                self._trust.confirmed()
                self._proved()
                # A watch that is lost as soon as it was opened, again and again, is a fault like any other.
                if not check.first:
                    self._backoff.reset()
            elif not check.disagreed:
                check.disagreed = True
                check.until = min(check.until, self._now + _SETTLE_S)

    def _check_failed(self, check: _Check) -> None:
        if check.disagreed:
            self._must_list = True
            self._list()
            return
        self._unwatch()
        text = f"the watch didn't answer within {self._config.request_timeout_s:g} s"
        self._lost(RegistryUnavailable(text, endpoints=(self._registry.address,)))
        self._list()

    def _list(self) -> None:
        """List, and bring the differences to the index."""
        self._check = None
        # Before the outcome is known: one that fails though nothing is in doubt leaves the next refresh to a probe.
        every_s = max(_LIST_EVERY_S, _LIST_EVERY_S_EACH * len(self._mirror.records))
        self._list_at = self._now + self._rng.uniform(every_s / 2, every_s)
        try:
            listing = self._registry.list(self._namespace)
        except ReachError as error:
            self._refresh_failed(error)
            if self._freshness.status == "starting" and isinstance(error, RegistryUnavailable):
                self._recall()
            return
        news = self._mirror.take_list(listing, self._now)
        if news:
            # An open watch should have told. It may be silently dead, and a new one costs little.
            self._unwatch()
            self._findings.extend(news)
        self._must_list = False
        if self._watch is not None:
            self._proved()
            self._backoff.reset()
        else:
            self._freshness.prove(self._now, self._trust.confirm_at)

    def _recall(self) -> None:
        """Begin with what an earlier run knew."""
        snapshot = self._snapshots.load(self._host.clock.wall())
        if snapshot is not None:
            self._findings.extend(self._mirror.take_snapshot(snapshot.listing))
            self._freshness.recall(self._now, snapshot.age_s)

    def _keep(self) -> None:
        """Save what is known for a later run, now and then while it is proved, and at the end."""
        proof_at = self._freshness.proof_at
        if self._freshness.status == "fresh" and proof_at is not None:
            # As of the last proof, which is what counts.
            proved = self._host.clock.wall() - (self._now - proof_at)
            self._snapshots.keep(self._mirror, proved, now=self._now, at_once=self._host.stopping)

    def _refresh_failed(self, error: ReachError) -> None:
        self._lost(error)
        self._trust.store_lost(self._now)
        self._freshness.refresh_at = self._now + self._backoff.after(error)

    # --- how it stands ----------------------------------------------------------------------------------------

    def _proved(self) -> None:
        """What we know is what the store holds, and a watch is open."""
        self._freshness.prove(self._now, self._trust.confirm_at)
        self._error = None
        if not self._connected:
            self._connected = True
            self._freshness.part_ways(self._now)

    def _lost(self, error: ReachError) -> None:
        self._error = error
        self._connected = False

    def _age(self) -> None:
        if self._check is not None:
            # The watch is about to answer, or else falls silent within a request's time.
            return
        before = self._freshness.status
        self._freshness.age(self._now)
        if before != "expired" and self._freshness.status == "expired":
            self._findings.extend(self._mirror.clear())
            self._must_list = True
            self._freshness.refresh_by(self._now)

    def _tell(self) -> None:
        """Tell how it stands if that is news."""
        told = describe(
            self._freshness,
            doubts=self._trust.confirm_at is not None,
            connected=self._connected,
            revision=self._mirror.revision,
            error=self._error,
            now=self._now,
        )
        if told is None:
            return
        status, detail = told
        if status != self._told:
            self._told = status
            self._findings.append(RegistryChanged(address=self._registry.address, status=status, detail=detail))

    def _publish(self) -> None:
        view = WatchView(
            self._freshness.status,
            self._watch is not None,
            self._freshness.proof_at,
            self._mirror.revision,
            self._mirror.skipped,
            self._error,
        )
        findings, self._findings = self._findings, []
        self._found([*findings, view])
