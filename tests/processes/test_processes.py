"""Real agents in processes of their own, a real etcd, real sockets: nothing is lost that could have been saved."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agent_reach import (
    AgentNotFound,
    OutcomeUnknown,
    ReachClient,
    ReachConfig,
    ReachError,
    RegistryConfig,
    RegistryUnavailable,
    SyncReachClient,
)
from agent_reach.testing.etcd import EtcdServer

pytestmark = pytest.mark.etcd


class Agents:
    """Starts agents, and ends those that are left."""

    def __init__(self, etcd: EtcdServer, folder: Path) -> None:
        self.registry = etcd.url
        self.namespace = uuid.uuid4().hex[:8]
        self.count_file = folder / "count"
        self.count_file.touch()
        self._folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self, *options: str) -> subprocess.Popen[bytes]:
        log = (self._folder / f"agent-{len(self._processes)}.log").open("wb")
        command = [sys.executable, "-m", "tests.processes.agent", "--registry", self.registry]
        command += ["--namespace", self.namespace, "--count-file", str(self.count_file), *options]
        with log:
            process = subprocess.Popen(command, stdout=log, stderr=log)
        self._processes.append(process)
        return process

    def log_of(self, process: subprocess.Popen[bytes]) -> str:
        return (self._folder / f"agent-{self._processes.index(process)}.log").read_text()

    def client(self, **arguments: object) -> ReachClient:
        config = ReachConfig(registry=RegistryConfig(lease_ttl_s=2.0))
        return ReachClient(registry=self.registry, namespace=self.namespace, config=config, **arguments)

    def executions(self) -> Counter[str]:
        return Counter(self.count_file.read_text().split())

    def end(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.kill()
            process.wait(10)


@pytest.fixture
def agents(etcd: EtcdServer, tmp_path: Path) -> Iterator[Agents]:
    started = Agents(etcd, tmp_path)
    yield started
    started.end()


async def until(check: Callable[[], bool], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not check():
        assert time.monotonic() < deadline, "it never became true"
        await asyncio.sleep(0.02)


async def test_an_agent_is_found_called_and_gone_after_sigterm(agents: Agents) -> None:
    process = agents.start("--id", "kb-1", "--linger", "0.2")
    async with agents.client() as reach:
        (info,) = await reach.wait_for("echo.say.v1", timeout=20)
        assert info.endpoint.url.startswith("http://127.0.0.1:")
        # Registered only once /invoke answers: so the very first call gets through.
        reply = await reach.call("echo.say.v1", {"text": "hello"})
        assert reply.data == {"text": "hello", "pid": process.pid}
        assert len(reply.attempts) == 1
        process.send_signal(signal.SIGTERM)
        await until(lambda: not reach.agents())
        await until(lambda: process.poll() is not None)
        assert process.returncode == 0, agents.log_of(process)
        with pytest.raises(AgentNotFound):
            await reach.call("echo.say.v1", {"text": "hello"})


async def test_a_client_knows_who_is_there_from_the_moment_it_is_open(agents: Agents) -> None:
    agents.start()
    async with agents.client() as reach:
        await reach.wait_for("echo.say.v1", timeout=20)
    async with agents.client() as reach:
        assert len(reach.agents("echo.say.v1")) == 1
        assert "1 of 1 instances usable" in str(reach.explain("echo.say.v1"))


class Load:
    """Calls at a steady rate in the background; keeps what came of each."""

    def __init__(self, reach: ReachClient, capability: str, rate: float) -> None:
        self._reach, self._capability, self._rate = reach, capability, rate
        self._calls: list[asyncio.Task[object]] = []
        self._running = True
        self._task = asyncio.ensure_future(self._run())

    async def _one(self, number: int) -> object:
        payload = {"wait_s": 0.05, "key" if "count" in self._capability else "text": f"n{number}"}
        try:
            return await self._reach.call(self._capability, payload)
        except ReachError as error:
            return error

    async def _run(self) -> None:
        while self._running:
            self._calls.append(asyncio.ensure_future(self._one(len(self._calls))))
            await asyncio.sleep(1 / self._rate)

    @property
    def count(self) -> int:
        return len(self._calls)

    async def stop(self) -> list[object]:
        self._running = False
        await self._task
        return await asyncio.gather(*self._calls)


async def test_a_rolling_restart_under_load_loses_nothing_and_runs_nothing_twice(agents: Agents) -> None:
    old = [agents.start() for _ in range(2)]
    async with agents.client() as reach:
        await until(lambda: len(reach.agents()) == 2)
        load = Load(reach, "echo.count.v1", rate=60)
        for process in old:
            new = len(reach.agents()) + 1
            agents.start()
            await until(lambda new=new: len(reach.agents()) == new)
            process.send_signal(signal.SIGTERM)
            await until(lambda process=process: process.poll() is not None)
            assert process.returncode == 0
        outcomes = await load.stop()
    assert [outcome for outcome in outcomes if isinstance(outcome, Exception)] == []
    assert agents.executions() == Counter({f"n{n}": 1 for n in range(len(outcomes))})


async def test_after_sigkill_only_what_was_in_flight_there_is_unknown_and_nothing_runs_twice(
    agents: Agents,
) -> None:
    victim = agents.start("--id", "victim")
    agents.start("--id", "other")
    async with agents.client() as reach:
        await until(lambda: len(reach.agents()) == 2)
        load = Load(reach, "echo.count.v1", rate=100)
        await until(lambda: load.count > 100)
        victim.kill()
        killed_at = load.count
        await until(lambda: load.count > 400)
        outcomes = await load.stop()
        await until(lambda: len(reach.agents()) == 1, timeout_s=4)
    failed = {n: outcome for n, outcome in enumerate(outcomes) if isinstance(outcome, Exception)}
    for number, error in failed.items():
        assert isinstance(error, OutcomeUnknown), error
        assert error.agent_id == "victim"
        # A process takes a moment to die, so a few calls that start after the signal still reach it.
        assert number <= killed_at + 30
    assert max(agents.executions().values()) == 1
    assert len(agents.executions()) >= len(outcomes) - len(failed)


async def test_idempotent_calls_survive_sigkill_without_a_single_error(agents: Agents) -> None:
    victim = agents.start()
    agents.start()
    async with agents.client() as reach:
        await until(lambda: len(reach.agents()) == 2)
        load = Load(reach, "echo.say.v1", rate=100)
        await until(lambda: load.count > 50)
        victim.kill()
        await until(lambda: load.count > 200)
        outcomes = await load.stop()
    assert [outcome for outcome in outcomes if isinstance(outcome, Exception)] == []


async def test_calls_go_on_while_etcd_is_away_and_newcomers_are_found_when_it_is_back(
    own_etcd: EtcdServer, tmp_path: Path
) -> None:
    agents = Agents(own_etcd, tmp_path)
    try:
        agents.start("--id", "first")
        async with agents.client() as reach:
            await until(lambda: len(reach.agents()) == 1)
            own_etcd.stop()
            load = Load(reach, "echo.say.v1", rate=20)
            await until(lambda: load.count > 80)  # four seconds, twice the lease
            own_etcd.start()
            agents.start("--id", "second")
            await until(lambda: len(reach.agents()) == 2)
            outcomes = await load.stop()
        assert [outcome for outcome in outcomes if isinstance(outcome, Exception)] == []
    finally:
        agents.end()


async def test_a_handler_that_ignores_its_cancellation_doesnt_keep_its_agent_alive(agents: Agents) -> None:
    process = agents.start("--linger", "0.2", "--drain", "1")
    async with agents.client() as reach:
        await until(lambda: len(reach.agents()) == 1)
        call = asyncio.ensure_future(reach.call("echo.deaf.v1", timeout=60))
        await until(lambda: reach._knowledge.index.instances[reach.agents()[0].agent_id].in_flight == 1)
        process.send_signal(signal.SIGTERM)
        with pytest.raises(OutcomeUnknown):
            await call
        await until(lambda: process.poll() is not None, timeout_s=8)
    assert "ignore their cancellation" in agents.log_of(process)


async def test_an_id_that_a_live_process_holds_is_refused_and_the_holder_stays(agents: Agents) -> None:
    holder = agents.start("--id", "kb-1")
    async with agents.client() as reach:
        await until(lambda: len(reach.agents()) == 1)
        second = agents.start("--id", "kb-1")
        await until(lambda: second.poll() is not None)
        assert second.returncode != 0
        assert "AgentIdInUse: agent id 'kb-1'" in agents.log_of(second)
        reply = await reach.call("echo.say.v1", {"text": "x"})
        assert reply.data["pid"] == holder.pid


async def test_a_successor_takes_over_the_id_of_a_killed_process_when_its_lease_ends(agents: Agents) -> None:
    first = agents.start("--id", "kb-1")
    async with agents.client() as reach:
        (known,) = await reach.wait_for("echo.say.v1", timeout=20)
        first.kill()
        second = agents.start("--id", "kb-1")
        await until(lambda: any(info.incarnation != known.incarnation for info in reach.agents()))
        assert (await reach.call("echo.say.v1", {"text": "x"})).data["pid"] == second.pid


async def test_a_taken_port_is_named(agents: Agents) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        address = f"127.0.0.1:{held.getsockname()[1]}"
        process = agents.start("--listen", address)
        await until(lambda: process.poll() is not None)
    assert process.returncode != 0
    assert f"ConfigError: listen={address} is taken" in agents.log_of(process)
    async with agents.client() as reach:
        assert reach.agents() == ()


async def test_sigterm_ends_an_agent_in_bounded_time_though_etcd_is_down(
    own_etcd: EtcdServer, tmp_path: Path
) -> None:
    agents = Agents(own_etcd, tmp_path)
    try:
        process = agents.start("--id", "kb-1", "--linger", "0.2")
        async with agents.client() as reach:
            await until(lambda: len(reach.agents()) == 1)
        own_etcd.kill()
        process.send_signal(signal.SIGTERM)
        await until(lambda: process.poll() is not None, timeout_s=8)
        assert process.returncode == 0, agents.log_of(process)
    finally:
        agents.end()


async def test_an_etcd_that_isnt_there_is_named_by_its_address() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{held.getsockname()[1]}"
    async with ReachClient(registry=f"etcd://{address}") as reach:
        with pytest.raises(RegistryUnavailable, match=address):
            await reach.call("echo.say.v1", {"text": "x"}, timeout=1.0)
        assert not reach.state.connected
        assert address in str(reach.state.registry_error)


def test_the_sync_client_calls_real_agents_from_threads(agents: Agents) -> None:
    agents.start()
    with SyncReachClient(registry=agents.registry, namespace=agents.namespace) as reach:
        reach.wait_for("echo.say.v1", timeout=20)
        assert reach.call("echo.say.v1", {"text": "x"}).data["text"] == "x"
        assert reach.state.connected
