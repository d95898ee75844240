"""Our own entry: it comes, stays, heals, and goes."""

from __future__ import annotations

import asyncio
import itertools
import random
import threading

import pytest

from agent_reach.config import RegistryConfig
from agent_reach.errors import AgentIdInUse, ConfigError, RegistryUnavailable, Unauthorized
from agent_reach.ports import Created, Occupied
from agent_reach.registry.memory import MemoryRegistry
from agent_reach.testing import ManualClock
from tests.registry.support import Announced, eventually, info


class Recorded(MemoryRegistry):
    """Notes the leases it granted and was asked to write under or to renew."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(clock)
        self.granted: list[int] = []
        self.renewed: list[int] = []
        self.written: list[int] = []

    def grant(self, ttl_s: float) -> int:
        self.granted.append(super().grant(ttl_s))
        return self.granted[-1]

    def keep_alive(self, lease: int) -> bool:
        self.renewed.append(lease)
        return super().keep_alive(lease)

    def create(self, namespace: str, agent_id: str, value: bytes, lease: int) -> Created | Occupied:
        self.written.append(lease)
        return super().create(namespace, agent_id, value, lease)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def registry(clock: ManualClock) -> Recorded:
    return Recorded(clock)


def ids(registry: MemoryRegistry) -> list[str]:
    return [record.agent_id for record in registry.list("prod").records]


async def test_it_registers_stays_for_as_long_as_it_runs_and_withdraws(
    clock: ManualClock, registry: Recorded
) -> None:
    announced = Announced(registry, clock)
    assert announced.status == "idle"
    announced.announcer.start()
    await announced.announcer.wait_registered(5)
    assert announced.status == "registered"
    await clock.advance(300)
    assert ids(registry) == ["a"]
    assert len(registry.granted) == 1
    assert len(registry.renewed) == 60, "a third of 15 s, over 300 s"
    await announced.announcer.withdraw(5)
    assert ids(registry) == []
    assert announced.said == ["registered", "withdrawn"]


async def test_after_an_outage_and_a_wipe_the_entry_is_back_within_the_backoff(
    clock: ManualClock, registry: Recorded
) -> None:
    config = RegistryConfig(lease_ttl_s=2.0)
    announced = Announced(registry, clock, config=config)
    announced.announcer.start()
    await clock.advance(1)
    registry.down()
    await clock.advance(600)
    assert announced.status == "lost"
    assert isinstance(announced.announcer.state.error, RegistryUnavailable)
    registry.wipe()
    registry.up()
    await clock.advance(config.backoff_max_s + 1)
    assert ids(registry) == ["a"]
    assert announced.said == ["registered", "lost", "registered"], "once per change, not per retry"
    await announced.announcer.withdraw(5)


async def test_a_short_outage_is_no_loss(clock: ManualClock, registry: Recorded) -> None:
    announced = Announced(registry, clock)
    announced.announcer.start()
    await clock.advance(1)
    registry.down()
    await clock.advance(9)
    assert announced.status == "registered"
    registry.up()
    await clock.advance(20)
    assert announced.said == ["registered"]
    assert len(registry.granted) == 1
    await announced.announcer.withdraw(5)


async def test_a_lapsed_lease_is_replaced_once_and_its_id_never_used_again(
    clock: ManualClock, registry: Recorded
) -> None:
    announced = Announced(registry, clock)
    announced.announcer.start()
    await clock.advance(1)
    old = registry.granted[0]
    registry.expire("a")
    assert ids(registry) == []
    await clock.advance(5)
    assert ids(registry) == ["a"]
    assert len(registry.granted) == 2
    uses_before = registry.written.count(old) + registry.renewed.count(old)
    await clock.advance(60)
    assert registry.written.count(old) + registry.renewed.count(old) == uses_before
    assert announced.said == ["registered", "lost", "registered"]
    await announced.announcer.withdraw(5)


async def test_an_entry_deleted_by_hand_is_back_under_the_same_lease_within_a_heartbeat(
    clock: ManualClock, registry: Recorded
) -> None:
    announced = Announced(registry, clock)
    announced.announcer.start()
    await clock.advance(1)
    registry.delete("prod", "a")
    await clock.advance(5)
    assert ids(registry) == ["a"]
    assert len(registry.granted) == 1
    await announced.announcer.withdraw(5)
    assert ids(registry) == []


async def test_deleted_and_the_lease_revoked_at_once_needs_a_new_grant(
    clock: ManualClock, registry: Recorded
) -> None:
    announced = Announced(registry, clock)
    announced.announcer.start()
    await clock.advance(1)
    registry.delete("prod", "a")
    MemoryRegistry.revoke(registry, registry.granted[0])
    await clock.advance(5)
    assert ids(registry) == ["a"]
    assert len(registry.granted) == 2
    assert 0 not in registry.written
    await announced.announcer.withdraw(5)


async def test_an_unrenewed_entry_leaves_no_ghost(clock: ManualClock, registry: Recorded) -> None:
    announced = Announced(registry, clock)
    announced.announcer.start()
    await clock.advance(1)
    registry.down()
    # As after kill -9: nothing is revoked, nothing is renewed.
    await announced.announcer.withdraw(5)
    registry.up()
    assert ids(registry) == ["a"]
    await clock.advance(15)
    assert ids(registry) == []
    assert "ends with its lease" in announced.announcer.state.detail


async def test_two_agents_of_one_name_both_show(clock: ManualClock, registry: Recorded) -> None:
    both = [Announced(registry, clock, info(agent_id)) for agent_id in ("kb-1", "kb-2")]
    for announced in both:
        announced.announcer.start()
        await announced.announcer.wait_registered(5)
    assert ids(registry) == ["kb-1", "kb-2"]
    for announced in both:
        await announced.announcer.withdraw(5)


async def test_an_id_that_a_living_process_holds_is_refused_and_never_overwritten(
    clock: ManualClock, registry: Recorded
) -> None:
    first = Announced(registry, clock, info(incarnation="i1", url="http://10.0.0.1:9000"))
    first.announcer.start()
    await clock.advance(2)
    second = Announced(registry, clock, info(incarnation="i2", url="http://10.0.0.2:9000"))
    second.announcer.start()
    waiting = asyncio.create_task(second.announcer.wait_registered(30))
    await clock.advance(7)
    with pytest.raises(AgentIdInUse, match=r"'a'.*http://10\.0\.0\.1:9000.*another agent_id") as caught:
        await waiting
    assert caught.value.agent_id == "a"
    assert second.status == "refused"
    assert second.said == ["waiting", "refused"]
    await clock.advance(60)
    assert b'"i1"' in registry.list("prod").records[0].value
    # The holder goes: now the id is free.
    await first.announcer.withdraw(5)
    await clock.advance(5)
    assert second.status == "registered"
    assert b'"i2"' in registry.list("prod").records[0].value
    await second.announcer.withdraw(5)


async def test_an_id_whose_holder_is_dead_is_taken_over_when_its_lease_ends(
    clock: ManualClock, registry: Recorded
) -> None:
    registry.put_raw("prod", "a", info(incarnation="dead").to_bytes(), registry.grant(15))
    announced = Announced(registry, clock, info(incarnation="new"))
    announced.announcer.start()
    await clock.advance(10)
    assert announced.status == "registering"
    assert "waiting for its lease" in announced.announcer.state.detail
    await clock.advance(6)
    assert announced.status == "registered"
    assert announced.said == ["waiting", "registered"]
    await announced.announcer.withdraw(5)


async def test_a_holder_with_the_shortest_lease_is_still_told_from_a_dead_one(
    clock: ManualClock, registry: Recorded
) -> None:
    config = RegistryConfig(lease_ttl_s=2.0)
    first = Announced(registry, clock, info(incarnation="i1"), config)
    second = Announced(registry, clock, info(incarnation="i2"), config)
    first.announcer.start()
    await clock.advance(1)
    second.announcer.start()
    await clock.advance(5)
    assert second.status == "refused"
    await first.announcer.withdraw(5)
    await second.announcer.withdraw(5)


async def test_a_holder_without_a_lease_is_refused_at_once(clock: ManualClock, registry: Recorded) -> None:
    registry.put_raw("prod", "a", b"not json")
    announced = Announced(registry, clock)
    announced.announcer.start()
    with pytest.raises(AgentIdInUse, match="without a lease"):
        await announced.announcer.wait_registered(5)
    await announced.announcer.withdraw(5)
    assert registry.list("prod").records[0].value == b"not json"


async def test_our_own_entry_under_an_older_lease_is_no_rival_and_is_missed_for_a_second_at_most(
    clock: ManualClock, registry: Recorded
) -> None:
    announced = Announced(registry, clock)
    registry.put_raw("prod", "a", announced.info.to_bytes(), registry.grant(15))
    await clock.advance(2)
    announced.announcer.start()
    await clock.advance(1)
    assert announced.status == "registered"
    await clock.advance(13.1)
    assert ids(registry) == ["a"], "the older lease ended at 15, the heartbeats come at 12 and 17"
    await announced.announcer.withdraw(5)


async def test_a_lease_that_lives_no_longer_is_replaced_also_while_the_entry_is_still_there(
    clock: ManualClock, registry: Recorded
) -> None:
    announced = Announced(registry, clock)
    announced.announcer.start()
    await clock.advance(1)
    registry.put_raw("prod", "a", announced.info.to_bytes(), MemoryRegistry.grant(registry, 8))
    MemoryRegistry.revoke(registry, registry.granted[0])
    await clock.advance(5)
    assert len(registry.granted) == 2
    await clock.advance(60)
    assert ids(registry) == ["a"]
    await announced.announcer.withdraw(5)


async def test_waiting_runs_out_with_the_address_and_the_reason(clock: ManualClock, registry: Recorded) -> None:
    registry.down("no route")
    announced = Announced(registry, clock)
    announced.announcer.start()
    waiting = asyncio.create_task(announced.announcer.wait_registered(5))
    await clock.advance(5)
    with pytest.raises(RegistryUnavailable, match=r"agent a .*within 5 s.*memory://local.*no route"):
        await waiting
    assert announced.said == ["waiting"]
    await announced.announcer.withdraw(5)


async def test_the_first_attempt_ends_also_when_the_registry_is_down(
    clock: ManualClock, registry: Recorded
) -> None:
    registry.down()
    announced = Announced(registry, clock)
    announced.announcer.start()
    await announced.announcer.first_attempt()
    assert announced.status == "registering"
    registry.up()
    await clock.advance(3)
    assert announced.status == "registered"
    await announced.announcer.withdraw(5)


async def test_wrong_credentials_are_told_at_once_and_tried_again(clock: ManualClock, registry: Recorded) -> None:
    registry.fail_next("grant", Unauthorized("wrong password"), times=3)
    announced = Announced(registry, clock)
    announced.announcer.start()
    with pytest.raises(Unauthorized, match="wrong password"):
        await announced.announcer.wait_registered(60)
    await clock.advance(6)
    assert announced.status == "registered"
    await announced.announcer.withdraw(5)


async def test_a_record_that_is_too_large_is_a_config_error(clock: ManualClock, registry: Recorded) -> None:
    announced = Announced(registry, clock, info().model_copy(update={"metadata": {"x": "y" * 20_000}}))
    announced.announcer.start()
    with pytest.raises(ConfigError, match="the limit is 16384"):
        await announced.announcer.wait_registered(5)
    await announced.announcer.withdraw(5)


async def test_withdrawing_twice_or_before_the_start_is_fine(clock: ManualClock, registry: Recorded) -> None:
    never = Announced(registry, clock)
    await never.announcer.withdraw(5)
    announced = Announced(registry, clock)
    announced.announcer.start()
    await announced.announcer.wait_registered(5)
    await announced.announcer.withdraw(5)
    await announced.announcer.withdraw(5)
    assert never.status == announced.status == "withdrawn"
    assert announced.said == ["registered", "withdrawn"]


async def test_withdrawing_right_after_the_start_leaves_nothing(clock: ManualClock, registry: Recorded) -> None:
    announced = Announced(registry, clock)
    announced.announcer.start()
    await announced.announcer.withdraw(5)
    await clock.advance(30)
    assert ids(registry) == []


async def test_retries_are_spread_and_capped(clock: ManualClock, registry: Recorded) -> None:
    times: list[float] = []

    def grant(ttl_s: float) -> int:
        times.append(clock.now())
        raise RegistryUnavailable("no")

    registry.grant = grant  # type: ignore[method-assign]
    announced = Announced(registry, clock)
    announced.announcer.start()
    await clock.advance(100)
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert min(gaps) >= 0.1
    assert max(gaps) <= 2.0
    assert len({round(gap, 3) for gap in gaps}) > len(gaps) / 2
    await announced.announcer.withdraw(5)


# --- on a thread of its own --------------------------------------------------------------------------------


class Slow(MemoryRegistry):
    """A registry with a network: it blocks, and a test may hold it up."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()
        self.go.set()
        self.entered = threading.Event()
        self.threads: set[int] = set()

    @property
    def blocking(self) -> bool:
        return True

    def create(self, namespace: str, agent_id: str, value: bytes, lease: int) -> Created | Occupied:
        self.threads.add(threading.get_ident())
        self.entered.set()
        self.go.wait(20)
        return super().create(namespace, agent_id, value, lease)


async def test_with_a_blocking_registry_everything_happens_on_another_thread_and_news_on_this_one() -> None:
    registry = Slow()
    heard_on: set[int] = set()
    announced = Announced(registry, registry.clock)
    announced.announcer._emit = lambda _: heard_on.add(threading.get_ident())
    announced.announcer.start()
    await announced.announcer.wait_registered(10)
    assert threading.get_ident() not in registry.threads
    await announced.announcer.withdraw(10)
    assert heard_on == {threading.get_ident()}
    assert ids(registry) == []


async def test_withdrawing_while_a_write_hangs_is_bounded_and_leaves_nothing_behind() -> None:
    registry = Slow()
    registry.go.clear()
    announced = Announced(registry, registry.clock)
    announced.announcer.start()
    await eventually(registry.entered.is_set)
    await announced.announcer.withdraw(0.05)
    assert announced.status == "withdrawn"
    assert "no answer within" in announced.announcer.state.detail
    registry.go.set()
    # The write goes through after all; the thread that was left behind takes it back.
    await eventually(lambda: registry.revision >= 3)
    await eventually(lambda: ids(registry) == [])
    await eventually(lambda: not any(t.name == "agent-reach-announcer" for t in threading.enumerate()))
    await asyncio.sleep(0)
    assert announced.status == "withdrawn"
    assert "registered" not in announced.said
    assert "no answer within" in announced.announcer.state.detail


def test_a_closed_application_loop_ends_the_heartbeat() -> None:
    registry = Slow()
    config = RegistryConfig(lease_ttl_s=2.0)

    async def forget() -> None:
        announced = Announced(registry, registry.clock, config=config)
        announced.announcer.start()
        await announced.announcer.wait_registered(10)

    asyncio.run(forget())

    async def wait() -> None:
        await eventually(lambda: ids(registry) == [])
        await eventually(lambda: not any(t.name == "agent-reach-announcer" for t in threading.enumerate()))

    asyncio.run(wait())


async def test_a_bug_neither_ends_the_heartbeat_nor_goes_unheard(
    clock: ManualClock, registry: Recorded, caplog: pytest.LogCaptureFixture
) -> None:
    announced = Announced(registry, clock)
    registry.fail_next("grant", ZeroDivisionError("a bug"), times=1)
    announced.announcer.start()
    await clock.advance(2)
    assert "a bug" in caplog.text
    assert announced.status == "registered"
    await announced.announcer.withdraw(5)


def test_the_same_seed_backs_off_the_same_way() -> None:
    from agent_reach.registry.hosting import Backoff

    delays = []
    for _ in range(2):
        backoff = Backoff(RegistryConfig(), random.Random(7))
        delays.append([backoff.next() for _ in range(200)])
    assert delays[0] == delays[1]
    assert all(0.1 <= delay <= 2.0 for delay in delays[0])
