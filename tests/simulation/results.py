"""What was run, and the file that keeps what came of it, so that a run that was broken off goes on.

Each line is one task with its data, and names the code that it came from: results of other code are passed over.
"""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.simulation.running import Job, Result

__all__ = ["ROOT", "SOURCES", "Results", "Task", "code_digest", "result_of"]

ROOT = Path(__file__).resolve().parents[2]
SOURCES = (
    "agent_reach/config",
    "agent_reach/routing",
    "agent_reach/testing/simulation",
    "tests/simulation/algorithms.py",
    "tests/simulation/baselines",
    "tests/simulation/running.py",
    "tests/simulation/scenarios.py",
)
"""What a result depends on, files and folders. The report itself isn't among them: it changes no result."""


@dataclass(frozen=True, slots=True)
class Task:
    """One run. `kind`: compare, ablation or timeline; `variant`: which settings, for an ablation."""

    kind: str
    scenario: str
    algorithm: str
    seed: int
    length_s: float | None = None
    variant: str = ""


class Results:
    """A file of JSON lines: those of this code are read, and each new one is added as it comes."""

    def __init__(self, path: Path, code: str) -> None:
        self._path = path
        self._code = code
        self._known: dict[Task, dict[str, Any]] = {}
        for line in path.read_text().splitlines() if path.exists() else ():
            try:
                entry = json.loads(line)
            except json.JSONDecodeError:
                # The run was ended while it wrote this line.
                continue
            if entry["code"] == code:
                self._known[Task(**entry["task"])] = entry["data"]

    def __contains__(self, task: Task) -> bool:
        return task in self._known

    def __getitem__(self, task: Task) -> dict[str, Any]:
        return self._known[task]

    def missing(self, tasks: Iterable[Task]) -> list[Task]:
        """Return those that weren't run yet, in their order."""
        return [task for task in tasks if task not in self._known]

    def add(self, task: Task, data: Mapping[str, Any]) -> None:
        """Keep what came of a task."""
        line = json.dumps({"code": self._code, "task": asdict(task), "data": data}, sort_keys=True)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a+b") as file:
            # After half a line this one would be lost with it.
            if file.tell() and not self._ends_whole():
                file.write(b"\n")
            file.write(line.encode() + b"\n")
        self._known[task] = dict(data)

    def _ends_whole(self) -> bool:
        with self._path.open("rb") as file:
            file.seek(-1, 2)
            return file.read(1) == b"\n"


def result_of(data: Mapping[str, Any]) -> Result:
    """Build a result from what the file holds of it."""
    return Result(**{**data, "job": Job(**data["job"])})


def code_digest(root: Path = ROOT, sources: Iterable[str] = SOURCES) -> str:
    """Return a digest of the sources as they run: comments, docstrings and layout don't count."""
    digest = hashlib.blake2b(digest_size=8)
    for source in sources:
        path = root / source
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            digest.update(f"\n{file.relative_to(root)}\n{_bare(file.read_text())}".encode())
    return digest.hexdigest()


def _bare(text: str) -> str:
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            node.body = [part for part in node.body if not _is_text(part)]
    return ast.dump(tree)


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
