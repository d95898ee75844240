"""A registry in this process: for tests, notebooks and agents that share one process.

It keeps the promises of etcd (one contract suite runs on both): a revision that rises by one with each write,
leases, create-only writes, watches with a history, compaction. Faults are scripted: `down`, `fail_next`,
`wipe`, `freeze_watches`, `drop_watches`, `expire`.
"""

from __future__ import annotations

import itertools
import math
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar

from agent_reach.errors import RegistryUnavailable
from agent_reach.ports import (
    Clock,
    Created,
    Deleted,
    LeaseLost,
    Listing,
    Occupied,
    Probe,
    Put,
    RawRecord,
    SystemClock,
    Watch,
    WatchChanges,
    WatchLost,
    WatchMessage,
    WatchProgress,
)
from agent_reach.registry.alarm import Alarm
from agent_reach.registry.mailbox import Mailbox, MailboxWatch

__all__ = ["MemoryRegistry"]

_OPERATIONS = ("grant", "keep_alive", "time_left", "revoke", "get", "create", "replace", "list", "probe", "watch")
# An empty etcd is at revision 1.
_FIRST_REVISION = 1
# Older changes are compacted away: a watch that starts that far back has to list first anyway.
_HISTORY = 10_000


@dataclass(slots=True)
class _Lease:
    ttl_s: int
    ends_at: float


@dataclass(frozen=True, slots=True)
class _Past:
    namespace: str
    message: WatchChanges


class MemoryRegistry:
    """Implements the `Registry` port in memory, with scripted faults.

    Leases end on `clock`, at the moment they are due if an event loop runs, else at the next request.
    `apps` maps a local url (`local://AGENT_ID`) to an ASGI app: the in-process dialer calls agents through it.
    """

    _by_name: ClassVar[weakref.WeakValueDictionary[str, MemoryRegistry]] = weakref.WeakValueDictionary()
    _by_name_lock = threading.Lock()

    def __init__(self, clock: Clock | None = None, *, name: str = "local") -> None:
        self.apps: dict[str, object] = {}
        self._clock: Clock = clock or SystemClock()
        self._name = name
        self._lock = threading.Lock()
        self._cluster_id = 1
        self._lease_ids = itertools.count(1)
        self._down: str | None = None
        self._faults: dict[str, deque[Exception]] = {}
        self._watches: list[Mailbox] = []
        # Watches that ended but haven't been told yet.
        self._ended: list[Mailbox] = []
        self._frozen = False
        self._alarm = Alarm(self._clock, self._look_in)
        self._clear()

    @classmethod
    def named(cls, name: str, clock: Clock | None = None) -> MemoryRegistry:
        """Return this process's registry of that name; `clock` counts only for the first who asks.

        It lives as long as somebody holds it.
        """
        with cls._by_name_lock:
            registry = cls._by_name.get(name)
            if registry is None:
                registry = cls._by_name[name] = cls(clock, name=name)
            return registry

    def __repr__(self) -> str:
        return f"<MemoryRegistry {self.address} at revision {self._revision}>"

    # --- the port ------------------------------------------------------------------------------------

    @property
    def blocking(self) -> bool:
        """False: nothing waits for a network."""
        return False

    @property
    def address(self) -> str:
        """`memory://NAME`."""
        return f"memory://{self._name}"

    @property
    def clock(self) -> Clock:
        """The clock that leases end on."""
        return self._clock

    @property
    def revision(self) -> int:
        """The last write's revision."""
        return self._revision

    def grant(self, ttl_s: float) -> int:
        """Open a lease of `ttl_s` seconds, rounded up to whole ones as etcd does."""
        with self._request("grant"):
            lease = next(self._lease_ids)
            whole_s = math.ceil(ttl_s)
            self._leases[lease] = _Lease(whole_s, self._clock.now() + whole_s)
            return lease

    def keep_alive(self, lease: int) -> bool:
        """Renew once; False if the lease lives no longer."""
        with self._request("keep_alive"):
            known = self._leases.get(lease)
            if known is None:
                return False
            known.ends_at = self._clock.now() + known.ttl_s
            return True

    def revoke(self, lease: int) -> None:
        """End a lease and with it its records; one that is gone already is no error."""
        with self._request("revoke"):
            self._end_lease(lease)

    def time_left(self, lease: int) -> float:
        """Whole seconds that a lease has left; 0 if it ended."""
        with self._request("time_left"):
            of = self._leases.get(lease)
            return 0.0 if of is None else float(int(of.ends_at - self._clock.now()))

    def get(self, namespace: str, agent_id: str) -> RawRecord | None:
        """One record, as it is now."""
        with self._request("get"):
            return self._entries.get((namespace, agent_id))

    def create(self, namespace: str, agent_id: str, value: bytes, lease: int) -> Created | Occupied:
        """Write only if no record is there."""
        with self._request("create"):
            held = self._entries.get((namespace, agent_id))
            if held is not None:
                return Occupied(held)
            self._check_lease(lease)
            return Created(self._put(namespace, agent_id, value, lease))

    def replace(self, namespace: str, held: RawRecord, value: bytes, lease: int) -> bool:
        """Write over `held` if it is still what is there."""
        with self._request("replace"):
            if self._entries.get((namespace, held.agent_id)) != held:
                return False
            self._check_lease(lease)
            self._put(namespace, held.agent_id, value, lease)
            return True

    def list(self, namespace: str) -> Listing:
        """Everything in the namespace, ordered by agent id."""
        with self._request("list"):
            records = [record for (held_in, _), record in sorted(self._entries.items()) if held_in == namespace]
            return Listing(self._cluster_id, self._revision, tuple(records))

    def probe(self, namespace: str, known: Sequence[RawRecord]) -> Probe:
        """Ask how the namespace stands, and which of the records in `known` have changed."""
        with self._request("probe"):
            count = sum(held_in == namespace for held_in, _ in self._entries)
            changed = {r.agent_id for r in known if self._entries.get((namespace, r.agent_id)) != r}
            return Probe(self._cluster_id, self._revision, count, frozenset(changed))

    def watch(self, namespace: str, from_revision: int, deliver: Callable[[WatchMessage], None]) -> Watch:
        """Deliver changes from `from_revision` on. One that lies ahead is accepted and silent until then."""
        watch = Mailbox(namespace, from_revision, deliver)
        with self._request("watch"):
            if from_revision < self._compacted:
                watch.put(WatchLost(f"revision {from_revision} was compacted", compacted=True))
                self._ended.append(watch)
            else:
                for past in self._history:
                    if past.namespace == namespace and past.message.revision >= from_revision:
                        watch.put(past.message)
                self._watches.append(watch)

        return MailboxWatch(watch, self._send_progress, self._forget_watch)

    def close(self) -> None:
        """Do nothing: others in this process may hold the same registry."""

    # --- scripted faults and test helpers ----------------------------------------------------------------

    def down(self, reason: str = "it was taken down") -> None:
        """Every request raises `RegistryUnavailable` and watches are lost until `up()`. Leases run on."""
        with self._locked():
            self._down = reason
            self._lose_watches(reason)

    def up(self) -> None:
        """Answer again."""
        with self._locked():
            self._down = None

    def fail_next(self, operation: str, error: Exception, times: int = 1) -> None:
        """Let the next `times` requests of this kind (`grant`, `keep_alive`, `create`, `list`, …) raise `error`."""
        if operation not in _OPERATIONS:
            raise ValueError(f"{operation!r} is no operation of the Registry port")
        with self._locked():
            self._faults.setdefault(operation, deque()).extend([error] * times)

    def wipe(self, *, silent: bool = False, new_cluster: bool = False) -> None:
        """Begin anew: no records, no leases, revisions from the start. Watches are lost.

        With `silent` they stay open but wait for their old revision; with `new_cluster` the cluster id changes.
        """
        with self._locked():
            self._clear()
            self._cluster_id += new_cluster
            if not silent:
                self._lose_watches("the registry was wiped")

    def compact(self, revision: int | None = None) -> None:
        """Forget the changes before `revision` (default: before now)."""
        with self._locked():
            self._compact(self._revision if revision is None else revision)

    def progress(self) -> None:
        """Send every watch the proof that it missed nothing."""
        with self._locked():
            for watch in self._watches:
                watch.put(WatchProgress(self._revision))

    def freeze_watches(self) -> None:
        """Watches fall silent; nobody is told."""
        with self._locked():
            self._frozen = True

    def thaw_watches(self) -> None:
        """Frozen watches deliver what they held back and go on."""
        with self._locked():
            self._frozen = False

    def drop_watches(self, reason: str = "dropped", *, compacted: bool = False) -> None:
        """End every watch."""
        with self._locked():
            self._lose_watches(reason, compacted=compacted)

    def expire(self, agent_id: str) -> None:
        """End the lease under which this agent is registered, in every namespace, as if its time were up."""
        with self._locked():
            for lease in {r.lease for (_, held), r in self._entries.items() if held == agent_id and r.lease}:
                self._end_lease(lease)

    def delete(self, namespace: str, agent_id: str) -> bool:
        """Delete a record and leave its lease; False if there was none."""
        with self._locked():
            return self._delete([(namespace, agent_id)])

    def put_raw(self, namespace: str, agent_id: str, value: bytes, lease: int = 0) -> int:
        """Write any bytes, over whatever is there; returns the revision."""
        with self._locked():
            return self._put(namespace, agent_id, value, lease)

    # --- inside: all of it under the lock ------------------------------------------------------------------

    def _clear(self) -> None:
        self._revision = self._compacted = _FIRST_REVISION
        self._entries: dict[tuple[str, str], RawRecord] = {}
        self._leases: dict[int, _Lease] = {}
        self._history: deque[_Past] = deque()

    @contextmanager
    def _request(self, operation: str) -> Iterator[None]:
        with self._locked():
            if self._down is not None:
                raise RegistryUnavailable(
                    f"the registry {self.address} can't be reached: {self._down}", endpoints=(self.address,)
                )
            if faults := self._faults.get(operation):
                raise faults.popleft()
            yield

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Lock, let leases end that are due, run; then deliver, when the lock is free again."""
        try:
            with self._lock:
                self._end_due_leases()
                yield
                self._alarm.set(min((lease.ends_at for lease in self._leases.values()), default=None))
        finally:
            # Also after an error: leases may have ended.
            self._flush()

    def _look_in(self) -> None:
        """A lease is due."""
        with self._locked():
            pass

    def _flush(self) -> None:
        with self._lock:
            if self._frozen:
                return
            watches = [*self._watches, *self._ended]
            self._ended.clear()
        for watch in watches:
            watch.flush()

    def _put(self, namespace: str, agent_id: str, value: bytes, lease: int) -> int:
        self._revision += 1
        record = RawRecord(agent_id, value, self._revision, lease)
        self._entries[namespace, agent_id] = record
        self._remember(namespace, WatchChanges(self._revision, (Put(record),)))
        return self._revision

    def _delete(self, keys: Iterable[tuple[str, str]]) -> bool:
        """Delete in one transaction: all of them share one revision."""
        there = sorted(key for key in keys if key in self._entries)
        if not there:
            return False
        self._revision += 1
        for namespace, of_namespace in itertools.groupby(there, key=lambda key: key[0]):
            gone = tuple(Deleted(agent_id, self._revision) for _, agent_id in of_namespace)
            self._remember(namespace, WatchChanges(self._revision, gone))
        for key in there:
            del self._entries[key]
        return True

    def _remember(self, namespace: str, message: WatchChanges) -> None:
        self._history.append(_Past(namespace, message))
        if len(self._history) > _HISTORY:
            self._compact(self._history[_HISTORY // 2].message.revision)
        for watch in self._watches:
            if watch.namespace == namespace and message.revision >= watch.from_revision:
                watch.put(message)

    def _compact(self, revision: int) -> None:
        if revision > self._revision:
            raise ValueError(f"revision {revision} lies ahead of {self._revision}")
        self._compacted = max(self._compacted, revision)
        while self._history and self._history[0].message.revision < self._compacted:
            self._history.popleft()

    def _lose_watches(self, reason: str, *, compacted: bool = False) -> None:
        for watch in self._watches:
            watch.put(WatchLost(reason, compacted=compacted))
        self._ended.extend(self._watches)
        self._watches.clear()

    def _end_lease(self, lease: int) -> None:
        if self._leases.pop(lease, None) is not None:
            self._delete([key for key, record in self._entries.items() if record.lease == lease])

    def _end_due_leases(self) -> None:
        now = self._clock.now()
        for lease in [lease for lease, of in self._leases.items() if of.ends_at <= now]:
            self._end_lease(lease)

    def _check_lease(self, lease: int) -> None:
        if lease not in self._leases:
            raise LeaseLost(f"lease {lease} lives no longer")

    def _send_progress(self, watch: Mailbox) -> None:
        with self._locked():
            # Newer etcds say nothing of a watch that begins in the future.
            if watch in self._watches and self._revision >= watch.from_revision:
                watch.put(WatchProgress(self._revision))

    def _forget_watch(self, watch: Mailbox) -> None:
        with self._lock:
            if watch in self._watches:
                self._watches.remove(watch)
