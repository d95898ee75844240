"""Etcd goes away, comes back, forgets: those that live find each other again and lose no call meanwhile."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

pytest.importorskip("pyetcd")

from agent_reach.config import RegistryConfig
from agent_reach.ports import SystemClock
from agent_reach.registry.urls import open_registry
from agent_reach.testing.etcd import EtcdServer
from agent_reach.testing.etcd_tls import EtcdTls
from tests.faults.proxy import Proxy
from tests.faults.support import QUICK, Crew, Duo, Load, client, entries, incarnations, known, opened, until
from tests.registry.support import Announced, info

pytestmark = pytest.mark.etcd


async def test_etcd_back_and_empty_has_every_agent_again_within_seconds_and_no_call_was_lost(
    server: EtcdServer, namespace: str
) -> None:
    ids = {"a0", "a1", "a2"}
    async with AsyncExitStack() as stack:
        agents = await opened(stack, server.url, namespace, sorted(ids))
        caller = await stack.enter_async_context(client(server.url, namespace))
        await until(lambda: known(caller).keys() == ids)
        before = incarnations(server, namespace)
        load = await stack.enter_async_context(Load(caller))
        server.clear()
        await load.lasts(10)
        assert not any(agent.state.registered for agent in agents)
        assert not caller.state.connected
        await asyncio.to_thread(server.start)
        back_at = time.monotonic()
        async with client(server.url, namespace) as newcomer:
            await until(lambda: known(newcomer) == before)
            # It must take 3 s at most; the rest is for a busy machine.
            assert time.monotonic() - back_at < 7
        assert incarnations(server, namespace) == before
        await until(lambda: all(agent.state.registered and not agent.state.stale for agent in agents))
        assert known(caller) == before
        await load.stop()
        assert load.failed == []


@pytest.mark.parametrize(
    ("how", "down_s"),
    [
        ("refused", 30),
        pytest.param("refused", 120, marks=[pytest.mark.faults, pytest.mark.timeout(300)]),
        pytest.param("silent", 60, marks=[pytest.mark.faults, pytest.mark.timeout(300)]),
    ],
)
async def test_while_etcd_is_down_for_long_calls_work_and_an_idle_process_is_quiet(
    server: EtcdServer, namespace: str, crew: Crew, how: str, down_s: float
) -> None:
    with Proxy(server.port) as idle_way, Proxy(server.port) as busy_way:
        idle = crew.start("idle", idle_way.url, config=RegistryConfig())
        async with AsyncExitStack() as stack:
            (busy,) = await opened(stack, busy_way.url, namespace, ["busy"])
            caller = await stack.enter_async_context(client(busy_way.url, namespace))
            await until(lambda: known(caller).keys() == {"busy", "idle"})
            peer = known(caller)["busy"]
            lines, dials, cpu_s, began_at = idle.log.count("\n"), idle_way.accepted, idle.cpu_s(), time.monotonic()
            for way in (idle_way, busy_way):
                if how == "silent":
                    way.black_hole()
                else:
                    way.refuse()
                    way.cut()
            for number in range(int(down_s * 10)):
                reply = await caller.call("echo.say.v1", {"text": str(number)}, agent_id="busy")
                assert reply.data["text"] == str(number)
                await asyncio.sleep(0.1)
            took_s = time.monotonic() - began_at
            dials, cpu_s, said = idle_way.accepted - dials, idle.cpu_s() - cpu_s, idle.log.splitlines()[lines:]
            assert 1 <= len(said) <= 5, "\n".join(said)
            assert cpu_s / took_s < 0.02
            assert dials * 30 / took_s <= 20
            assert not caller.state.connected
            assert caller.state.registry_error is not None
            for way in (idle_way, busy_way):
                way.heal()
            await until(lambda: caller.state.connected and busy.state.registered)
            assert known(caller)["busy"] == peer
            await until(lambda: "idle" in incarnations(server, namespace))


@pytest.mark.parametrize("guard", ["users", "certificates"])
async def test_where_etcd_asks_who_we_are_an_agent_is_back_after_a_restart_too(
    tmp_path: Path, pem: Path, namespace: str, guard: str
) -> None:
    ca = pem / "ca.pem"
    tls = EtcdTls(cert=pem / "server.pem", key=pem / "server.key", ca=ca, client_ca=ca)
    # Tokens that a restart and the outage before it make worthless.
    options = ["--auth-token-ttl", "2"]
    with EtcdServer(tmp_path / "data", tls=tls if guard == "certificates" else None, options=options) as server:
        if guard == "users":
            server.enable_auth()
        async with Duo(server.url, namespace, "a") as duo:
            await until(lambda: duo.healthy and duo.knows == {"a": "i1"}, what=duo)
            server.kill()
            await until(lambda: (duo.announced.status, duo.watched.status) == ("lost", "stale"), what=duo)
            await asyncio.to_thread(server.start)
            await until(lambda: duo.healthy and duo.knows == {"a": "i1"}, what=duo)
            async with Duo(server.url, namespace, "b", incarnation="i2"):
                await until(lambda: duo.knows == {"a": "i1", "b": "i2"}, what=duo)


async def test_a_wiped_etcd_that_others_fill_again_shows_the_newcomer_too(
    server: EtcdServer, namespace: str
) -> None:
    async with Duo(server.url, namespace) as duo:
        await until(lambda: duo.healthy and duo.knows.keys() == {"a"})
        await asyncio.to_thread(server.wipe)
        async with Duo(server.url, namespace, "c", incarnation="i3"):
            await until(lambda: duo.knows == {"a": "i1", "c": "i3"} == incarnations(server, namespace), what=duo)
            await until(lambda: duo.healthy, what=duo)


async def test_a_key_that_is_deleted_by_hand_comes_back_under_the_same_lease(
    server: EtcdServer, namespace: str
) -> None:
    async with Duo(server.url, namespace) as duo:
        await until(lambda: duo.healthy and duo.knows.keys() == {"a"})
        before = entries(server, namespace)["a"]
        assert server.ctl("del", f"/agent-reach/v1/{namespace}/agents/a").strip() == "1"
        await until(lambda: "a" in entries(server, namespace))
        after = entries(server, namespace)["a"]
        assert (after.incarnation, after.lease) == (before.incarnation, before.lease)
        assert after.revision > before.revision
        await until(lambda: duo.knows == {"a": "i1"})


async def test_a_lease_that_is_revoked_by_hand_is_followed_by_a_new_entry_under_a_new_one(
    server: EtcdServer, namespace: str
) -> None:
    async with Duo(server.url, namespace) as duo:
        await until(lambda: duo.healthy and duo.knows.keys() == {"a"})
        before = entries(server, namespace)["a"]
        server.ctl("lease", "revoke", f"{before.lease:x}")
        await until(lambda: "a" in entries(server, namespace))
        after = entries(server, namespace)["a"]
        assert after.incarnation == before.incarnation
        assert after.lease not in (0, before.lease)
        await until(lambda: duo.healthy and duo.knows == {"a": "i1"})


async def test_a_successor_survives_the_exit_of_the_process_that_had_its_id_before(
    server: EtcdServer, namespace: str, proxy: Proxy
) -> None:
    old, new = open_registry(proxy.url, QUICK), open_registry(server.url, QUICK)
    predecessor = Announced(old, SystemClock(), info("a", incarnation="i1", namespace=namespace), QUICK)
    successor = Announced(new, SystemClock(), info("a", incarnation="i2", namespace=namespace), QUICK)
    predecessor.announcer.start()
    await until(lambda: predecessor.status == "registered")
    proxy.black_hole()
    await until(lambda: "a" not in entries(server, namespace))
    successor.announcer.start()
    await until(lambda: successor.status == "registered")
    proxy.heal()
    await predecessor.announcer.withdraw(5)
    assert incarnations(server, namespace) == {"a": "i2"}
    held = entries(server, namespace)["a"].lease
    # Not only now: also after the lease that it would have had, had the predecessor taken it along.
    ended_at = time.monotonic() + 2 * QUICK.lease_ttl_s
    await until(lambda: time.monotonic() > ended_at or incarnations(server, namespace) != {"a": "i2"})
    assert entries(server, namespace)["a"].lease == held
    assert successor.said == ["registered"]
    await successor.announcer.withdraw(5)
    old.close()
    new.close()


async def test_a_departure_that_was_compacted_away_while_a_client_was_cut_off_is_seen(
    server: EtcdServer, namespace: str, proxy: Proxy
) -> None:
    async with (
        Duo(server.url, namespace, "a") as stays,
        Duo(proxy.url, namespace, "c", incarnation="i3") as cut_off,
    ):
        async with Duo(server.url, namespace, "b", incarnation="i2"):
            everybody = {"a": "i1", "b": "i2", "c": "i3"}
            await until(lambda: stays.knows == everybody == cut_off.knows)
            proxy.black_hole()
        for number in range(100):
            server.post("/v3/kv/put", {"key": "L2Vsc2V3aGVyZQ==", "value": f"{number:04}"})
        server.compact()
        # What was held back would tell; now it must begin after what it saw last, and that is gone.
        proxy.cut()
        proxy.heal()
        await until(lambda: cut_off.knows == {"a": "i1", "c": "i3"} == stays.knows, what=cut_off)
        await until(lambda: cut_off.healthy, what=cut_off)
