"""What every registry promises; run on the one in memory and on a real etcd."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from agent_reach.config import RegistryConfig
from agent_reach.ports import (
    Created,
    Deleted,
    LeaseLost,
    Occupied,
    Put,
    Registry,
    WatchChanges,
    WatchLost,
    WatchMessage,
    WatchProgress,
)
from agent_reach.registry.memory import MemoryRegistry
from agent_reach.testing import ManualClock
from agent_reach.testing.etcd import EtcdServer

TTL_S = 2.0
# Far beyond what anything here takes, so that a slow machine doesn't fail it.
DEADLINE_S = 20.0


class Bench:
    """A registry, a namespace of its own, and the means to let time pass and to break things from outside."""

    registry: Registry

    def __init__(self) -> None:
        self.namespace = f"t{uuid.uuid4().hex[:8]}"

    async def eventually(self, check: Callable[[], object]) -> None:
        raise NotImplementedError

    async def live_on(self, lease: int, seconds: float) -> None:
        """Keep a lease alive over this time."""
        raise NotImplementedError

    def delete(self, agent_id: str) -> None:
        raise NotImplementedError

    def put_without_lease(self, agent_id: str, value: bytes) -> None:
        raise NotImplementedError

    def compact(self, revision: int) -> None:
        raise NotImplementedError

    def held(self, namespace: str | None = None) -> dict[str, bytes]:
        listing = self.registry.list(namespace or self.namespace)
        return {record.agent_id: record.value for record in listing.records}

    def register(self, agent_id: str, value: bytes = b"{}", namespace: str | None = None) -> int:
        lease = self.registry.grant(TTL_S * 10)
        assert isinstance(self.registry.create(namespace or self.namespace, agent_id, value, lease), Created)
        return lease


class MemoryBench(Bench):
    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.memory = MemoryRegistry(self.clock)
        self.registry = self.memory

    async def eventually(self, check: Callable[[], object]) -> None:
        for _ in range(int(DEADLINE_S)):
            if check():
                return
            await self.clock.advance(0.5)
        pytest.fail("it never came true")

    async def live_on(self, lease: int, seconds: float) -> None:
        for _ in range(int(seconds / 0.5)):
            await self.clock.advance(0.5)
            assert self.registry.keep_alive(lease)

    def delete(self, agent_id: str) -> None:
        self.memory.delete(self.namespace, agent_id)

    def put_without_lease(self, agent_id: str, value: bytes) -> None:
        self.memory.put_raw(self.namespace, agent_id, value)

    def compact(self, revision: int) -> None:
        self.memory.compact(revision)


class EtcdBench(Bench):
    def __init__(self, server: EtcdServer) -> None:
        super().__init__()
        import pyetcd

        from agent_reach.registry.etcd import EtcdRegistry

        self.registry = EtcdRegistry([f"127.0.0.1:{server.port}"], config=RegistryConfig())
        self.raw = pyetcd.client(port=server.port, timeout=5)

    async def eventually(self, check: Callable[[], object]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not check():
            assert time.monotonic() < deadline, "it never came true"
            await asyncio.sleep(0.02)

    async def live_on(self, lease: int, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            await asyncio.sleep(0.5)
            assert self.registry.keep_alive(lease)

    def key(self, agent_id: str) -> str:
        return f"/agent-reach/v1/{self.namespace}/agents/{agent_id}"

    def delete(self, agent_id: str) -> None:
        assert self.raw.delete(self.key(agent_id))

    def put_without_lease(self, agent_id: str, value: bytes) -> None:
        self.raw.put(self.key(agent_id), value)

    def compact(self, revision: int) -> None:
        self.raw.compact(revision)


@pytest.fixture(params=["memory", pytest.param("etcd", marks=pytest.mark.etcd)])
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    made: Bench = MemoryBench() if request.param == "memory" else EtcdBench(request.getfixturevalue("etcd"))
    yield made
    made.registry.close()
    if isinstance(made, EtcdBench):
        made.raw.close()


class Mail:
    """What a watch delivered."""

    def __init__(self) -> None:
        self.messages: list[WatchMessage] = []

    def __call__(self, message: WatchMessage) -> None:
        self.messages.append(message)

    @property
    def changes(self) -> list[Put | Deleted]:
        return [change for m in self.messages if isinstance(m, WatchChanges) for change in m.changes]

    @property
    def story(self) -> list[tuple[str, str]]:
        return [
            ("put", change.record.agent_id) if isinstance(change, Put) else ("deleted", change.agent_id)
            for change in self.changes
        ]

    @property
    def lost(self) -> list[WatchLost]:
        return [m for m in self.messages if isinstance(m, WatchLost)]


# --- leases and writes ------------------------------------------------------------------------------------


async def test_a_record_is_listed_as_it_was_written(bench: Bench) -> None:
    lease = bench.registry.grant(TTL_S)
    created = bench.registry.create(bench.namespace, "a-1", b'{"x": "\xc3\xa4"}', lease)
    listing = bench.registry.list(bench.namespace)
    assert isinstance(created, Created)
    assert [(r.agent_id, r.value) for r in listing.records] == [("a-1", b'{"x": "\xc3\xa4"}')]
    assert listing.records[0].revision == created.revision
    assert listing.revision >= created.revision
    assert lease != 0


async def test_an_empty_namespace_lists_nothing_at_a_revision_above_zero(bench: Bench) -> None:
    listing = bench.registry.list(bench.namespace)
    assert listing.records == ()
    assert listing.revision > 0


async def test_each_write_raises_the_revision_by_one(bench: Bench) -> None:
    lease = bench.registry.grant(TTL_S)
    revisions = []
    for number in range(3):
        outcome = bench.registry.create(bench.namespace, f"a-{number}", b"{}", lease)
        assert isinstance(outcome, Created)
        revisions.append(outcome.revision)
    assert revisions == [revisions[0], revisions[0] + 1, revisions[0] + 2]


async def test_the_cluster_id_stays(bench: Bench) -> None:
    first = bench.registry.list(bench.namespace)
    bench.register("a")
    assert bench.registry.list(bench.namespace).cluster_id == first.cluster_id


async def test_a_record_that_is_there_is_never_overwritten(bench: Bench) -> None:
    bench.register("a", b"first")
    outcome = bench.registry.create(bench.namespace, "a", b"second", bench.registry.grant(TTL_S))
    assert isinstance(outcome, Occupied)
    assert outcome.holder.value == b"first"
    assert outcome.holder.agent_id == "a"
    assert bench.held() == {"a": b"first"}


async def test_what_is_left_of_a_lease_falls_and_a_renewal_shows_as_a_rise(bench: Bench) -> None:
    lease = bench.register("a")
    before = bench.registry.time_left(lease)
    assert TTL_S * 10 - 3 <= before <= TTL_S * 10
    await bench.eventually(lambda: bench.registry.time_left(lease) <= before - 2)
    low = bench.registry.time_left(lease)
    assert bench.registry.keep_alive(lease)
    assert bench.registry.time_left(lease) > low
    bench.registry.revoke(lease)
    assert bench.registry.time_left(lease) == 0.0


async def test_a_record_tells_its_lease_and_one_without_is_told_apart(bench: Bench) -> None:
    lease = bench.register("a")
    bench.put_without_lease("ghost", b"{}")
    assert {r.agent_id: r.lease for r in bench.registry.list(bench.namespace).records} == {"a": lease, "ghost": 0}
    for agent_id, expected in (("a", lease), ("ghost", 0)):
        outcome = bench.registry.create(bench.namespace, agent_id, b"", bench.registry.grant(TTL_S))
        assert isinstance(outcome, Occupied)
        assert outcome.holder.lease == expected


async def test_a_record_is_replaced_under_another_lease_only_if_it_is_still_the_same(bench: Bench) -> None:
    first = bench.register("a", b"first")
    (held,) = bench.registry.list(bench.namespace).records
    second = bench.registry.grant(TTL_S * 10)
    assert bench.registry.replace(bench.namespace, held, b"second", second)
    assert not bench.registry.replace(bench.namespace, held, b"third", first)
    bench.registry.revoke(first)
    assert bench.held() == {"a": b"second"}
    (held,) = bench.registry.list(bench.namespace).records
    assert held.lease == second
    for dead in (first, 0):
        with pytest.raises(LeaseLost):
            bench.registry.replace(bench.namespace, held, b"by a dead lease", dead)
    bench.registry.revoke(second)
    assert not bench.registry.replace(bench.namespace, held, b"it is gone", bench.registry.grant(TTL_S))
    assert bench.held() == {}


async def test_a_probe_counts_the_namespace_and_knows_whether_a_record_stands(bench: Bench) -> None:
    empty = bench.registry.probe(bench.namespace, ())
    assert (empty.count, empty.changed) == (0, frozenset())
    lease = bench.register("a")
    bench.register("b")
    bench.register("elsewhere", namespace=bench.namespace + "2")
    listing = bench.registry.list(bench.namespace)
    a, b = listing.records
    probe = bench.registry.probe(bench.namespace, [a, b])
    assert (probe.cluster_id, probe.count, probe.changed) == (listing.cluster_id, 2, frozenset())
    assert probe.revision >= listing.revision > empty.revision
    assert bench.registry.replace(bench.namespace, b, b.value, lease)
    assert bench.registry.probe(bench.namespace, [a, b]).changed == {"b"}, "written anew"
    assert bench.registry.probe(bench.namespace, [dataclasses.replace(a, lease=a.lease + 1)]).changed == {"a"}
    bench.registry.revoke(lease)
    gone = bench.registry.probe(bench.namespace, [a])
    assert (gone.count, gone.changed) == (0, {"a"})


async def test_records_end_with_their_lease(bench: Bench) -> None:
    lease = bench.registry.grant(TTL_S)
    bench.registry.create(bench.namespace, "a", b"{}", lease)
    assert "a" in bench.held()
    await bench.eventually(lambda: not bench.held())
    assert bench.registry.keep_alive(lease) is False


async def test_a_lease_that_is_kept_alive_outlives_its_time(bench: Bench) -> None:
    lease = bench.registry.grant(TTL_S)
    bench.registry.create(bench.namespace, "a", b"{}", lease)
    await bench.live_on(lease, TTL_S * 2)
    assert "a" in bench.held()


async def test_writing_under_a_lease_that_is_gone_is_a_lost_lease(bench: Bench) -> None:
    lease = bench.registry.grant(TTL_S)
    bench.registry.revoke(lease)
    with pytest.raises(LeaseLost):
        bench.registry.create(bench.namespace, "a", b"{}", lease)
    assert bench.held() == {}


@pytest.mark.parametrize("lease", [0, 123456789])
async def test_no_record_is_written_under_a_lease_that_never_was(bench: Bench, lease: int) -> None:
    with pytest.raises(LeaseLost):
        bench.registry.create(bench.namespace, "a", b"{}", lease)
    assert bench.held() == {}


async def test_a_renewal_of_a_lease_that_never_was_is_false(bench: Bench) -> None:
    assert bench.registry.keep_alive(987654321) is False


async def test_revoking_removes_the_leases_records_and_no_others(bench: Bench) -> None:
    gone = bench.register("a")
    bench.register("b")
    bench.registry.revoke(gone)
    assert bench.held() == {"b": b"{}"}


async def test_revoking_twice_is_no_error(bench: Bench) -> None:
    lease = bench.register("a")
    bench.registry.revoke(lease)
    bench.registry.revoke(lease)


async def test_a_record_deleted_by_hand_can_be_written_again_under_the_same_lease(bench: Bench) -> None:
    lease = bench.register("a")
    bench.delete("a")
    assert isinstance(bench.registry.create(bench.namespace, "a", b"again", lease), Created)


# --- names ------------------------------------------------------------------------------------------------


async def test_namespaces_whose_names_begin_alike_stay_apart(bench: Bench) -> None:
    near = [bench.namespace, bench.namespace + "2", bench.namespace + "-x", bench.namespace + ".y"]
    for namespace in near:
        bench.register("a", namespace.encode(), namespace)
    assert [bench.held(namespace) for namespace in near] == [{"a": namespace.encode()} for namespace in near]


async def test_a_watch_hears_its_own_namespace_only(bench: Bench) -> None:
    mail, revision = Mail(), bench.registry.list(bench.namespace).revision
    cancel = bench.registry.watch(bench.namespace, revision + 1, mail).cancel
    bench.register("far", namespace=bench.namespace + "2")
    bench.register("near")
    await bench.eventually(lambda: mail.story)
    cancel()
    assert mail.story == [("put", "near")]


@pytest.mark.parametrize("agent_id", ["a/b", "../up", "a b", "größe", "100%", "%2F", "a\nb", "v1", "v10"])
async def test_awkward_ids_come_back_as_they_were(bench: Bench, agent_id: str) -> None:
    mail, revision = Mail(), bench.registry.list(bench.namespace).revision
    cancel = bench.registry.watch(bench.namespace, revision + 1, mail).cancel
    lease = bench.register(agent_id)
    assert list(bench.held()) == [agent_id]
    bench.registry.revoke(lease)
    await bench.eventually(lambda: len(mail.story) == 2)
    cancel()
    assert mail.story == [("put", agent_id), ("deleted", agent_id)]


# --- watches ----------------------------------------------------------------------------------------------


async def test_what_happens_between_list_and_watch_is_not_missed(bench: Bench) -> None:
    a = bench.register("a")
    listing = bench.registry.list(bench.namespace)
    bench.registry.revoke(a)
    bench.register("b")
    mail = Mail()
    cancel = bench.registry.watch(bench.namespace, listing.revision + 1, mail).cancel
    await bench.eventually(lambda: len(mail.story) == 2)
    cancel()
    assert mail.story == [("deleted", "a"), ("put", "b")]


async def test_a_watch_from_the_next_revision_repeats_nothing(bench: Bench) -> None:
    bench.register("old")
    mail = Mail()
    cancel = bench.registry.watch(bench.namespace, bench.registry.list(bench.namespace).revision + 1, mail).cancel
    bench.register("new")
    await bench.eventually(lambda: mail.story)
    cancel()
    assert mail.story == [("put", "new")]


async def test_changes_come_in_revision_order_with_their_revisions(bench: Bench) -> None:
    mail = Mail()
    cancel = bench.registry.watch(bench.namespace, bench.registry.list(bench.namespace).revision + 1, mail).cancel
    leases = [bench.register(f"a-{number}") for number in range(20)]
    for lease in leases:
        bench.registry.revoke(lease)
    await bench.eventually(lambda: len(mail.story) == 40)
    cancel()
    revisions = [c.record.revision if isinstance(c, Put) else c.revision for c in mail.changes]
    assert revisions == sorted(revisions)
    assert len(set(revisions)) == 40
    assert mail.story[:2] == [("put", "a-0"), ("put", "a-1")]


async def test_the_end_of_a_lease_is_seen_as_a_deletion(bench: Bench) -> None:
    mail = Mail()
    cancel = bench.registry.watch(bench.namespace, bench.registry.list(bench.namespace).revision + 1, mail).cancel
    lease = bench.registry.grant(TTL_S)
    bench.registry.create(bench.namespace, "a", b"{}", lease)
    await bench.eventually(lambda: ("deleted", "a") in mail.story)
    cancel()
    assert mail.story == [("put", "a"), ("deleted", "a")]


async def test_records_that_go_with_one_lease_go_at_one_revision(bench: Bench) -> None:
    lease = bench.register("a")
    bench.registry.create(bench.namespace, "b", b"{}", lease)
    mail = Mail()
    cancel = bench.registry.watch(bench.namespace, bench.registry.list(bench.namespace).revision + 1, mail).cancel
    bench.registry.revoke(lease)
    await bench.eventually(lambda: len(mail.story) == 2)
    cancel()
    assert {c.revision for c in mail.changes if isinstance(c, Deleted)} == {
        bench.registry.list(bench.namespace).revision
    }


async def test_a_watch_on_compacted_revisions_is_lost_and_says_why(bench: Bench) -> None:
    old = bench.registry.list(bench.namespace).revision
    for number in range(3):
        bench.register(f"a-{number}")
    bench.compact(bench.registry.list(bench.namespace).revision)
    mail = Mail()
    cancel = bench.registry.watch(bench.namespace, old + 1, mail).cancel
    await bench.eventually(lambda: mail.lost)
    cancel()
    assert mail.lost[0].compacted
    assert mail.messages == mail.lost[:1], "nothing but the loss, and that once"


async def test_compaction_doesnt_touch_a_watch_that_is_up_to_date(bench: Bench) -> None:
    mail = Mail()
    cancel = bench.registry.watch(bench.namespace, bench.registry.list(bench.namespace).revision + 1, mail).cancel
    bench.register("a")
    await bench.eventually(lambda: mail.story)
    bench.compact(bench.registry.list(bench.namespace).revision)
    bench.register("b")
    await bench.eventually(lambda: len(mail.story) == 2)
    cancel()
    assert mail.lost == []


async def test_a_watch_from_a_future_revision_waits_for_it(bench: Bench) -> None:
    mail, revision = Mail(), bench.registry.list(bench.namespace).revision
    cancel = bench.registry.watch(bench.namespace, revision + 2, mail).cancel
    bench.register("too-early")
    bench.register("due")
    await bench.eventually(lambda: mail.story)
    cancel()
    assert mail.story == [("put", "due")]


async def test_on_a_quiet_store_a_watch_from_the_last_change_answers_and_repeats_it(bench: Bench) -> None:
    bench.register("a")
    revision = bench.registry.list(bench.namespace).revision
    mail: list[WatchMessage] = []
    watch = bench.registry.watch(bench.namespace, revision, mail.append)
    watch.ask_progress()
    await bench.eventually(lambda: any(isinstance(m, WatchProgress) and m.revision >= revision for m in mail))
    # In whatever order: etcd 3.5.1 answers first.
    await bench.eventually(lambda: [m.revision for m in mail if isinstance(m, WatchChanges)] == [revision])
    watch.cancel()


async def test_a_watch_that_is_asked_tells_how_far_it_has_come_behind_all_changes(bench: Bench) -> None:
    mail: list[WatchMessage] = []
    watch = bench.registry.watch(bench.namespace, bench.registry.list(bench.namespace).revision + 1, mail.append)
    for number in range(20):
        bench.register(f"a{number}")
        revision = bench.registry.probe(bench.namespace, ()).revision
        watch.ask_progress()
        await bench.eventually(
            lambda revision=revision: any(isinstance(m, WatchProgress) and m.revision >= revision for m in mail)
        )
    told = [m for m in mail if isinstance(m, WatchChanges)]
    assert len(told) == 20
    watch.cancel()
    watch.ask_progress()


async def test_nothing_is_delivered_after_cancel(bench: Bench) -> None:
    first, second = Mail(), Mail()
    revision = bench.registry.list(bench.namespace).revision
    cancel_first = bench.registry.watch(bench.namespace, revision + 1, first).cancel
    cancel_second = bench.registry.watch(bench.namespace, revision + 1, second).cancel
    cancel_first()
    bench.register("a")
    await bench.eventually(lambda: second.story)
    cancel_second()
    assert first.messages == []


async def test_cancelling_one_watch_leaves_the_others(bench: Bench) -> None:
    mails = [Mail() for _ in range(3)]
    revision = bench.registry.list(bench.namespace).revision
    cancels = [bench.registry.watch(bench.namespace, revision + 1, mail).cancel for mail in mails]
    bench.register("a")
    await bench.eventually(lambda: all(mail.story for mail in mails))
    cancels[1]()
    bench.register("b")
    await bench.eventually(lambda: len(mails[0].story) == len(mails[2].story) == 2)
    cancels[0]()
    cancels[2]()
    assert len(mails[1].story) == 1
    assert not any(mail.lost for mail in mails)


async def test_cancelling_twice_and_from_within_the_callback_is_fine(bench: Bench) -> None:
    cancels: list[Callable[[], None]] = []
    mail = Mail()

    def deliver(message: WatchMessage) -> None:
        mail(message)
        cancels[0]()

    cancels.append(
        bench.registry.watch(bench.namespace, bench.registry.list(bench.namespace).revision + 1, deliver).cancel
    )
    bench.register("a")
    await bench.eventually(lambda: mail.story)
    bench.register("b")
    cancels[0]()
    assert mail.story == [("put", "a")]


async def test_many_threads_may_use_it_at_once(bench: Bench) -> None:
    mail = Mail()
    revision = bench.registry.list(bench.namespace).revision
    cancel = bench.registry.watch(bench.namespace, revision + 1, mail).cancel
    barrier = threading.Barrier(8)

    def work(number: int) -> None:
        barrier.wait(10)
        for turn in range(5):
            lease = bench.register(f"a-{number}-{turn}")
            assert bench.registry.keep_alive(lease)
            bench.registry.list(bench.namespace)
            if turn % 2:
                bench.registry.revoke(lease)

    def race(number: int) -> Created | Occupied:
        return bench.registry.create(bench.namespace, "one", str(number).encode(), bench.registry.grant(20))

    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(work, number) for number in range(8)]:
            done.result(30)
        outcomes = list(pool.map(race, range(8)))
    assert sum(isinstance(outcome, Created) for outcome in outcomes) == 1
    assert len(bench.held()) == 8 * 3 + 1
    await bench.eventually(lambda: len(mail.story) == 8 * 7 + 1)
    cancel()
    revisions = [c.record.revision if isinstance(c, Put) else c.revision for c in mail.changes]
    assert revisions == sorted(revisions)


async def test_the_address_names_the_registry(bench: Bench) -> None:
    assert "://" in bench.registry.address
    assert bench.registry.address in repr(bench.registry)
