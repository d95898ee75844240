"""Faults in a random order, then quiet: every client ends up knowing exactly what etcd holds.

A failure prints its script: `play` it again by hand, or run the seed again.
"""

from __future__ import annotations

import asyncio
import random
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


@dataclass(frozen=True, slots=True)
class Fault:
    """One line of a script: what happens to whom, for how long, and how long it is quiet then."""

    kind: str
    target: int
    lasts_s: float
    pause_s: float

    def __str__(self) -> str:
        return f"{self.kind:<10} {self.target}  for {self.lasts_s:.2f} s, then {self.pause_s:.2f} s quiet"


# What happens in no time has no use for a duration.
_KINDS = {
    "stop": True,
    "freeze": True,
    "wipe": False,
    "compact": False,
    "cut": False,
    "hole": True,
    "hole_up": True,
    "hole_down": True,
    "kill": False,
    "start": False,
}


def script(seed: int, total_s: float) -> list[Fault]:
    """The faults of a seed: each kind about as often as the others, up to twice a lease long."""
    rng, faults, at_s = random.Random(seed), [], 0.0
    while at_s < total_s:
        kind = rng.choice(list(_KINDS))
        lasts_s = rng.uniform(0.2, 2 * QUICK.lease_ttl_s) if _KINDS[kind] else 0.0
        faults.append(Fault(kind, rng.randrange(3), lasts_s, rng.expovariate(1 / 0.5)))
        at_s += lasts_s + faults[-1].pause_s
    return faults


class Stage:
    """An etcd, agents with ways to it, and the faults that can happen to them."""

    def __init__(self, server: EtcdServer, crew: Crew) -> None:
        self.server, self._crew = server, crew
        self.ways: list[Proxy] = []
        self.clients: list[ReachClient] = []
        self.children: dict[str, Child] = {}

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

    async def play(self, fault: Fault) -> None:
        """Let it happen, last, and be over."""
        way, child = self.ways[fault.target], CHILDREN[fault.target]
        match fault.kind:
            case "stop":
                self.server.kill()
            case "freeze":
                self.server.pause()
            case "wipe":
                await asyncio.to_thread(self.server.wipe)
            case "compact":
                try:
                    await asyncio.to_thread(self.server.compact)
                except RegistryUnavailable as error:
                    assert "compacted" in str(error), error  # twice, and nothing was written in between
            case "cut":
                way.cut()
            case "hole":
                way.black_hole()
            case "hole_up":
                way.to_server.black_hole()
            case "hole_down":
                way.to_client.black_hole()
            case "kill" if child in self.children:
                self.children.pop(child).kill()
            case "start" if child not in self.children:
                self.children[child] = self._crew.start(child, self.server.url)
        await asyncio.sleep(fault.lasts_s)
        self.server.resume()
        await asyncio.to_thread(self.server.start)
        way.heal()
        await asyncio.sleep(fault.pause_s)

    def wrong(self, namespace: str) -> str:
        """What isn't as it must be, or nothing."""
        held = incarnations(self.server, namespace)
        problems = []
        if held.keys() != self.living:
            problems.append(f"etcd holds {sorted(held)}, alive are {sorted(self.living)}")
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
        for fault in faults:
            await stage.play(fault)
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
