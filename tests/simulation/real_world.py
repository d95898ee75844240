"""The same world of real processes: agents, an etcd and sockets of the loopback interface."""

from __future__ import annotations

import asyncio
import signal
import statistics
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from agent_reach import ReachClient, ReachError
from agent_reach.errors import Attempt
from agent_reach.testing.etcd import EtcdServer
from agent_reach.testing.simulation import quantile
from agent_reach.testing.simulation.draws import stream
from tests.simulation.compared import Arrival, Called, World
from tests.simulation.real_agent import NOTHING, WORK

__all__ = ["Lived", "live", "measure_rtt_s"]

ROOT = Path(__file__).parents[2]
# A process of ours is up within 3 s where nothing else runs.
_START_S = 40.0
# The longest that a call can take: 5 s for each of three attempts, and what it waits in between.
_LAST_CALL_S = 30.0


@dataclass(frozen=True, slots=True)
class Lived:
    """What came of a real run.

    `late_s`: 99 of 100 calls were begun no later than that after their time, which tells whether the machine kept
    up. `gone_s`: when the killed agent's entry was gone, None if it wasn't. `executions` and `pids` of the agents.
    """

    calls: list[Called]
    late_s: float
    gone_s: float | None
    executions: dict[str, int]
    pids: tuple[int, ...]


async def live(world: World, seed: int, calls: Sequence[Arrival], etcd: EtcdServer, folder: Path) -> Lived:
    """Run a world, and end its processes. Raises TimeoutError if it takes far too long."""
    async with (
        asyncio.timeout(_START_S + world.length_s + _LAST_CALL_S),
        AsyncExitStack() as stack,
    ):
        agents = await stack.enter_async_context(_agents(world, seed, etcd, folder))
        clients = [
            await stack.enter_async_context(_client(agents, f"client-{number}", seed))
            for number in range(1, world.clients + 1)
        ]
        for client in clients:
            await _until_known(client, world.agents)
        loop = asyncio.get_running_loop()
        begun = loop.time() + 0.1
        late: list[float] = []

        async def one(arrival: Arrival) -> Called:
            due = begun + arrival.time_s
            late.append(loop.time() - due)
            failure: str | None = None
            attempts: tuple[Attempt, ...]
            try:
                attempts = (await clients[arrival.client].call(WORK, {})).attempts
            except ReachError as error:
                failure, attempts = type(error).__name__, error.attempts
            return Called(arrival.time_s, loop.time() - due, failure, attempts)

        tasks = []
        async with asyncio.TaskGroup() as group:
            happening = group.create_task(_happen(world, agents, clients[0], begun))
            for arrival in calls:
                await asyncio.sleep(begun + arrival.time_s - loop.time())
                tasks.append(group.create_task(one(arrival)))
        pids = tuple(process.pid for process in agents.processes.values())
        ended = [task.result() for task in tasks]
        return Lived(ended, quantile(late, 0.99), happening.result(), agents.executions(), pids)


async def measure_rtt_s(etcd: EtcdServer, folder: Path, times: int = 150) -> float:
    """What a call costs that has nothing to do, in an idle world: the median of `times`."""
    loop, took = asyncio.get_running_loop(), []
    world = World(name="idle", title="", agents=1)
    async with (
        asyncio.timeout(_START_S + _LAST_CALL_S),
        _agents(world, 0, etcd, folder) as agents,
        _client(agents, "client-1", 0) as reach,
    ):
        await _until_known(reach, 1)
        for _ in range(times):
            began = loop.time()
            await reach.call(NOTHING, {})
            took.append(loop.time() - began)
            await asyncio.sleep(0.005)
    # The first ones open connections and import what they need.
    return statistics.median(took[times // 5 :])


# --- agents --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Agents:
    registry: str
    namespace: str
    processes: dict[str, subprocess.Popen[bytes]]
    folder: Path

    def executions(self) -> dict[str, int]:
        return {agent_id: _count_file(self.folder, agent_id).stat().st_size for agent_id in self.processes}

    def log_of_the_ended(self) -> str:
        ended = [agent_id for agent_id, process in self.processes.items() if process.poll() is not None]
        return "".join(f"{agent_id}:\n{(self.folder / agent_id).read_text()}\n" for agent_id in ended)


@asynccontextmanager
async def _agents(world: World, seed: int, etcd: EtcdServer, folder: Path) -> AsyncIterator[_Agents]:
    """Agents that are all registered; killed at the end, since nobody calls them any more."""
    agents = _Agents(etcd.url, uuid.uuid4().hex[:8], {}, folder / f"{world.name}-{uuid.uuid4().hex[:8]}")
    agents.folder.mkdir()
    try:
        for agent_id in world.agent_ids():
            agents.processes[agent_id] = _start(world, agent_id, seed, agents)
        async with _client(agents, "first", seed) as reach:
            await _until_known(reach, world.agents, agents)
        yield agents
    finally:
        for process in agents.processes.values():
            process.kill()
        for process in agents.processes.values():
            process.wait(10)


def _start(world: World, agent_id: str, seed: int, agents: _Agents) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tests.simulation.real_agent", "--registry", agents.registry]
    command += ["--namespace", agents.namespace, "--id", agent_id, "--seed", str(seed)]
    command += ["--median", str(world.service.median_s), "--sigma", str(world.service.sigma)]
    command += ["--slots", str(world.slots), "--ttl", str(world.lease_ttl_s)]
    command += ["--count-file", str(_count_file(agents.folder, agent_id))]
    if world.unsafe:
        command.append("--unsafe")
    if world.trouble is not None and world.trouble.slower is not None:
        command += ["--slower", str(world.trouble.slower)]
    with (agents.folder / agent_id).open("wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, cwd=ROOT)


def _count_file(folder: Path, agent_id: str) -> Path:
    return folder / f"{agent_id}.count"


def _client(agents: _Agents, name: str, seed: int) -> ReachClient:
    rng = stream(seed, f"client/{name}")
    return ReachClient(name=name, registry=agents.registry, namespace=agents.namespace, rng=rng)


async def _until_known(reach: ReachClient, count: int, agents: _Agents | None = None) -> None:
    while len(reach.agents()) < count:
        if agents is not None and (log := agents.log_of_the_ended()):
            raise RuntimeError(f"an agent ended before it was registered: {log}")
        await asyncio.sleep(0.02)


# --- what happens to them ------------------------------------------------------------------------------------


async def _happen(world: World, agents: _Agents, witness: ReachClient, begun: float) -> float | None:
    """Kill and trouble agents when their time comes; return when the killed one's entry was gone."""
    loop, processes = asyncio.get_running_loop(), list(agents.processes.values())

    async def at(time_s: float) -> None:
        await asyncio.sleep(begun + time_s - loop.time())

    async def trouble() -> None:
        if world.trouble is not None:
            await at(world.trouble.from_s)
            processes[1].send_signal(signal.SIGUSR1)
            await at(world.trouble.until_s)
            processes[1].send_signal(signal.SIGUSR2)

    async def kill() -> float | None:
        if world.kill_s is None:
            return None
        await at(world.kill_s)
        processes[0].kill()
        while len(witness.agents()) == world.agents:
            if loop.time() > begun + world.length_s:
                return None
            await asyncio.sleep(0.1)
        return loop.time() - begun

    async with asyncio.TaskGroup() as group:
        group.create_task(trouble())
        killing = group.create_task(kill())
    return killing.result()
