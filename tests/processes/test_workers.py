"""Agents in the workers of gunicorn (pre-loaded) and uvicorn, started for real.

With a listening address of its own each worker is an agent like any other. Mounted, both workers of a server share
one address, and the kernel gives each connection to either: who is meant and who answers may differ, which the
answer 421 says; such a call runs nothing and is repeated.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from agent_reach import NoHealthyAgent, ReachClient, ReachConfig, RegistryConfig, Reply
from agent_reach.testing.etcd import EtcdServer, _free_ports
from tests.faults.support import entries
from tests.registry.support import eventually

pytestmark = pytest.mark.etcd

APP = "tests.processes.worker_app:app"
SERVERS = {
    "gunicorn": ["gunicorn", "--preload", "-k", "uvicorn_worker.UvicornWorker", "-w", "2", "-b"],
    "uvicorn": ["uvicorn", "--workers", "2", "--host", "127.0.0.1", "--port"],
}


class Workers:
    """One server with two workers."""

    def __init__(self, kind: str, etcd: EtcdServer, folder: Path) -> None:
        self._kind, self.etcd, self._log = kind, etcd, folder / "log"
        self.namespace = uuid.uuid4().hex[:8]
        (self.port,) = _free_ports(1)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, **settings: str) -> None:
        """Start it; `settings` are AGENT_REACH_*, in small letters."""
        at = f"127.0.0.1:{self.port}" if self._kind == "gunicorn" else str(self.port)
        env = {name: value for name, value in os.environ.items() if not name.startswith(("AGENT_REACH_", "GRPC_"))}
        env |= {"AGENT_REACH_REGISTRY": self.etcd.url, "AGENT_REACH_NAMESPACE": self.namespace}
        env |= {f"AGENT_REACH_{name.upper()}": value for name, value in settings.items()}
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", *SERVERS[self._kind], at, APP],
                stdout=log,
                stderr=log,
                env=env,
                start_new_session=True,
            )

    def start_mounted(self, **settings: str) -> None:
        self.start(advertise=f"http://127.0.0.1:{self.port}/agents", **settings)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def log(self) -> str:
        return self._log.read_text()

    @property
    def ids(self) -> set[str]:
        return set(entries(self.etcd, self.namespace))

    def who(self) -> dict[str, Any]:
        """What one of the workers says of itself; which one is the kernel's choice."""
        with httpx.Client(trust_env=False) as http:
            found: dict[str, Any] = http.get(f"http://127.0.0.1:{self.port}/who").json()
        return found

    async def both(self, settled: str = "registered") -> dict[int, dict[str, Any]]:
        """What each worker says, once both have settled."""
        found: dict[int, dict[str, Any]] = {}

        def asked() -> bool:
            try:
                one = self.who()
            except httpx.TransportError:
                return False
            if one["registration"] in settled:
                found[one["pid"]] = one
            return len(found) == 2

        try:
            await eventually(asked)
        except AssertionError:
            raise AssertionError(f"{found}\n{self.log}") from None
        return found

    def client(self) -> ReachClient:
        config = ReachConfig(registry=RegistryConfig(lease_ttl_s=2.0))
        return ReachClient(registry=self.etcd.url, namespace=self.namespace, config=config)

    async def end(self) -> None:
        """SIGTERM ends it in bounded time, without an error, and takes the entries along."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        started = time.monotonic()
        await eventually(lambda: self._process.poll() is not None, 20)
        assert time.monotonic() - started < 15
        assert self._process.returncode == 0, self.log
        assert self.ids == set()
        assert "Traceback" not in self.log

    def kill(self) -> None:
        if self._process is not None and self._process.poll() is None:
            # The group is this server's own, workers included.
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(10)


@pytest.fixture(params=list(SERVERS))
def workers(request: pytest.FixtureRequest, etcd: EtcdServer, tmp_path: Path) -> Iterator[Workers]:
    started = Workers(request.param, etcd, tmp_path)
    yield started
    started.kill()


async def test_workers_with_ports_of_their_own_are_called_each_by_its_id(workers: Workers) -> None:
    workers.start(listen="127.0.0.1:0")
    both = await workers.both()
    agents = {one["agent_id"]: pid for pid, one in both.items()}
    assert workers.ids == set(agents)
    assert len(agents) == 2
    if workers._kind == "gunicorn":
        # Else this would say nothing of clients that are made before the fork.
        assert {one["made_in"] for one in both.values()} == {workers.pid}
    async with workers.client() as reach:
        await eventually(lambda: len(reach.agents()) == 2)
        for agent_id, pid in agents.items():
            for _ in range(10):
                reply = await reach.call("echo.say.v1", {"text": "x"}, agent_id=agent_id)
                assert (reply.data["pid"], len(reply.attempts)) == (pid, 1)
    await workers.end()


async def test_a_killed_worker_goes_and_its_replacement_comes_while_the_other_stays(workers: Workers) -> None:
    workers.start(listen="127.0.0.1:0")
    both = await workers.both()
    (victim, lost), (_, kept) = both.items()
    before = entries(workers.etcd, workers.namespace)[kept["agent_id"]]
    os.kill(victim, signal.SIGKILL)
    # uvicorn looks after its workers every 5 s.
    await eventually(lambda: lost["agent_id"] not in workers.ids and len(workers.ids) == 2)
    assert entries(workers.etcd, workers.namespace)[kept["agent_id"]] == before
    await workers.both()
    await workers.end()


async def answer(reach: ReachClient, agent_id: str | None) -> Reply[Any] | NoHealthyAgent:
    try:
        return await reach.call("echo.say.v1", {"text": "x"}, agent_id=agent_id, timeout=5.0)
    except NoHealthyAgent as error:
        return error


async def test_mounted_workers_share_an_address_and_nothing_hangs(workers: Workers) -> None:
    workers.start_mounted()
    both = await workers.both()
    assert workers.ids == {one["agent_id"] for one in both.values()}
    assert len(workers.ids) == 2
    outcomes: Counter[str] = Counter()
    async with workers.client() as reach:
        await eventually(lambda: len(reach.agents()) == 2)
        for agent_id in [None] * 40 + list(workers.ids) * 3:
            started = time.monotonic()
            reply = await answer(reach, agent_id)
            if isinstance(reply, NoHealthyAgent):
                # Nothing ran, and the message says why: this connection leads to the other worker.
                assert "421" in str(reply.attempts[-1])
                assert not any(attempt.executed for attempt in reply.attempts)
                outcomes["refused" if agent_id is None else "pinned, refused"] += 1
            else:
                assert both[reply.data["pid"]]["agent_id"] == reply.agent_id
                outcomes["answered"] += 1
            assert time.monotonic() - started < 6
    # Whoever doesn't care which worker it is gets an answer, nearly always.
    assert outcomes["refused"] <= 4, outcomes
    assert outcomes["answered"] >= 36, outcomes
    await workers.end()


async def test_workers_that_share_a_chosen_id_are_one_entry_and_the_second_says_so(workers: Workers) -> None:
    workers.start_mounted(agent_id="shared")
    both = await workers.both(settled="registered refused")
    found = sorted((one["registration"], one["error"]) for one in both.values())
    assert found == [("refused", "AgentIdInUse"), ("registered", "NoneType")]
    (refused,) = [one for one in both.values() if one["registration"] == "refused"]
    assert "leave it out for one that never collides" in refused["detail"]
    assert "registration refused" in workers.log
    assert workers.ids == {"shared"}
    await workers.end()
