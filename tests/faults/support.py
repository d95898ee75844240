"""What the tests of faults share: small times, agents in processes, load, and what etcd really holds."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from agent_reach import ReachClient, ReachConfig, ReachError, RegistryConfig, ServingConfig
from agent_reach.model import AgentInfo
from agent_reach.ports import SystemClock
from agent_reach.registry.keys import prefix_of
from agent_reach.registry.urls import open_registry
from agent_reach.testing.etcd import EtcdServer
from tests.faults.agent import say
from tests.registry.support import Announced, Watched, info

# The smallest lease that is allowed, and the rest in proportion.
QUICK = RegistryConfig(lease_ttl_s=2.0, refresh_s=2.0, refresh_jitter_s=0.5, request_timeout_s=1.0)
# A lease that outlives an election and a request to a frozen member.
STEADY = RegistryConfig(lease_ttl_s=5.0, refresh_s=2.0, refresh_jitter_s=0.5, request_timeout_s=1.0)

ROOT = Path(__file__).parents[2]


async def until(check: Callable[[], object], within_s: float = 20.0, what: object = "it never came true") -> None:
    """Wait in real time until the condition holds; `what` is told if it doesn't, called if it can be."""
    deadline = time.monotonic() + within_s
    while not check():
        assert time.monotonic() < deadline, what() if callable(what) else what
        await asyncio.sleep(0.02)


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """One key as etcd holds it."""

    incarnation: str
    lease: int
    revision: int


def entries(server: EtcdServer, namespace: str) -> dict[str, Entry]:
    """What etcd holds, by agent id; asked without any code of the library's registry."""
    prefix = prefix_of(namespace)
    end = prefix[:-1] + bytes([prefix[-1] + 1])
    asked = {"key": base64.b64encode(prefix).decode(), "range_end": base64.b64encode(end).decode()}
    found = {}
    for pair in server.post("/v3/kv/range", asked).get("kvs", ()):
        record = AgentInfo.from_bytes(base64.b64decode(pair["value"]))
        found[record.agent_id] = Entry(record.incarnation, int(pair.get("lease", 0)), int(pair["mod_revision"]))
    return found


def incarnations(server: EtcdServer, namespace: str) -> dict[str, str]:
    """Who etcd says is there."""
    return {agent_id: entry.incarnation for agent_id, entry in entries(server, namespace).items()}


def known(reach: ReachClient) -> dict[str, str]:
    """Who a client believes is there."""
    return {agent.agent_id: agent.incarnation for agent in reach.agents()}


def client(
    registry: str,
    namespace: str,
    agent_id: str | None = None,
    *,
    config: RegistryConfig = QUICK,
    serves: bool = False,
) -> ReachClient:
    """A client on this loop; with `serves` it is an agent too."""
    return ReachClient(
        agent_id,
        registry=registry,
        namespace=namespace,
        handlers=[say] if serves else [],
        listen="127.0.0.1:0" if serves else None,
        config=ReachConfig(registry=config, serving=ServingConfig(linger_s=0.0, drain_s=2.0)),
    )


async def opened(
    stack: AsyncExitStack, registry: str, namespace: str, ids: Sequence[str], **options: object
) -> list:
    """Agents of these ids on this loop, opened."""
    made = [client(registry, namespace, agent_id, serves=True, **options) for agent_id in ids]
    return [await stack.enter_async_context(one) for one in made]


class Load:
    """Idempotent calls at a steady rate, for as long as the context is open."""

    def __init__(self, reach: ReachClient, rate: float = 20.0) -> None:
        self.failed: list[tuple[int, ReachError]] = []
        self.pids: list[object] = []
        self._reach, self._rate = reach, rate
        self._calls: list[asyncio.Task[None]] = []
        self._running = True

    async def __aenter__(self) -> Load:
        self._task = asyncio.ensure_future(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def stop(self) -> None:
        """Begin no more calls, and wait for those that run."""
        self._running = False
        await self._task
        await asyncio.gather(*self._calls)

    async def lasts(self, seconds: float) -> None:
        """Return once calls were begun for so long; that they are is what a test may wait for."""
        wanted = len(self._calls) + seconds * self._rate
        await until(lambda: len(self._calls) >= wanted, 3 * seconds + 10)

    async def _run(self) -> None:
        while self._running:
            self._calls.append(asyncio.ensure_future(self._one(len(self._calls))))
            await asyncio.sleep(1 / self._rate)

    async def _one(self, number: int) -> None:
        try:
            reply = await self._reach.call("echo.say.v1", {"text": str(number)})
            self.pids.append(reply.data["pid"])
        except ReachError as error:
            self.failed.append((number, error))


class Child:
    """An agent in a process of its own."""

    def __init__(self, process: subprocess.Popen[bytes], log_path: Path) -> None:
        self.process, self._log_path = process, log_path

    @property
    def log(self) -> str:
        """All that it said."""
        return self._log_path.read_text()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.process.pid

    def cpu_s(self) -> float:
        """Processor time so far, in seconds."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self.process.wait(10)

    def terminate(self) -> None:
        """SIGTERM."""
        self.process.terminate()

    def pause(self) -> None:
        """SIGSTOP."""
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        self.process.send_signal(signal.SIGCONT)


class Crew:
    """Starts agents in processes, and ends those that are left."""

    def __init__(self, namespace: str, folder: Path) -> None:
        self._namespace, self._folder = namespace, folder
        self._children: list[Child] = []

    def start(
        self,
        agent_id: str,
        registry: str,
        *,
        config: RegistryConfig = QUICK,
        listen: str = "127.0.0.1:0",
        launcher: Sequence[str] = (),
    ) -> Child:
        """Start one; it is ready when its entry is there."""
        default = RegistryConfig()
        fields = [field.name for field in dataclasses.fields(config)]
        settings = {
            name: getattr(config, name) for name in fields if getattr(config, name) != getattr(default, name)
        }
        command = [*launcher, sys.executable, "-m", "tests.faults.agent", "--registry", registry, "--id", agent_id]
        command += ["--namespace", self._namespace, "--listen", listen, "--config", json.dumps(settings)]
        path = self._folder / f"{agent_id}-{len(self._children)}.log"
        with path.open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, cwd=ROOT)
        self._children.append(Child(process, path))
        return self._children[-1]

    def end(self) -> None:
        """Kill all that are left."""
        for child in self._children:
            child.kill()


class Duo:
    """An announcer and a watcher as one client has them, each on a registry of its own."""

    def __init__(
        self,
        registry: str,
        namespace: str,
        agent_id: str = "a",
        *,
        incarnation: str = "i1",
        config: RegistryConfig = QUICK,
    ) -> None:
        self._ours, self._theirs = open_registry(registry, config), open_registry(registry, config)
        record = info(agent_id, incarnation=incarnation, namespace=namespace)
        self.announced = Announced(self._ours, SystemClock(), record, config)
        self.watched = Watched(self._theirs, SystemClock(), config, namespace=namespace)

    async def __aenter__(self) -> Duo:
        self.announced.announcer.start()
        self.watched.watcher.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.announced.announcer.withdraw(5)
        await self.watched.watcher.stop(5)
        self._ours.close()
        self._theirs.close()

    @property
    def knows(self) -> dict[str, str]:
        """Who the watcher's index says is there."""
        return {agent_id: one.info.incarnation for agent_id, one in self.watched.index.instances.items()}

    @property
    def healthy(self) -> bool:
        """Registered, and watching."""
        return (
            self.announced.status == "registered"
            and self.watched.status == "fresh"
            and self.watched.watcher.view.connected
        )

    def __str__(self) -> str:
        view = self.watched.watcher.view
        return (
            f"{self.announced.status} ({self.announced.said}), {view.status}, connected={view.connected}, "
            f"knows {self.knows}, error={view.error}"
        )
