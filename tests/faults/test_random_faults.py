"""Faults in a random order, then quiet: every client ends up knowing exactly what etcd holds.

A failure prints its script: `play` it again by hand, or run the seed again.
"""

from __future__ import annotations

import asyncio
import random
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass

import pytest

pytest.importorskip("pyetcd")

from agent_reach import ReachClient
from agent_reach.errors import RegistryUnavailable
from agent_reach.testing.etcd import EtcdServer
from tests.faults.proxy import Proxy
from tests.faults.support import QUICK, Child, Crew, client, incarnations, known, until

pytestmark = pytest.mark.etcd

# Fixed agents on this loop, each with a way of its own to etcd; the others come and go as processes.
WAYS = 3
CHILDREN = ("c0", "c1", "c2")

SHORT_S, LONG_S = 12.0, 60.0
# Then everything must be right.
QUIET_S = 20.0


# What happens to the one etcd, or to one client's way to it, lasts a while and never overlaps its like; etcd's and
# the ways' troubles overlap freely.
_TO_ETCD = {"stop": True, "freeze": True, "wipe": False, "compact": False}
_TO_A_WAY = {"cut": False, "hole": True, "hole_up": True, "hole_down": True}
_TO_A_CHILD = {"kill": False, "start": False}
_LASTS = _TO_ETCD | _TO_A_WAY | _TO_A_CHILD


@dataclass(frozen=True, slots=True)
class Fault:
    """One line of a script: what happens when to whom, and for how long."""

    at_s: float
    kind: str
    target: int
    lasts_s: float

    def __str__(self) -> str:
        return f"{self.at_s:6.2f} s: {self.kind:<10} {self.target}  for {self.lasts_s:.2f} s"


def script(seed: int, total_s: float) -> list[Fault]:
    """The faults of a seed: each kind about as often as the others, up to one and a half leases long."""
    rng, faults, at_s = random.Random(seed), [], 0.0
    while at_s < total_s:
        kind = rng.choice(list(_LASTS))
        lasts_s = rng.uniform(0.2, 1.5 * QUICK.lease_ttl_s) if _LASTS[kind] else 0.0
        faults.append(Fault(at_s, kind, rng.randrange(3), lasts_s))
        at_s += rng.expovariate(1 / 0.7)
    return faults


class Stage:
    """An etcd, agents with ways to it, and the faults that can happen to them."""

    def __init__(self, server: EtcdServer, crew: Crew) -> None:
        self.server, self._crew = server, crew
        self.ways: list[Proxy] = []
        self.clients: list[ReachClient] = []
        self.children: dict[str, Child] = {}
        self._etcd_is_troubled = asyncio.Lock()
        self._way_is_troubled = [asyncio.Lock() for _ in range(WAYS)]

    async def open(self, stack: AsyncExitStack, namespace: str) -> None:
        """Make the fixed agents, one more client that sees etcd directly, and the first two processes."""
        for number in range(WAYS):
            way = stack.enter_context(Proxy(self.server.port))
            self.ways.append(way)
            agent = client(way.url, namespace, f"a{number}", serves=True)
            self.clients.append(await stack.enter_async_context(agent))
        self.clients.append(await stack.enter_async_context(client(self.server.url, namespace)))
        for name in CHILDREN[:2]:
            self.children[name] = self._crew.start(name, self.server.url)

    @property
    def living(self) -> set[str]:
        """Who must be in etcd once it is quiet."""
        return {f"a{number}" for number in range(WAYS)} | self.children.keys()

    async def play(self, faults: list[Fault]) -> None:
        """Let all of them happen, and be over."""
        began_at = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for fault in faults:
                await asyncio.sleep(began_at + fault.at_s - time.monotonic())
                if fault.kind in _TO_ETCD:
                    group.create_task(self._trouble_etcd(fault))
                elif fault.kind in _TO_A_WAY:
                    group.create_task(self._trouble_way(fault))
                else:
                    self._trouble_child(fault)

    async def _trouble_etcd(self, fault: Fault) -> None:
        async with self._etcd_is_troubled:
            match fault.kind:
                case "stop":
                    self.server.kill()
                case "freeze":
                    self.server.pause()
                case "wipe":
                    await asyncio.to_thread(self.server.wipe)
                case "compact":
                    await asyncio.to_thread(self._compact)
            await asyncio.sleep(fault.lasts_s)
            self.server.resume()
            await asyncio.to_thread(self.server.start)

    def _compact(self) -> None:
        try:
            self.server.compact()
        except RegistryUnavailable as error:
            # Twice, and nothing was written in between.
            if "compacted" not in str(error):
                raise

    async def _trouble_way(self, fault: Fault) -> None:
        way = self.ways[fault.target]
        async with self._way_is_troubled[fault.target]:
            match fault.kind:
                case "cut":
                    way.cut()
                case "hole":
                    way.black_hole()
                case "hole_up":
                    way.to_server.black_hole()
                case "hole_down":
                    way.to_client.black_hole()
            await asyncio.sleep(fault.lasts_s)
            way.heal()

    def _trouble_child(self, fault: Fault) -> None:
        name = CHILDREN[fault.target]
        if fault.kind == "kill" and name in self.children:
            self.children.pop(name).kill()
        elif fault.kind == "start" and name not in self.children:
            self.children[name] = self._crew.start(name, self.server.url)

    def wrong(self, namespace: str) -> str:
        """What isn't as it must be, or nothing."""
        held = incarnations(self.server, namespace)
        problems = []
        if held.keys() != self.living:
            problems.append(f"etcd holds {sorted(held)}, alive are {sorted(self.living)}")
        for name, child in self.children.items():
            if child.process.poll() is not None:
                problems.append(f"{name} ended: {child.log}")
        for one in self.clients:
            if known(one) != held:
                problems.append(f"{one.agent_id} knows {known(one)}, etcd holds {held}; {one.state}")
            if not one.state.connected or one.state.stale:
                problems.append(f"{one.agent_id} isn't up to date: {one.state}")
        return "\n".join(problems)


async def all_is_right_after(seed: int, total_s: float, server: EtcdServer, namespace: str, crew: Crew) -> None:
    faults = script(seed, total_s)
    told = f"seed {seed}:\n" + "\n".join(str(fault) for fault in faults)
    async with AsyncExitStack() as stack:
        stage = Stage(server, crew)
        await stage.open(stack, namespace)
        await until(lambda: not stage.wrong(namespace), what=lambda: stage.wrong(namespace))
        await stage.play(faults)
        await until(
            lambda: not stage.wrong(namespace), QUIET_S, lambda: f"{stage.wrong(namespace)}\n\nafter {told}"
        )


@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_after_random_faults_every_client_knows_what_etcd_holds(
    server: EtcdServer, namespace: str, crew: Crew, seed: int
) -> None:
    await all_is_right_after(seed, SHORT_S, server, namespace, crew)


@pytest.mark.faults
@pytest.mark.timeout(240)
@pytest.mark.parametrize("seed", range(100, 115))
async def test_after_a_minute_of_random_faults_every_client_knows_what_etcd_holds(
    server: EtcdServer, namespace: str, crew: Crew, seed: int
) -> None:
    await all_is_right_after(seed, LONG_S, server, namespace, crew)
