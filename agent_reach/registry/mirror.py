"""What the registry holds, as last heard. Takes in lists and changes; gives their meaning for the index as data."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from types import MappingProxyType
from typing import TypeAlias, assert_never

from agent_reach.events import RecordSkipped
from agent_reach.model import AgentInfo
from agent_reach.ports import Deleted, Listing, Probe, Put, RawRecord, WatchChanges
from agent_reach.registry.records import decode
from agent_reach.registry.trust import Trust
from agent_reach.routing.index import Change, Remove, Reset, Upsert

__all__ = ["Mirror", "News"]

# What to bring to the index, and what to tell of.
News: TypeAlias = Change | RecordSkipped


# Instances that are brought to an index at once: 10 ms, no more.
_PORTION = 250


@dataclass(frozen=True, slots=True)
class _Skipped:
    value: bytes
    reason: str


class Mirror:
    """The records of one namespace. Pure: time comes in as `now`, in seconds.

    `revision` is the last one taken in: every change up to it is known. Who goes is `trust`'s decision.
    """

    def __init__(self, namespace: str, trust: Trust, *, allow_local: bool) -> None:
        self.revision = 0
        # Counts the histories of the store.
        self._epoch = 0
        # The newest that a list or a probe named, of whatever namespace.
        self._seen_revision = 0
        # Between a probe and the watch's answer: at which revision the number of records changed, and by how many.
        self._steps: list[tuple[int, int]] | None = None
        self._namespace = namespace
        self._trust = trust
        self._allow_local = allow_local
        self._cluster_id: int | None = None
        # Nothing was listed yet, or all was dropped.
        self._blank = True
        self._records: dict[str, RawRecord] = {}
        self._infos: dict[str, AgentInfo] = {}
        self._skipped: dict[str, _Skipped] = {}

    @property
    def skipped(self) -> Mapping[str, str]:
        """Which records can't be read, and why."""
        return MappingProxyType({agent_id: s.reason for agent_id, s in self._skipped.items()})

    @property
    def records(self) -> Collection[RawRecord]:
        """What the registry holds, readable or not."""
        return self._records.values()

    @property
    def cluster_id(self) -> int | None:
        """Whose records these are; None before the first list."""
        return self._cluster_id

    def sample(self, rng: random.Random, count: int) -> tuple[RawRecord, ...]:
        """The record that was written last, and `count` others; of those that the store is known to hold, and whose
        key is surely the one that we would write.
        """
        doubted = self._trust.doubted
        held = [self._records[agent_id] for agent_id in self._infos if agent_id not in doubted]
        if not held:
            return ()
        newest = max(held, key=lambda raw: raw.revision)
        return (newest, *(raw for raw in rng.sample(held, min(count, len(held))) if raw is not newest))

    def take_list(self, listing: Listing, now: float) -> tuple[News, ...]:
        """Take in a list; what it brings ends with a `Reset`, and is empty if all was known."""
        self._trust.heard(len(self._records), now)
        self._steps = None
        anew = self._cluster_id is not None and self._is_another_history(listing)
        if anew:
            self._epoch += 1
            self._trust.store_lost(now)
        self._cluster_id, self.revision = listing.cluster_id, listing.revision
        self._seen_revision = listing.revision
        records = {raw.agent_id: raw for raw in listing.records}
        believed = self._trust.believes_list(self._records.keys(), records, now)
        if records == self._records and not (self._blank or anew):
            return ()
        was_blank, self._blank = self._blank, False
        news: list[News] = []
        infos = {raw.agent_id: info for raw in listing.records if (info := self._read(raw, news)) is not None}
        fresh = [info for info in infos.values() if self._infos.get(info.agent_id) is not info]
        if believed:
            self._records, self._infos = records, infos
            self._skipped = {agent_id: s for agent_id, s in self._skipped.items() if agent_id in records}
        else:
            self._records |= records
            self._infos |= infos
        if was_blank:
            return (*news, *self._portions(fresh, listing.revision, first_drops=True))
        # What is new in portions; then all of it, which costs next to nothing where it is known, to drop the rest.
        last = Reset(tuple(infos.values()), listing.revision, self._epoch, drop_missing=believed)
        return (*news, *self._portions(fresh, listing.revision), last)

    def take_snapshot(self, listing: Listing) -> tuple[News, ...]:
        """Take in what was known in an earlier run, before the first list; that one then says who is gone."""
        self._blank = False
        self._cluster_id, self.revision, self._seen_revision = (
            listing.cluster_id,
            listing.revision,
            listing.revision,
        )
        news: list[News] = []
        self._infos = {r.agent_id: info for r in listing.records if (info := self._read(r, news)) is not None}
        self._records = {raw.agent_id: raw for raw in listing.records}
        return (*news, *self._portions(self._infos.values(), listing.revision, first_drops=True))

    def take_changes(self, message: WatchChanges, now: float) -> tuple[News, ...]:
        """Take in what a watch brought; what isn't newer than what is known says nothing new.

        A store's message holds all changes of each revision in it, or none.
        """
        self._trust.heard(len(self._records), now)
        news: list[News] = []
        known = self.revision
        for change in message.changes:
            before = self._held
            match change:
                case Put():
                    if change.record.revision > known:
                        self.revision = change.record.revision
                        self._put(change.record, news)
                case Deleted():
                    if change.revision > known:
                        self.revision = change.revision
                        self._delete(change, now, news)
                case _:
                    assert_never(change)
            if self._steps is not None and self._held != before:
                self._steps.append((self.revision, self._held - before))
        return tuple(news)

    def take_progress(self, now: float) -> None:
        """A watch said that nothing changed."""
        self._trust.heard(len(self._records), now)

    def take_probe(self, sample: Collection[RawRecord], probe: Probe, now: float) -> bool:
        """Take in how the store stands, and what became of a `sample`; False if it isn't the history that we know.

        In a store that was wiped no record of ours is there under its lease; in one that was restored from before
        our newest record, that one isn't.
        """
        self._trust.heard(len(self._records), now)
        self._steps = []
        if self._is_elsewhere(probe.cluster_id, probe.revision):
            return False
        self._seen_revision = probe.revision
        return not sample or len(probe.changed) < len(sample)

    def matches(self, sample: Collection[RawRecord], probe: Probe) -> bool:
        """True if the store held at the probe what is known; to be asked once a watch has told of every change up
        to the probe's revision.
        """
        later = sum(step for revision, step in self._steps or () if revision > probe.revision)
        if self._held - later != probe.count:
            return False
        # What changed there must have changed here.
        if any(r.agent_id in probe.changed and self._records.get(r.agent_id) == r for r in sample):
            return False
        self._steps = None
        return True

    def clear(self) -> tuple[News, ...]:
        """Drop everything; the next list fills it again."""
        self._blank = True
        self._records.clear()
        self._infos.clear()
        self._trust.forget()
        return (Reset((), self.revision, self._epoch),)

    @property
    def _held(self) -> int:
        """How many records the store is known to hold."""
        return len(self._records) - len(self._trust.doubted)

    def _is_elsewhere(self, cluster_id: int, revision: int) -> bool:
        return cluster_id != self._cluster_id or revision < max(self.revision, self._seen_revision)

    def _is_another_history(self, listing: Listing) -> bool:
        """True if the store was restored, wiped or replaced: its revisions then say nothing about ours.

        Everything up to our revision is known here, so a strange record from before it gives another history
        away, also when its revisions have caught up with ours.
        """
        if self._is_elsewhere(listing.cluster_id, listing.revision):
            return True
        return not self._blank and any(
            raw.revision <= self.revision and self._records.get(raw.agent_id) != raw for raw in listing.records
        )

    def _portions(self, infos: Iterable[AgentInfo], revision: int, *, first_drops: bool = False) -> Iterator[Reset]:
        """Bring these to the index, in portions that don't hold up its loop; the first empties it, if it is to."""
        rest = iter(infos)
        portion = tuple(islice(rest, _PORTION))
        while portion or first_drops:
            yield Reset(portion, revision, self._epoch, drop_missing=first_drops)
            portion, first_drops = tuple(islice(rest, _PORTION)), False

    def _put(self, raw: RawRecord, news: list[News]) -> None:
        self._trust.seen(raw.agent_id)
        info = self._read(raw, news)
        self._records[raw.agent_id] = raw
        if info is not None:
            self._infos[raw.agent_id] = info
            news.append(Upsert(info, raw.revision))
        elif self._infos.pop(raw.agent_id, None) is not None:
            # The last good record is no longer in the registry, and nobody can say whether its process still is.
            news.append(Remove(raw.agent_id, raw.revision))

    def _delete(self, change: Deleted, now: float, news: list[News]) -> None:
        if change.agent_id not in self._records or not self._trust.believes_removal(change.agent_id, now):
            return
        del self._records[change.agent_id]
        self._skipped.pop(change.agent_id, None)
        if self._infos.pop(change.agent_id, None) is not None:
            news.append(Remove(change.agent_id, change.revision))

    def _read(self, raw: RawRecord, news: list[News]) -> AgentInfo | None:
        """Decode a record; None if it can't be read, which is told once for each content."""
        held = self._records.get(raw.agent_id)
        if held is not None and held.value == raw.value and raw.agent_id in self._infos:
            return self._infos[raw.agent_id]
        try:
            info = decode(raw, self._namespace, allow_local=self._allow_local)
        except ValueError as error:
            before = self._skipped.get(raw.agent_id)
            if before is None or before.value != raw.value:
                self._skipped[raw.agent_id] = _Skipped(raw.value, str(error))
                news.append(RecordSkipped(agent_id=raw.agent_id, reason=str(error)))
            return None
        self._skipped.pop(raw.agent_id, None)
        return info
