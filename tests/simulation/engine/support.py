"""Small worlds for the tests of the simulator, and an algorithm that decides nothing."""

from __future__ import annotations

import random
from typing import Any

from agent_reach.errors import ReachError
from agent_reach.routing.index import Change
from agent_reach.routing.instance import Candidate
from agent_reach.routing.outcomes import Outcome, Succeeded
from agent_reach.routing.router import Router
from agent_reach.routing.steps import Raise, Return, Send, Step
from agent_reach.testing.simulation import (
    AgentReach,
    Algorithm,
    Call,
    CallRequest,
    Client,
    Constant,
    Metrics,
    Server,
    Simulation,
)

CAPABILITY = "kb.retrieve.v1"


def agent_reach(rng: random.Random, zone: str | None) -> Algorithm:
    return AgentReach(rng, zone=zone)


class OneShot:
    """Sends each call once, to the instance at `index` in the list, and notes when and how it ended."""

    def __init__(
        self, rng: random.Random, zone: str | None = None, *, timeout_s: float = 2.0, index: int = 0
    ) -> None:
        self.router = Router(rng=rng)
        self.timeout_s = timeout_s
        self.index = index
        self.retry_allowance = 2
        self.ended: list[tuple[float, Outcome]] = []
        self.news: list[tuple[float, Change]] = []

    def apply(self, change: Change, now: float) -> None:
        self.news.append((now, change))
        self.router.index.apply(change, now)

    def open(self, request: CallRequest) -> OneShotSession | None:
        found = self.router.lookup(request.capability).candidates
        return OneShotSession(self, found[self.index]) if found else None

    @property
    def outcomes(self) -> list[Outcome]:
        return [outcome for _, outcome in self.ended]


class OneShotSession:
    def __init__(self, owner: OneShot, candidate: Candidate) -> None:
        self.owner = owner
        self.send = Send(candidate, 1, owner.timeout_s, owner.retry_allowance)
        self.outcome: Outcome | None = None

    def next(self, now: float) -> Step:
        match self.outcome:
            case None:
                return self.send
            case Succeeded(reply):
                return Return(reply, ())
            case _:
                return Raise(ReachError("it failed"))

    def record(self, outcome: Outcome, now: float, send: Send | None = None) -> None:
        assert send is self.send
        self.outcome = outcome
        self.owner.ended.append((now, outcome))


class Small:
    """One server (a tenth of a second of work, two slots) and one client that calls it when told to."""

    def __init__(
        self, algorithm: Any = None, *, count: int = 1, seed: int = 1, nested: Any = agent_reach, **fleet: Any
    ) -> None:
        self.sim = Simulation(seed, nested=nested)
        wanted: dict[str, Any] = {"service": Constant(0.1), "slots": 2, "name": "kb"} | fleet
        self.servers: list[Server] = self.sim.fleet(CAPABILITY, count, **wanted)
        self.server = self.servers[0]
        self.algorithm = algorithm or OneShot(random.Random(seed))
        (self.client,) = self.sim.clients(1, lambda rng, zone: self.algorithm)
        self.calls: list[Call] = []
        self.errors: list[str | None] = []

    def call(self, at_s: float, **request: Any) -> None:
        """Call at `at_s`; how it ended goes to `errors`."""
        self.sim.heap.at(at_s, self._call, request)

    def run(self, until_s: float = 100.0) -> Metrics:
        return self.sim.run(until_s)

    def give_up(self) -> None:
        """Cancel the latest call."""
        self.client.cancel(self.calls[-1])

    def _call(self, request: dict[str, Any]) -> None:
        now = self.sim.heap.now
        wanted = CallRequest(capability=CAPABILITY, request_id=f"at {now}", started=now, **request)
        self.calls.append(self.client.call(wanted, 7, self._done))

    def _done(self, call: Call, error: ReachError | None) -> None:
        self.errors.append(None if error is None else type(error).__name__)


def assert_nothing_left(sim: Simulation) -> None:
    """Every permit came back, and nothing waits or runs anywhere."""
    assert len(sim.heap) == 0
    for client in sim.all_clients:
        assert (client.in_flight, client.calls_open, client.waiting) == (0, 0, 0), client.client_id
        assert permits(client) == 0
    for server in sim.servers.values():
        assert (server.in_flight, server.running, server.queued) == (0, 0, 0), server.agent_id


def permits(client: Client) -> int:
    """What the router of a client counts as in flight."""
    assert isinstance(client.algorithm, AgentReach | OneShot)
    instances = client.algorithm.router.index.instances.values()
    return sum(instance.in_flight for instance in instances)
