"""A client's way to etcd is closed, both ways or one, or slow: it says so, and once it is open knows everything."""

from __future__ import annotations

import time

import pytest

pytest.importorskip("pyetcd")

from agent_reach.testing.etcd import EtcdServer
from tests.faults.proxy import Proxy
from tests.faults.support import QUICK, Duo, entries, incarnations, until

pytestmark = pytest.mark.etcd


@pytest.mark.parametrize("closed", ["both", "to_server", "to_client"])
async def test_a_client_that_was_cut_off_is_back_and_knows_who_came_and_went(
    server: EtcdServer, namespace: str, proxy: Proxy, closed: str
) -> None:
    async with (
        Duo(server.url, namespace, "stays", incarnation="i1") as stays,
        Duo(proxy.url, namespace, "cut-off", incarnation="i2") as cut_off,
    ):
        async with Duo(server.url, namespace, "leaves", incarnation="i3"):
            everybody = {"stays": "i1", "cut-off": "i2", "leaves": "i3"}
            await until(lambda: stays.knows == everybody == cut_off.knows)
            if closed in ("both", "to_server"):
                proxy.to_server.black_hole()
            if closed in ("both", "to_client"):
                proxy.to_client.black_hole()
        async with Duo(server.url, namespace, "comes", incarnation="i4"):
            # What is asked may still get there while no answer comes back: then the entry may live on.
            if closed != "to_client":
                await until(lambda: stays.knows == {"stays": "i1", "comes": "i4"}, what=stays)
            await until(lambda: (cut_off.announced.status, cut_off.watched.status) == ("lost", "stale"))
            assert "stays" in cut_off.knows
            proxy.heal()
            present = {"stays": "i1", "cut-off": "i2", "comes": "i4"}
            await until(lambda: cut_off.healthy and cut_off.knows == present, what=cut_off)
            await until(lambda: stays.knows == present == incarnations(server, namespace), what=stays)


async def test_cut_connections_are_made_anew_and_nothing_is_missed(
    server: EtcdServer, namespace: str, proxy: Proxy
) -> None:
    async with Duo(proxy.url, namespace) as cut_off:
        await until(lambda: cut_off.healthy)
        for name in "bcdefghijk":
            proxy.cut()
            async with Duo(server.url, namespace, name):
                await until(lambda name=name: cut_off.knows.keys() == {"a", name}, what=cut_off)
            await until(lambda: cut_off.knows.keys() == {"a"}, what=cut_off)
        await until(lambda: cut_off.healthy, what=cut_off)
        assert "lost" not in cut_off.announced.said


@pytest.mark.parametrize("slow", ["delayed", "throttled"])
async def test_over_a_slow_way_an_agent_stays_registered_and_sees_changes(
    server: EtcdServer, namespace: str, proxy: Proxy, slow: str
) -> None:
    async with Duo(proxy.url, namespace) as far:
        await until(lambda: far.healthy and far.knows.keys() == {"a"})
        lease = entries(server, namespace)["a"].lease
        for direction in (proxy.to_server, proxy.to_client):
            if slow == "delayed":
                direction.delay(0.2)
            else:
                direction.throttle(20_000)
        began_at, changes = time.monotonic(), 0
        # Three leases long: it must have been renewed that way.
        while time.monotonic() - began_at < 3 * QUICK.lease_ttl_s:
            changes += 1
            name = f"b{changes}"
            async with Duo(server.url, namespace, name):
                await until(lambda name=name: far.knows.keys() == {"a", name}, what=far)
            await until(lambda: far.knows.keys() == {"a"}, what=far)
        assert far.announced.said == ["registered"]
        assert entries(server, namespace)["a"].lease == lease
