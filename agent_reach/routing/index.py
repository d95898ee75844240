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
        """Forget every instance; the history stays."""
        for agent_id in list(self._instances):
            self._forget(agent_id)

    def _upsert(self, change: Upsert, now: float) -> bool:
        if change.revision < self.revision:
            return False
        self.revision = change.revision
        self._take(change.info, now)
        return True

    def _remove(self, change: Remove) -> bool:
        if change.revision < self.revision:
            return False
        self.revision = change.revision
        if change.agent_id not in self._instances:
            return False
        self._forget(change.agent_id)
        return True

    def _reset(self, change: Reset, now: float) -> bool:
        if (change.epoch, change.revision) < (self.epoch, self.revision):
            return False
        self.epoch, self.revision = change.epoch, change.revision
        if change.drop_missing:
            listed = {info.agent_id for info in change.infos}
            for agent_id in [known for known in self._instances if known not in listed]:
                self._forget(agent_id)
        for info in change.infos:
            self._take(info, now)
        return True

    def _take(self, info: AgentInfo, now: float) -> None:
        """Put an instance in; what was learnt of it is kept while its process is the same."""
        known = self._instances.get(info.agent_id)
        if known is not None and known.info == info:
            return
        if known is not None:
            self._forget(info.agent_id)
        if known is not None and known.info.incarnation == info.incarnation:
            known.info = info
            instance = known
        else:
            instance = Instance(info, self._config, now)
        self._instances[info.agent_id] = instance
        self._list(instance)

    def _forget(self, agent_id: str) -> None:
        self._unlist(self._instances.pop(agent_id))

    def _list(self, instance: Instance) -> None:
        for capability in _distinct(instance.info):
            candidate = instance.offer(capability)
            self._add(self._exact, capability.name, candidate)
            for target in _alias_targets(capability):
                self._add(self._alias, target, candidate)

    def _unlist(self, instance: Instance) -> None:
        for capability in _distinct(instance.info):
            self._drop(self._exact, capability.name, instance)
            for target in _alias_targets(capability):
                self._drop(self._alias, target, instance)

    @staticmethod
    def _add(table: dict[str, tuple[Candidate, ...]], name: str, candidate: Candidate) -> None:
        table[name] = (*table.get(name, ()), candidate)

    @staticmethod
    def _drop(table: dict[str, tuple[Candidate, ...]], name: str, instance: Instance) -> None:
        left = tuple(c for c in table.get(name, ()) if c.instance is not instance)
        if left:
            table[name] = left
        else:
            table.pop(name, None)


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
