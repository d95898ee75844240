"""What the benchmark of the registry shares: records, a filled etcd, client processes, tables."""

from __future__ import annotations

import base64
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from agent_reach.config import RegistryConfig
from agent_reach.model import AgentInfo, CapabilityInfo, Endpoint
from agent_reach.registry.etcd import EtcdRegistry
from agent_reach.registry.keys import key_of
from agent_reach.testing.etcd import EtcdServer

ROOT = Path(__file__).parents[2]

# Instances are of so many kinds, each with capabilities of its own.
_KINDS = 50
# What etcd takes in one transaction.
_OPERATIONS = 128
# Longer than any run.
LEASE_S = 3600.0


def record(namespace: str, number: int, incarnation: str = "7f3a9c1e55d04b62") -> AgentInfo:
    """The record of one instance, of about 1 KB: three capabilities with descriptions, and some metadata."""
    kind = number % _KINDS
    tasks = {
        "answer": "Answers a question from the department's documents, with sources.",
        "summarise": "Sums up a document in a few sentences.",
        "escalate": "Hands a case over to a person, with what was tried so far.",
    }
    return AgentInfo(
        agent_id=f"department-{kind}-agent-{number}",
        incarnation=incarnation,
        name=f"Department {kind}",
        namespace=namespace,
        version="2.14.3",
        owner=f"team-{kind}@example.com",
        endpoint=Endpoint(url=f"http://10.{number // 62_500}.{number // 250 % 250}.{number % 250 + 1}:9000"),
        zone=f"eu-central/{'abc'[number % 3]}",
        max_concurrency=32,
        registered_at=1_760_000_000.0 + number,
        metadata={"image": f"registry.example.com/department-{kind}:2.14.3", "commit": "9f1c2d7be04a"},
        capabilities=tuple(
            CapabilityInfo(
                name=f"department{kind}.{task}.v1", version="1.4.0", description=text, schema_hash=f"{kind:016x}"
            )
            for task, text in tasks.items()
        ),
    )


def open_etcd(port: int, seed: int = 0, timeout_s: float = 3.0) -> EtcdRegistry:
    """A registry as a client has it, at an etcd of this machine."""
    config = RegistryConfig(request_timeout_s=timeout_s)
    return EtcdRegistry([f"127.0.0.1:{port}"], config=config, rng=random.Random(seed))


def fill(etcd: EtcdServer, namespace: str, count: int) -> dict[str, int]:
    """Write `count` records and return the lease of each. A lease has a hundred of them, which saves minutes."""

    def text(data: bytes) -> str:
        return base64.b64encode(data).decode()

    registry = open_etcd(etcd.port)
    leases: dict[str, int] = {}
    for start in range(0, count, _OPERATIONS):
        lease = registry.grant(LEASE_S)
        infos = [record(namespace, number) for number in range(start, min(count, start + _OPERATIONS))]
        puts = [
            {"key": text(key_of(namespace, i.agent_id)), "value": text(i.to_bytes()), "lease": str(lease)}
            for i in infos
        ]
        etcd.post("/v3/kv/txn", {"success": [{"request_put": put} for put in puts]})
        leases |= {i.agent_id: lease for i in infos}
    registry.close()
    return leases


# --- processes of clients --------------------------------------------------------------------------------


class Child:
    """A process of `registry_clients.py`: takes one command a line, and answers each."""

    def __init__(self, log: IO[bytes]) -> None:
        self._log = log
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.benchmarks.registry_clients"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            cwd=ROOT,
            text=True,
        )

    def send(self, do: str, **arguments: Any) -> None:
        """Send one command."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """The answer to the first command that wasn't answered yet."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a process of clients ended: {Path(self._log.name).read_text()[-2000:]}")
        told: dict[str, Any] = json.loads(line)
        return told

    def end(self) -> None:
        """End it; the leases and watches of its clients end with their connections."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


class Children:
    """Several of them, asked at once."""

    def __init__(self, children: Sequence[Child]) -> None:
        self._children = children

    def ask(self, do: str, **arguments: Any) -> list[dict[str, Any]]:
        """Ask all of them the same."""
        for child in self._children:
            child.send(do, **arguments)
        return [child.answer() for child in self._children]

    def one(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Ask the first of them."""
        self._children[0].send(do, **arguments)
        return self._children[0].answer()

    def share(self, do: str, count: int, **arguments: Any) -> list[dict[str, Any]]:
        """Ask all of them, each for its share of `count` clients."""
        for number, child in enumerate(self._children):
            share = count // len(self._children) + (number < count % len(self._children))
            child.send(do, count=share, seed=number * 10_000, **arguments)
        return [child.answer() for child in self._children]

    def total(self, do: str = "stand", **arguments: Any) -> dict[str, float]:
        """Ask all of them, and add up what they say."""
        answers = self.ask(do, **arguments)
        return {name: sum(answer[name] for answer in answers) for name in answers[0]}


@contextmanager
def children(folder: Path, count: int) -> Iterator[Children]:
    """So many processes of clients, and their end."""
    with ExitStack() as stack:
        started = []
        for _ in range(count):
            log = stack.enter_context((folder / f"clients-{os.urandom(4).hex()}.log").open("wb"))
            child = Child(log)
            stack.callback(child.end)
            started.append(child)
        yield Children(started)


# --- what is told -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Table:
    """One part's figures: a line for each row, and what to know when reading them."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()

    def __str__(self) -> str:
        lines = [self.header, *self.rows]
        widths = [max(len(line[column]) for line in lines) for column in range(len(self.header))]
        text = [self.title]
        for line in lines:
            first, *others = (f"{cell:>{width}}" for cell, width in zip(line, widths, strict=True))
            text.append("  ".join((f"{line[0]:<{widths[0]}}" if first else first, *others)).rstrip())
        return "\n".join((*text, *(f"  {note}" for note in self.notes)))


def quantile(values: Iterable[float], share: float) -> float:
    """The value that `share` of all don't exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def size(count: float) -> str:
    """Bytes, readable."""
    for unit, scale in (("MB", 1e6), ("KB", 1e3)):
        if count >= scale:
            return f"{count / scale:,.1f} {unit}"
    return f"{count:,.0f} B"
