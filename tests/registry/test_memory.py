"""What only the memory registry has: its clock, its names and its scripted faults."""

from __future__ import annotations

import asyncio
import gc
import threading

import pytest

from agent_reach.errors import RegistryUnavailable, Unauthorized
from agent_reach.ports import (
    Clock,
    Created,
    Deleted,
    LeaseLost,
    Put,
    SystemClock,
    WatchChanges,
    WatchLost,
    WatchMessage,
    WatchProgress,
)
from agent_reach.registry.memory import MemoryRegistry
from agent_reach.testing import ManualClock


def write(registry: MemoryRegistry, agent_id: str, ttl_s: float = 15.0) -> int:
    lease = registry.grant(ttl_s)
    assert isinstance(registry.create("prod", agent_id, b"{}", lease), Created)
    return lease


async def test_watchers_hear_of_an_ended_lease_when_the_clock_is_turned() -> None:
    clock = ManualClock()
    registry = MemoryRegistry(clock)
    mail: list[WatchMessage] = []
    write(registry, "a", ttl_s=10)
    registry.watch("prod", registry.revision + 1, mail.append)
    await clock.advance(9.9)
    assert mail == []
    await clock.advance(0.1)
    assert [m.changes for m in mail if isinstance(m, WatchChanges)] == [(Deleted("a", registry.revision),)]


async def test_a_renewal_moves_the_end() -> None:
    clock = ManualClock()
    registry = MemoryRegistry(clock)
    lease = write(registry, "a", ttl_s=10)
    await clock.advance(9)
    assert registry.keep_alive(lease)
    await clock.advance(9.9)
    assert len(registry.list("prod").records) == 1
    await clock.advance(0.2)
    assert registry.list("prod").records == ()


async def test_on_the_machines_clock_a_lease_ends_by_itself_too() -> None:
    registry = MemoryRegistry()
    heard = asyncio.Event()
    # The shortest that a whole second allows.
    write(registry, "a", ttl_s=1)
    registry.watch("prod", registry.revision + 1, lambda _: heard.set())
    await asyncio.wait_for(heard.wait(), 10)


@pytest.mark.parametrize("clock", [ManualClock(), SystemClock()], ids=["manual", "system"])
def test_it_outlives_an_event_loop_and_leaves_nothing_in_it(clock: Clock) -> None:
    registry = MemoryRegistry(clock)

    async def register(agent_id: str) -> None:
        write(registry, agent_id)

    asyncio.run(register("a"))
    asyncio.run(register("b"))
    gc.collect()  # a task left behind would complain now
    assert len(registry.list("prod").records) == 2


async def test_the_alarm_goes_with_the_last_lease() -> None:
    registry = MemoryRegistry(ManualClock())
    before = asyncio.all_tasks()
    lease = write(registry, "a")
    assert len(asyncio.all_tasks()) == len(before) + 1
    registry.revoke(lease)
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == before


def test_one_name_is_one_registry_as_long_as_somebody_holds_it() -> None:
    first = MemoryRegistry.named("here")
    assert MemoryRegistry.named("here") is first
    assert MemoryRegistry.named("there") is not first
    write(first, "a")
    del first
    gc.collect()
    assert MemoryRegistry.named("here").list("prod").records == ()


async def test_down_fails_every_request_and_loses_every_watch_until_up() -> None:
    registry = MemoryRegistry(ManualClock())
    mail: list[WatchMessage] = []
    lease = write(registry, "a")
    registry.watch("prod", registry.revision + 1, mail.append)
    registry.down("cable pulled")
    assert mail == [WatchLost("cable pulled")]
    for request in (
        lambda: registry.grant(10),
        lambda: registry.keep_alive(lease),
        lambda: registry.revoke(lease),
        lambda: registry.create("prod", "b", b"", lease),
        lambda: registry.list("prod"),
        lambda: registry.watch("prod", 1, mail.append),
    ):
        with pytest.raises(RegistryUnavailable, match="cable pulled"):
            request()
    registry.up()
    assert len(registry.list("prod").records) == 1
    write(registry, "b")
    assert len(mail) == 1, "a lost watch stays lost"


def test_a_scripted_error_comes_as_often_as_asked() -> None:
    registry = MemoryRegistry(ManualClock())
    registry.fail_next("list", Unauthorized("who are you"), times=2)
    for _ in range(2):
        with pytest.raises(Unauthorized):
            registry.list("prod")
    registry.list("prod")
    with pytest.raises(ValueError, match="listen"):
        registry.fail_next("listen", Unauthorized("typo"))


def test_wiped_it_begins_anew() -> None:
    registry = MemoryRegistry(ManualClock())
    mail: list[WatchMessage] = []
    lease = write(registry, "a")
    before = registry.list("prod")
    registry.watch("prod", registry.revision + 1, mail.append)
    registry.wipe()
    after = registry.list("prod")
    assert after.records == ()
    assert after.revision < before.revision
    assert after.cluster_id == before.cluster_id
    assert registry.keep_alive(lease) is False
    with pytest.raises(LeaseLost):
        registry.create("prod", "a", b"", lease)
    assert isinstance(mail[0], WatchLost)
    registry.wipe(new_cluster=True)
    assert registry.list("prod").cluster_id != before.cluster_id


def test_wiped_silently_an_open_watch_waits_for_its_old_revision() -> None:
    registry = MemoryRegistry(ManualClock())
    for name in "abc":
        write(registry, name)
    mail: list[WatchMessage] = []
    registry.watch("prod", registry.revision + 1, mail.append)
    registry.wipe(silent=True)
    write(registry, "d")
    assert mail == []


def test_frozen_watches_are_silent_and_then_catch_up() -> None:
    registry = MemoryRegistry(ManualClock())
    mail: list[WatchMessage] = []
    registry.watch("prod", registry.revision + 1, mail.append)
    registry.freeze_watches()
    write(registry, "a")
    assert mail == []
    registry.thaw_watches()
    assert len(mail) == 1


def test_progress_says_how_far_a_watch_is() -> None:
    registry = MemoryRegistry(ManualClock())
    mail: list[WatchMessage] = []
    registry.watch("prod", registry.revision + 1, mail.append)
    write(registry, "a")
    registry.progress()
    assert mail[1:] == [WatchProgress(registry.revision)]


def test_raw_records_deletions_and_ended_leases_are_seen_by_watch() -> None:
    registry = MemoryRegistry(ManualClock())
    mail: list[WatchMessage] = []
    registry.watch("prod", registry.revision + 1, mail.append)
    registry.put_raw("prod", "junk", b"\xff")
    assert registry.delete("prod", "junk")
    assert not registry.delete("prod", "junk")
    write(registry, "a")
    registry.expire("a")
    kinds = [type(change) for m in mail if isinstance(m, WatchChanges) for change in m.changes]
    assert kinds == [Put, Deleted, Put, Deleted]


def test_a_callback_may_use_the_registry_and_may_fail(caplog: pytest.LogCaptureFixture) -> None:
    registry = MemoryRegistry(ManualClock())
    seen: list[str] = []

    def deliver(message: WatchMessage) -> None:
        assert isinstance(message, WatchChanges)
        (change,) = message.changes
        assert isinstance(change, Put)
        seen.append(f"begin {change.record.agent_id}")
        if change.record.agent_id == "a":
            write(registry, "b")
            seen.append("end a")
            raise RuntimeError("a bug of the callback")

    registry.watch("prod", registry.revision + 1, deliver)
    write(registry, "a")
    assert seen == ["begin a", "end a", "begin b"]
    assert "a bug of the callback" in caplog.text


def test_cancel_waits_for_a_delivery_that_runs_in_another_thread() -> None:
    registry = MemoryRegistry(ManualClock())
    entered, leave = threading.Event(), threading.Event()
    done: list[str] = []

    def deliver(message: WatchMessage) -> None:
        entered.set()
        leave.wait(10)
        done.append("delivered")

    cancel = registry.watch("prod", registry.revision + 1, deliver).cancel
    writer = threading.Thread(target=write, args=(registry, "a"))
    writer.start()
    assert entered.wait(10)
    canceller = threading.Thread(target=lambda: (cancel(), done.append("cancelled")))
    canceller.start()
    leave.set()
    writer.join(10)
    canceller.join(10)
    assert done == ["delivered", "cancelled"]


def test_a_long_history_is_compacted_by_itself() -> None:
    registry = MemoryRegistry(ManualClock())
    for number in range(10_001):
        registry.put_raw("prod", "a", b"%d" % number)
    mail: list[WatchMessage] = []
    registry.watch("prod", 2, mail.append)
    assert mail == [WatchLost("revision 2 was compacted", compacted=True)]
