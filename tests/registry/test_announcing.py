"""Our own entry: it comes, stays, heals, and goes."""

from __future__ import annotations

import asyncio
import itertools
import random
import threading

import pytest

from agent_reach.config import RegistryConfig
from agent_reach.errors import AgentIdInUse, ConfigError, Forbidden, RegistryUnavailable, Unauthorized
from agent_reach.events import RegistrationChanged
from agent_reach.ports import Created, Occupied, RawRecord
from agent_reach.registry.holder import Holder
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
    assert 60 <= len(registry.renewed) <= 75, "a third of 15 s or a little less, over 300 s"
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


async def test_a_refusal_costs_no_lease_and_is_seen_at_once(clock: ManualClock, registry: Recorded) -> None:
    """Refused logins are tried more and more seldom; but what may still be renewed must be."""
    announced = Announced(registry, clock)
    announced.announcer.start()
    await announced.announcer.wait_registered(5)
    registry.fail_next("get", Forbidden("not any more"), times=1000)
    await clock.advance(6)
    assert isinstance(announced.announcer.state.error, Forbidden)
    assert announced.status == "registered"
    await clock.advance(60)
    assert ids_raw(registry) == ["a"], "renewed all the while"
    assert announced.said == ["registered", "lost"], "nobody has seen the entry for a lease time"
    registry._faults.clear()
    await clock.advance(31)
    assert announced.said == ["registered", "lost", "registered"]
    assert announced.announcer.state.error is None
    await announced.announcer.withdraw(5)


def ids_raw(registry: MemoryRegistry) -> list[str]:
    return [agent_id for _, agent_id in registry._entries]


async def test_an_entry_that_is_gone_and_cannot_be_written_counts_as_lost_though_the_lease_lives(
    clock: ManualClock, registry: Recorded
) -> None:
    """As in an etcd that is out of space: it renews leases, and writes nothing."""
    announced = Announced(registry, clock)
    announced.announcer.start()
    await announced.announcer.wait_registered(5)
    registry.fail_next("create", RegistryUnavailable("out of space"), times=20)
    await clock.advance(20)
    assert announced.said == ["registered"], "it is there, and that can be read"
    registry.delete("prod", "a")
    await clock.advance(6)
    assert announced.said == ["registered", "lost"]
    assert announced.events[-1] == RegistrationChanged(
        agent_id="a", status="lost", detail="the entry is gone and can't be written: out of space"
    )
    await clock.advance(60)
    assert announced.said == ["registered", "lost", "registered"]
    assert ids(registry) == ["a"]
    await announced.announcer.withdraw(5)


async def test_agents_that_register_together_part_ways(clock: ManualClock, registry: Recorded) -> None:
    """Else all of them would ask in the same second, each third of a lease, for ever."""
    crowd = [Announced(registry, clock, info(f"a{n}"), seed=n) for n in range(100)]
    for one in crowd:
        one.announcer.start()
    await clock.advance(60)
    registry.renewed.clear()
    counts = []
    for _ in range(10):
        before = len(registry.renewed)
        await clock.advance(0.5)
        counts.append(len(registry.renewed) - before)
    assert sum(counts) >= 100
    assert max(counts) <= 30
    for one in crowd:
        await one.announcer.withdraw(5)


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
    await clock.advance(22)
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


class Scripted(MemoryRegistry):
    """Shows of the holder's lease what the script says, look by look; then the holder's entry goes."""

    def __init__(self, clock: ManualClock, script: list[float]) -> None:
        super().__init__(clock)
        self.script = script
        self.put_raw("prod", "a", info(incarnation="other").to_bytes(), lease=99)

    def get(self, namespace: str, agent_id: str) -> RawRecord | None:
        if not self.script and self.revision == 2:
            self.delete(namespace, agent_id)
        return super().get(namespace, agent_id)

    def time_left(self, lease: int) -> float:
        assert lease == 99
        return self.script.pop(0)


@pytest.mark.parametrize(
    "script",
    [
        pytest.param([1.0, *[0.0] * 6], id="ended, and not yet removed"),
        pytest.param([0.0] * 6, id="found ended"),
        pytest.param([2.0, 1.0, *(15.0 - n for n in range(16))], id="etcd restarted: it gave the full time again"),
        pytest.param([2.0, 9e9, *(15.0 - n for n in range(16))], id="etcd restarted: no end known at first"),
    ],
)
async def test_a_dead_holder_is_never_refused_whatever_etcd_shows_of_its_lease(
    clock: ManualClock, script: list[float]
) -> None:
    announced = Announced(Scripted(clock, script), clock)
    announced.announcer.start()
    await clock.advance(30)
    assert announced.said == ["waiting", "registered"]
    await announced.announcer.withdraw(5)


async def test_a_lease_that_etcd_lengthens_at_each_of_two_outages_proves_no_life(clock: ManualClock) -> None:
    registry = Scripted(clock, [5.0, 4.0, 9.0, 8.0, 13.0, 12.0, 0.0])
    announced = Announced(registry, clock)
    announced.announcer.start()
    await clock.advance(3)
    registry.fail_next("keep_alive", RegistryUnavailable("restarting"))
    await clock.advance(15)
    assert announced.said == ["waiting", "registered"]
    await announced.announcer.withdraw(5)


async def test_a_lease_that_keeps_growing_for_longer_than_it_lasts_is_a_living_holders(clock: ManualClock) -> None:
    registry = Scripted(clock, [14.0, 13.0, 12.0, 11.0, 10.0] * 10)
    announced = Announced(registry, clock)
    announced.announcer.start()
    await clock.advance(13.5)
    assert announced.said == ["waiting"]
    await clock.advance(3)
    assert announced.said == ["waiting", "refused"]
    await announced.announcer.withdraw(5)


async def test_a_dead_holder_outlives_two_restarts_of_etcd_and_is_still_taken_over(clock: ManualClock) -> None:
    """Each gives its lease the full time again; only a living holder keeps renewing for a whole lease."""
    registry = Scripted(clock, [11.0, 12.0, 11.0, 12.0, *(11.0 - n for n in range(12))])
    announced = Announced(registry, clock)
    announced.announcer.start()
    await clock.advance(30)
    assert announced.said == ["waiting", "registered"]
    await announced.announcer.withdraw(5)


@pytest.mark.parametrize("seed", range(50))
def test_no_delay_of_an_answer_makes_a_dead_holder_look_alive_nor_a_living_one_dead(seed: int) -> None:
    rng = random.Random(seed)
    dead, alive = Holder(1), Holder(1)
    ends_at, now, phase_s = 15.0, 0.0, rng.uniform(0, 5)
    while now < 16.0:
        # The registry looks at its clock some time between the question and the answer, and drops the fraction.
        looks_at = now + rng.uniform(0, 0.5)
        answered_at = looks_at + rng.uniform(0, 0.5)
        dead = dead.seen(now, answered_at, float(int(max(0.0, ends_at - looks_at))))
        alive = alive.seen(now, answered_at, float(int(15.0 - (looks_at + phase_s) % 5.0)))
        now = answered_at + rng.uniform(0.9, 1.1)
    assert dead.renewals == 0
    assert alive.renewals >= 2


async def test_a_holder_without_a_lease_is_refused_at_once(clock: ManualClock, registry: Recorded) -> None:
    registry.put_raw("prod", "a", b"not json")
    announced = Announced(registry, clock)
    announced.announcer.start()
    with pytest.raises(AgentIdInUse, match="without a lease"):
        await announced.announcer.wait_registered(5)
    await announced.announcer.withdraw(5)
    assert registry.list("prod").records[0].value == b"not json"


async def test_our_own_entry_under_an_older_lease_is_moved_to_the_present_one_at_once(
    clock: ManualClock, registry: Recorded
) -> None:
    """As after an answer that was lost: the lease of the first write is still there, and nobody renews it."""
    older = registry.grant(15)
    registry.create("prod", "a", info().to_bytes(), older)
    announced = Announced(registry, clock)
    announced.announcer.start()
    await announced.announcer.wait_registered(5)
    (record,) = registry.list("prod").records
    assert record.lease == registry.granted[-1] != older
    revision = registry.revision
    await clock.advance(60)
    assert ids(registry) == ["a"]
    assert registry.revision == revision, "written once"
    await announced.announcer.withdraw(5)


async def test_our_own_entry_without_a_lease_gets_one(clock: ManualClock, registry: Recorded) -> None:
    registry.put_raw("prod", "a", info().to_bytes())
    announced = Announced(registry, clock)
    announced.announcer.start()
    await announced.announcer.wait_registered(5)
    assert registry.list("prod").records[0].lease == registry.granted[-1]
    await announced.announcer.withdraw(5)
    assert ids(registry) == []


async def test_a_record_that_changes_is_written_over_the_old_one_under_the_same_lease(
    clock: ManualClock, registry: Recorded
) -> None:
    announced = Announced(registry, clock)
    announced.announcer.start()
    await announced.announcer.wait_registered(5)
    (before,) = registry.list("prod").records
    announced.info = info(url="http://10.0.0.2:9000")
    await announced.announcer.rewrite(5)
    (after,) = registry.list("prod").records
    assert after.value == announced.info.to_bytes()
    assert after.lease == before.lease
    assert len(registry.granted) == 1
    assert announced.said == ["registered"]
    await announced.announcer.withdraw(5)
    assert ids(registry) == []


async def test_a_record_that_changes_while_the_registry_is_down_is_written_when_it_is_back(
    clock: ManualClock, registry: Recorded
) -> None:
    announced = Announced(registry, clock)
    announced.announcer.start()
    await announced.announcer.wait_registered(5)
    registry.down()
    announced.info = info(url="http://10.0.0.2:9000")
    writing = asyncio.ensure_future(announced.announcer.rewrite(5))
    await clock.advance(6)
    with pytest.raises(
        RegistryUnavailable, match=r"the new record of agent a was not written within 5 s.*memory://"
    ):
        await writing
    registry.up()
    await clock.advance(3)
    assert registry.list("prod").records[0].value == announced.info.to_bytes()
    await announced.announcer.withdraw(5)


async def test_a_change_before_the_start_or_after_the_end_waits_for_nothing(
    clock: ManualClock, registry: Recorded
) -> None:
    announced = Announced(registry, clock)
    await announced.announcer.rewrite(5)
    announced.announcer.start()
    await announced.announcer.withdraw(5)
    with pytest.raises(RegistryUnavailable, match="was not written"):
        await announced.announcer.rewrite(5)
    assert clock.now() == 0.0


async def test_a_successors_entry_is_not_written_over_by_its_predecessors_change(
    clock: ManualClock, registry: Recorded
) -> None:
    announced = Announced(registry, clock)
    announced.announcer.start()
    await announced.announcer.wait_registered(5)
    registry.put_raw("prod", "a", info(incarnation="successor").to_bytes(), registry.grant(100))
    announced.info = info(url="http://10.0.0.2:9000")
    with pytest.raises(RegistryUnavailable):
        await asyncio.gather(announced.announcer.rewrite(3), clock.advance(4))
    assert registry.list("prod").records[0].value == info(incarnation="successor").to_bytes()
    await announced.announcer.withdraw(5)
    assert ids(registry) == ["a"]


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
    assert announced.status == "withdrawn"


@pytest.mark.parametrize("why", ["held", "down"])
async def test_nobody_is_told_of_the_withdrawal_of_an_agent_that_never_registered(
    clock: ManualClock, registry: Recorded, why: str
) -> None:
    if why == "held":
        registry.put_raw("prod", "a", b"not json")
    else:
        registry.down()
    announced = Announced(registry, clock)
    announced.announcer.start()
    await clock.advance(3)
    await announced.announcer.withdraw(5)
    assert announced.status == "withdrawn"
    assert announced.said == ["refused" if why == "held" else "waiting"]


@pytest.mark.parametrize("failures", [1, 2])
async def test_one_lost_connection_keeps_no_entry_behind_and_a_second_failure_is_told(
    clock: ManualClock, registry: Recorded, failures: int
) -> None:
    announced = Announced(registry, clock)
    announced.announcer.start()
    await announced.announcer.wait_registered(5)
    registry.fail_next("revoke", RegistryUnavailable("cut"), times=failures)
    await announced.announcer.withdraw(5)
    assert ids(registry) == ([] if failures == 1 else ["a"])
    assert announced.announcer.state.detail == (
        "" if failures == 1 else "not revoked, so the entry ends with its lease: cut"
    )


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
    assert max(gaps) <= 2.5
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
        self.go_grant = threading.Event()
        self.go_grant.set()
        self.entered_grant = threading.Event()
        self.threads: set[int] = set()
        self.created = 0

    @property
    def blocking(self) -> bool:
        return True

    def grant(self, ttl_s: float) -> int:
        self.entered_grant.set()
        self.go_grant.wait(20)
        return super().grant(ttl_s)

    def create(self, namespace: str, agent_id: str, value: bytes, lease: int) -> Created | Occupied:
        self.threads.add(threading.get_ident())
        self.created += 1
        self.entered.set()
        self.go.wait(20)
        return super().create(namespace, agent_id, value, lease)


async def test_what_is_withdrawn_while_its_lease_is_granted_is_never_written() -> None:
    registry = Slow()
    registry.go_grant.clear()
    announced = Announced(registry, registry.clock)
    announced.announcer.start()
    await eventually(registry.entered_grant.is_set)
    await announced.announcer.withdraw(0.05)
    registry.go_grant.set()
    await eventually(lambda: not any(t.name == "agent-reach-announcer" for t in threading.enumerate()))
    assert registry.created == 0
    assert announced.said == []


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
    assert all(0.1 <= delay <= 2.5 for delay in delays[0])
