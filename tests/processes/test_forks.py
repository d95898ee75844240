"""A forked process never touches what its parent opened, and opens what it needs itself."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agent_reach import ReachClient
from agent_reach.testing.etcd import EtcdServer
from tests.faults.support import entries
from tests.processes.forking import CONFIG, say
from tests.registry.support import eventually

pytestmark = [pytest.mark.etcd, pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")]

# A use of a client that stayed with the parent is refused without waiting for anything.
AT_ONCE_S = 2.0


class Forking:
    """One program that forks, in a session of its own, with what its processes reported."""

    def __init__(self, etcd: EtcdServer, folder: Path) -> None:
        self.etcd, self.namespace = etcd, uuid.uuid4().hex[:8]
        self._out, self._log = folder / "out", folder / "log"
        self._process: subprocess.Popen[str] | None = None
        self._ready = 0

    def start(self, scenario: str, **environment: str) -> None:
        command = [sys.executable, "-m", "tests.processes.forking", scenario, "--registry", self.etcd.url]
        command += ["--namespace", self.namespace, "--out", str(self._out)]
        env = {name: value for name, value in os.environ.items() if not name.startswith("GRPC_")}
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**env, **environment},
                start_new_session=True,
            )
        threading.Thread(target=self._listen, args=(self._process,), daemon=True).start()

    def _listen(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self._ready += line == "ready\n"

    async def ready(self, times: int) -> None:
        await self._until(lambda: self._ready >= times)

    def go_on(self) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    async def end(self) -> None:
        """Let it end, and see that it does without an error."""
        assert self._process is not None
        self.go_on()
        await self._until(lambda: self._process.poll() is not None)
        assert self._process.returncode == 0, self.log

    async def _until(self, check: Callable[[], object]) -> None:
        try:
            await eventually(check, 90)
        except AssertionError:
            raise AssertionError(self.log) from None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def log(self) -> str:
        return self._log.read_text()

    def reports(self, role: str) -> list[dict[str, Any]]:
        if not self._out.exists():
            return []
        found = [json.loads(line) for line in self._out.read_text().splitlines()]
        return [one for one in found if one["role"] == role]

    def kill(self) -> None:
        if self._process is not None:
            # Children that hang, too; the group is this program's own.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(10)
            for pipe in (self._process.stdin, self._process.stdout):
                assert pipe is not None
                pipe.close()


@pytest.fixture
def forking(etcd: EtcdServer, tmp_path: Path) -> Iterator[Forking]:
    program = Forking(etcd, tmp_path)
    yield program
    program.kill()


async def parent_after(forking: Forking, scenario: str, **environment: str) -> dict[str, Any]:
    """Run a scenario, see that the parent's entry, watch and serving went on as if nothing had been, and return
    its report.
    """
    forking.start(scenario, **environment)
    await forking.ready(1)
    await eventually(lambda: "parent" in entries(forking.etcd, forking.namespace))
    before = entries(forking.etcd, forking.namespace)["parent"]
    forking.go_on()
    await forking.ready(2)
    newcomer = ReachClient(
        "newcomer",
        handlers=[say],
        listen="127.0.0.1:0",
        registry=forking.etcd.url,
        namespace=forking.namespace,
        config=CONFIG,
    )
    async with newcomer:
        await eventually(lambda: newcomer.state.registered)
        reply = await newcomer.call("echo.say.v1", {"text": "x"}, agent_id="parent")
        assert reply.data["pid"] == forking.pid
        forking.go_on()
        await forking.ready(3)
        # Written once, under the same lease: nobody revoked it, and nobody wrote anew.
        assert entries(forking.etcd, forking.namespace)["parent"] == before
    await forking.end()
    assert "parent" not in entries(forking.etcd, forking.namespace)
    (parent,) = forking.reports("parent")
    assert parent["failed"] == []
    assert parent["sees_newcomer"], "the parent's watch told nothing any more"
    assert parent["registered"]
    assert parent["events"] == ["RegistryChanged connected", "RegistrationChanged registered"]
    return parent


@pytest.mark.parametrize("way", ["_exit", "sys.exit", "collect"])
async def test_however_a_child_leaves_its_parents_lease_watch_and_calls_go_on(forking: Forking, way: str) -> None:
    parent = await parent_after(forking, f"leave:{way}")
    assert parent["codes"] == [0, 0, 0], forking.log


async def test_in_a_child_every_method_of_its_parents_client_is_refused_at_once(forking: Forking) -> None:
    parent = await parent_after(forking, "methods")
    assert parent["codes"] == [0] * 8, forking.log
    children = forking.reports("child")
    assert len(children) == 8
    for child in children:
        names = {name: outcome for name, (outcome, _) in child["found"].items()}
        assert names.pop("close") == "ok"
        assert set(names.values()) == {"ClientNotOpen"}, names
        assert max(took_s for _, took_s in child["found"].values()) < AT_ONCE_S


async def test_children_register_and_call_with_clients_of_their_own(forking: Forking) -> None:
    parent = await parent_after(forking, "own")
    assert parent["codes"] == [0] * 6, forking.log
    children = forking.reports("child")
    assert {child["own"] for child in children} == {child["pid"] for child in children}
    assert {child["parent"] for child in children} == {forking.pid}
    assert len({child["agent_id"] for child in children}) == 6


@pytest.mark.parametrize("method", ["fork", "spawn"])
async def test_children_of_multiprocessing_register_and_call(forking: Forking, method: str) -> None:
    parent = await parent_after(forking, f"multi:{method}")
    assert parent["codes"] == [0, 0], forking.log
    assert {child["parent"] for child in forking.reports("child")} == {forking.pid}


async def test_where_grpc_would_hang_after_a_fork_the_child_is_told_what_to_do(forking: Forking) -> None:
    parent = await parent_after(forking, "unsupported", GRPC_ENABLE_FORK_SUPPORT="0")
    assert parent["codes"] == [0], forking.log
    (child,) = forking.reports("child")
    assert child["error"] == "ConfigError"
    assert "GRPC_ENABLE_FORK_SUPPORT" in child["text"]
    assert "spawn" in child["text"]
    assert child["took_s"] < AT_ONCE_S


async def test_a_child_that_outlives_its_parent_keeps_neither_its_entry_nor_its_port(forking: Forking) -> None:
    forking.start("outlive")
    await eventually(lambda: forking.reports("parent") and forking.reports("child"))
    host, _, port = forking.reports("parent")[0]["url"].removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=5):
        os.kill(forking.pid, signal.SIGKILL)

    def refused() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex((host, int(port))) != 0

    await eventually(refused, 10)
    await eventually(lambda: entries(forking.etcd, forking.namespace) == {}, 20)
    # The child is still there: it is what would have kept them.
    os.kill(forking.reports("child")[0]["pid"], 0)


async def test_a_sync_client_is_refused_in_children_and_goes_on_in_the_parent(forking: Forking) -> None:
    forking.start("sync")
    await forking.ready(1)
    await eventually(lambda: "parent" in entries(forking.etcd, forking.namespace))
    before = entries(forking.etcd, forking.namespace)["parent"]
    forking.go_on()
    await forking.ready(2)
    assert entries(forking.etcd, forking.namespace)["parent"] == before
    await forking.end()
    (parent,) = forking.reports("parent")
    assert parent["codes"] == [0] * 6, forking.log
    assert parent["registered"]
    for child in forking.reports("child"):
        names = {name: outcome for name, (outcome, _) in child["found"].items()}
        assert names.pop("close") == "ok"
        assert set(names.values()) == {"ClientNotOpen"}, names
        assert max(took_s for _, took_s in child["found"].values()) < AT_ONCE_S
        assert child["parent"] == forking.pid


async def test_a_client_made_before_the_fork_becomes_an_agent_of_its_own_in_each_worker(forking: Forking) -> None:
    forking.start("prepared")
    await eventually(lambda: len(forking.reports("child")) == 2)
    children = forking.reports("child")
    await eventually(lambda: len(entries(forking.etcd, forking.namespace)) == 2)
    there = entries(forking.etcd, forking.namespace)
    assert {child["agent_id"] for child in children} == set(there)
    assert len({entry.incarnation for entry in there.values()}) == 2
    await forking.end()
    (parent,) = forking.reports("parent")
    assert parent["codes"] == [0, 0], forking.log
    # The parent keeps the id that it showed; nobody else has it, so it may open its client too.
    assert parent["made"] == parent["agent_id"]
    assert parent["made"] not in there
    assert children[0]["random"] != children[1]["random"]
    assert entries(forking.etcd, forking.namespace) == {}


async def test_of_two_workers_that_share_a_chosen_id_one_is_told_that_it_is_taken(forking: Forking) -> None:
    forking.start("prepared:shared")
    await eventually(lambda: len(forking.reports("child")) == 2)
    found = sorted((child["registration"], child["error"]) for child in forking.reports("child"))
    assert found == [("refused", "AgentIdInUse"), ("registered", "NoneType")]
    await forking.end()
