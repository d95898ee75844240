"""Which instances offer which capability, as far as we know.

Lookup is one dictionary access. A change rebuilds the tuples of the changed instance's own capabilities and
touches nothing else; tuples already handed out stay as they are, so a change never races a call.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias, assert_never

from agent_reach.config import ReachConfig
from agent_reach.errors import ConfigError
from agent_reach.model import AgentInfo, CapabilityInfo
from agent_reach.routing.instance import Candidate, Instance
from agent_reach.routing.names import alias_target

__all__ = ["Change", "Index", "Lookup", "Remove", "Reset", "Upsert"]


@dataclass(frozen=True, slots=True)
class Upsert:
    """An instance came or changed, at `revision`."""

    info: AgentInfo
    revision: int


@dataclass(frozen=True, slots=True)
class Remove:
    """An instance went, at `revision`."""

    agent_id: str
    revision: int


@dataclass(frozen=True, slots=True)
class Reset:
    """A list of everything at `revision`.

    `epoch` counts histories: it rises when the store's revisions began anew (restored, wiped, replaced), and
    only then may a lower revision win. With `drop_missing` False, instances that the list lacks are kept:
    the list isn't believed yet.
    """

    infos: tuple[AgentInfo, ...]
    revision: int
    epoch: int
    drop_missing: bool = True


Change: TypeAlias = Upsert | Remove | Reset


@dataclass(frozen=True, slots=True)
class Lookup:
    """Who answers for a capability; `deprecated` if only by a soft alias of another version."""

    candidates: tuple[Candidate, ...]
    deprecated: bool = False


_NOBODY = Lookup(())


class Index:
    """capability -> candidates. Not thread-safe: all changes come from one thread."""

    def __init__(self, config: ReachConfig | None = None) -> None:
        self._config = config or ReachConfig()
        self._instances: dict[str, Instance] = {}
        self._exact: dict[str, tuple[Candidate, ...]] = {}
        self._alias: dict[str, tuple[Candidate, ...]] = {}
        self.revision = 0
        self.epoch = 0

    def __len__(self) -> int:
        return len(self._instances)

    @property
    def instances(self) -> Mapping[str, Instance]:
        """Everything known, by agent id."""
        return self._instances

    @property
    def capabilities(self) -> Iterable[str]:
        """Every name that someone answers for, soft aliases included."""
        return self._exact.keys() | self._alias.keys()

    def lookup(self, capability: str) -> Lookup:
        """Return the instances of exactly this capability, else those that stand in by a soft alias."""
        if exact := self._exact.get(capability):
            return Lookup(exact)
        if stand_ins := self._alias.get(capability):
            return Lookup(stand_ins, deprecated=True)
        return _NOBODY

    def apply(self, change: Change, now: float) -> bool:
        """Take in a change at `now` (seconds, monotonic); False if it is older than what we know."""
        match change:
            case Upsert():
                return self._upsert(change, now)
            case Remove():
                return self._remove(change)
            case Reset():
                return self._reset(change, now)
            case _:
                assert_never(change)

    def clear(self) -> None:
        """Forget every instance and the history: whatever comes next is the beginning of one."""
        edits = _Edits()
        for agent_id in list(self._instances):
            self._forget(agent_id, edits)
        edits.write(self._exact, self._alias)
        self.revision = self.epoch = 0

    def _upsert(self, change: Upsert, now: float) -> bool:
        if change.revision < self.revision:
            return False
        self.revision = change.revision
        edits = _Edits()
        self._take(change.info, now, edits)
        edits.write(self._exact, self._alias)
        return True

    def _remove(self, change: Remove) -> bool:
        if change.revision < self.revision:
            return False
        self.revision = change.revision
        if change.agent_id not in self._instances:
            return False
        edits = _Edits()
        self._forget(change.agent_id, edits)
        edits.write(self._exact, self._alias)
        return True

    def _reset(self, change: Reset, now: float) -> bool:
        if (change.epoch, change.revision) < (self.epoch, self.revision):
            return False
        self.epoch, self.revision = change.epoch, change.revision
        edits = _Edits()
        if change.drop_missing:
            listed = {info.agent_id for info in change.infos}
            for agent_id in [known for known in self._instances if known not in listed]:
                self._forget(agent_id, edits)
        for info in change.infos:
            self._take(info, now, edits)
        edits.write(self._exact, self._alias)
        return True

    def _take(self, info: AgentInfo, now: float, edits: _Edits) -> None:
        """Put an instance in; what was learnt of it is kept while its process is the same."""
        known = self._instances.get(info.agent_id)
        if known is not None and (known.info is info or known.info == info):
            return
        if known is not None:
            self._forget(info.agent_id, edits)
        if known is not None and known.info.incarnation == info.incarnation:
            known.info = info
            instance = known
        else:
            instance = Instance(info, self._config, now)
        self._instances[info.agent_id] = instance
        edits.add(instance)

    def _forget(self, agent_id: str, edits: _Edits) -> None:
        edits.drop(self._instances.pop(agent_id))


_Table: TypeAlias = dict[str, tuple[Candidate, ...]]


class _Edits:
    """What a change does to the tables. Each tuple is rebuilt once, however many instances of it came or went."""

    def __init__(self) -> None:
        # By (is it an alias, name): who leaves the tuple, who joins it.
        self._gone: dict[tuple[bool, str], set[Instance]] = {}
        self._new: dict[tuple[bool, str], list[Candidate]] = {}

    def add(self, instance: Instance) -> None:
        """List an instance under every name that its record answers for."""
        for capability in _distinct(instance.info):
            candidate = instance.offer(capability)
            for place in _places(capability):
                self._new.setdefault(place, []).append(candidate)

    def drop(self, instance: Instance) -> None:
        """Take it off the names of the record that it has had so far."""
        for capability in _distinct(instance.info):
            for place in _places(capability):
                self._gone.setdefault(place, set()).add(instance)

    def write(self, exact: _Table, alias: _Table) -> None:
        """Rebuild the tuples that changed."""
        for place in self._gone.keys() | self._new.keys():
            is_alias, name = place
            table = alias if is_alias else exact
            gone = self._gone.get(place, ())
            left = (*(c for c in table.get(name, ()) if c.instance not in gone), *self._new.get(place, ()))
            if left:
                table[name] = left
            else:
                table.pop(name, None)


def _places(capability: CapabilityInfo) -> list[tuple[bool, str]]:
    """Where a capability stands: under its own name, and under those that it stands in for."""
    return [(False, capability.name), *((True, target) for target in _alias_targets(capability))]


def _distinct(info: AgentInfo) -> Iterable[CapabilityInfo]:
    """An instance's capabilities, each name once, also where a record repeats one."""
    return {capability.name: capability for capability in info.capabilities}.values()


def _alias_targets(capability: CapabilityInfo) -> list[str]:
    """The names that a capability stands in for; a record's bad alias is nobody's loss but its own."""
    targets = []
    for alias in capability.soft_aliases:
        try:
            targets.append(alias_target(capability.name, alias))
        except ConfigError:
            continue
    return targets
