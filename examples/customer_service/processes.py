"""The processes of the demo: etcd and the agents. None of them outlives it.

Each holds one end of a pipe to the demo as its stdin and ends when that closes, so it ends even if the demo is
killed outright. Each is in a session of its own, so that Ctrl-C in the terminal reaches the demo alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["NAMESPACE", "AgentProcess", "DemoFailed", "Etcd", "Fleet", "until"]

_ROOT = Path(__file__).parents[2]
NAMESPACE = "customer-service"


class DemoFailed(Exception):
    """The demo can't go on; the message says why."""


async def until(condition: Callable[[], bool], timeout_s: float) -> bool:
    """Wait for a condition; False if it isn't there after `timeout_s` seconds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(0.02)
    return True


def _start(module: str, *arguments: str, stdout: int, stderr: int) -> subprocess.Popen[bytes]:
    # The demo says itself who is who; what the user's shell says of agents would give them all one id.
    environment = {key: value for key, value in os.environ.items() if not key.startswith("AGENT_REACH_")}
    return subprocess.Popen(
        [sys.executable, "-m", f"examples.customer_service.{module}", *arguments],
        cwd=_ROOT,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=stdout,
        stderr=stderr,
        start_new_session=True,
    )


def _end(processes: Sequence[subprocess.Popen[bytes]], timeout_s: float) -> None:
    """Close their pipes, wait, and kill those that are still there after `timeout_s` seconds."""
    for process in processes:
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
    deadline = time.monotonic() + timeout_s
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class Etcd:
    """The demo's etcd, by way of its keeper. `url` and `folder` are known after `open`."""

    def __init__(self) -> None:
        self.url = ""
        self.folder = Path()
        self._keeper: subprocess.Popen[bytes] | None = None
        self._heard = b""

    async def open(self) -> None:
        """Start the keeper and etcd. Raises DemoFailed if there is no etcd for this platform."""
        self._keeper = _start("etcd_keeper", stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        self.url, folder = await self._answer("begin")
        self.folder = Path(folder)
        await self.start()

    async def start(self) -> None:
        """Start etcd, always on the same data and port."""
        await self._tell("start")

    async def stop(self) -> None:
        """Stop etcd."""
        await self._tell("stop")

    def close(self) -> None:
        """Stop etcd and remove the folder."""
        if self._keeper is not None:
            # More than the keeper takes to stop an etcd that doesn't want to.
            _end([self._keeper], 15.0)

    async def _tell(self, command: str) -> None:
        assert self._keeper is not None
        assert self._keeper.stdin is not None
        try:
            self._keeper.stdin.write(f"{command}\n".encode())
            self._keeper.stdin.flush()
        except OSError:
            raise DemoFailed(f"etcd didn't {command}: its keeper is gone") from None
        await self._answer(command)

    async def _answer(self, wanted: str) -> list[str]:
        if not await until(self._hear, 30.0):
            raise DemoFailed(f"etcd didn't {wanted} within 30 s")
        line, _, self._heard = self._heard.partition(b"\n")
        head, *rest = line.decode().split("\t")
        if head not in ("ready", "done"):
            raise DemoFailed(f"etcd didn't {wanted}: {' '.join(rest) or 'its keeper ended without a word'}")
        return rest

    def _hear(self) -> bool:
        """Read what is there; True once there is a whole line, or will never be one."""
        assert self._keeper is not None
        assert self._keeper.stdout is not None
        os.set_blocking(self._keeper.stdout.fileno(), False)
        try:
            chunk = os.read(self._keeper.stdout.fileno(), 4096)
        except BlockingIOError:
            return False
        self._heard += chunk
        return not chunk or b"\n" in self._heard


@dataclass(frozen=True, slots=True, eq=False)
class AgentProcess:
    """One agent in its own process; its output is in `log`."""

    agent_id: str
    log: Path
    process: subprocess.Popen[bytes]

    @property
    def running(self) -> bool:
        """True while the process lives."""
        return self.process.poll() is None

    def tail(self, lines: int = 15) -> str:
        """The last lines that it wrote."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])


class Fleet:
    """The agents' processes. Use it as a context manager: nothing of it is left afterwards."""

    def __init__(self, folder: Path, registry: str) -> None:
        self._folder = folder
        self._registry = registry
        self._agents: list[AgentProcess] = []

    def start(self, name: str, agent_id: str) -> AgentProcess:
        """Start an agent on a free port; it registers when it can answer."""
        path = self._folder / f"{agent_id}-{len(self._agents)}.log"
        with path.open("wb") as log:
            arguments = [name, "--id", agent_id, "--registry", self._registry, "--namespace", NAMESPACE]
            process = _start(
                "agents", *arguments, "--until-stdin-closes", stdout=log.fileno(), stderr=subprocess.STDOUT
            )
        agent = AgentProcess(agent_id, path, process)
        self._agents.append(agent)
        return agent

    def kill(self, agent: AgentProcess) -> None:
        """End it by SIGKILL, as a crash would."""
        agent.process.kill()

    async def stop(self, agent: AgentProcess, timeout_s: float = 20.0) -> float:
        """End it by SIGTERM and return how many seconds that took. Raises DemoFailed after `timeout_s`."""
        began = time.monotonic()
        agent.process.send_signal(signal.SIGTERM)
        if not await until(lambda: not agent.running, timeout_s):
            raise DemoFailed(
                f"{agent.agent_id} ignores SIGTERM for {timeout_s:g} s. Its last words:\n{agent.tail()}"
            )
        return time.monotonic() - began

    def close(self) -> None:
        """End all that still run."""
        _end([agent.process for agent in self._agents], 3.0)
