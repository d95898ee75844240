"""Members of a cluster freeze or die, and agents do: whoever lives is found and called as before."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack

import pytest

pytest.importorskip("pyetcd")

from agent_reach.config import RegistryConfig
from agent_reach.testing.etcd import EtcdServer
from agent_reach.testing.etcd_cluster import EtcdCluster
from tests.faults.support import QUICK, STEADY, Crew, Load, client, incarnations, known, opened, until

pytestmark = pytest.mark.etcd

IDS = ["a0", "a1"]
long = [pytest.mark.faults, pytest.mark.timeout(300)]


@pytest.mark.parametrize(
    ("frozen_s", "config"), [(6, STEADY), pytest.param(30, RegistryConfig(), marks=long)], ids=["6s", "30s"]
)
@pytest.mark.parametrize("role", ["leader", "follower"])
async def test_while_a_member_is_frozen_calls_work_and_newcomers_are_found(
    cluster: EtcdCluster, namespace: str, role: str, frozen_s: float, config: RegistryConfig
) -> None:
    async with AsyncExitStack() as stack:
        agents = await opened(stack, cluster.url, namespace, IDS, config=config)
        # Several, so that with every member somebody is connected.
        callers = [await stack.enter_async_context(client(cluster.url, namespace, config=config)) for _ in range(4)]
        await until(lambda: all(known(caller).keys() == set(IDS) for caller in callers))
        leader = await asyncio.to_thread(cluster.leader)
        frozen = leader if role == "leader" else cluster.followers()[0]
        load = await stack.enter_async_context(Load(callers[0]))
        frozen.pause()
        began_at = time.monotonic()
        living = await asyncio.to_thread(cluster.leader)
        (newcomer,) = await opened(stack, cluster.url, namespace, ["new"], config=config)
        # A watch on the frozen member is given up after 15 s at most, and a list comes before that.
        await until(lambda: all("new" in known(caller) for caller in callers), 25)
        await load.lasts(max(0.0, frozen_s - (time.monotonic() - began_at)))
        frozen.resume()
        everybody = [*agents, newcomer, *callers]
        await until(lambda: all(one.state.connected and not one.state.stale for one in everybody))
        # A leader that wakes may end leases that it believes to be over (etcd 3.5.1); then each comes back within a
        # heartbeat, and is registered until it has noticed.
        await until(lambda: incarnations(living, namespace).keys() == {*IDS, "new"})
        await until(lambda: all(agent.state.registered for agent in (*agents, newcomer)))
        await until(lambda: all(known(one) == incarnations(living, namespace) for one in everybody))
        await load.stop()
        assert load.failed == []


async def test_a_cluster_loses_one_member_then_two_and_recovers(cluster: EtcdCluster, namespace: str) -> None:
    async with AsyncExitStack() as stack:
        agents = await opened(stack, cluster.url, namespace, IDS, config=STEADY)
        caller = await stack.enter_async_context(client(cluster.url, namespace, config=STEADY))
        everybody = [*agents, caller]
        await until(lambda: all(known(one).keys() == set(IDS) for one in everybody))
        before = known(caller)
        load = await stack.enter_async_context(Load(caller))
        first = await asyncio.to_thread(cluster.leader)
        first.kill()
        second = await asyncio.to_thread(cluster.leader)
        (last,) = cluster.followers()
        await until(lambda: all(one.state.connected and not one.state.stale for one in everybody))
        await until(lambda: all(agent.state.registered for agent in agents))
        (newcomer,) = await opened(stack, cluster.url, namespace, ["new"], config=STEADY)
        await until(lambda: all("new" in known(one) for one in everybody))

        second.kill()
        # Without a majority nothing is certain any more, and they say so; calls go on.
        everybody.append(newcomer)
        await until(lambda: all(one.state.stale and not one.state.connected for one in everybody), 40)
        assert all(known(one).items() >= before.items() for one in everybody)

        await asyncio.to_thread(second.start)
        await until(lambda: all(one.state.connected and not one.state.stale for one in everybody), 30)
        await until(lambda: all(agent.state.registered for agent in (*agents, newcomer)))
        await asyncio.to_thread(first.start)
        present = incarnations(last, namespace)
        assert present.items() >= before.items()
        await until(lambda: all(known(one) == present for one in everybody))
        await load.stop()
        assert load.failed == []


async def test_an_agent_that_was_frozen_for_three_leases_is_gone_and_back_and_no_call_fails(
    server: EtcdServer, namespace: str, crew: Crew
) -> None:
    frozen, _ = crew.start("frozen", server.url), crew.start("other", server.url)
    async with client(server.url, namespace) as caller:
        await until(lambda: known(caller).keys() == {"frozen", "other"})
        incarnation = known(caller)["frozen"]
        async with Load(caller) as load:
            frozen.pause()
            began_at = time.monotonic()
            await until(lambda: known(caller).keys() == {"other"})
            await load.lasts(max(0.0, 3 * QUICK.lease_ttl_s - (time.monotonic() - began_at)))
            assert incarnations(server, namespace).keys() == {"other"}
            frozen.resume()
            await until(lambda: known(caller).get("frozen") == incarnation)
            reply = await caller.call("echo.say.v1", {"text": "x"}, agent_id="frozen")
            assert reply.data["pid"] == frozen.pid
        assert load.failed == []


async def test_an_agent_that_is_killed_is_gone_with_its_lease_and_calls_go_to_the_others(
    server: EtcdServer, namespace: str, crew: Crew
) -> None:
    victim, _ = crew.start("victim", server.url), crew.start("other", server.url)
    async with client(server.url, namespace) as caller:
        await until(lambda: known(caller).keys() == {"victim", "other"})
        async with Load(caller, rate=50) as load:
            await until(lambda: victim.pid in load.pids)
            victim.kill()
            killed_at = time.monotonic()
            await until(lambda: "victim" not in incarnations(server, namespace))
            # The lease and 1 s; the rest is for a busy machine.
            assert time.monotonic() - killed_at < QUICK.lease_ttl_s + 4.0
            await until(lambda: known(caller).keys() == {"other"})
        assert load.failed == []
