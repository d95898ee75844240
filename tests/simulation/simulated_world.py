"""A world in the simulator: who calls when, and what came of it."""

from __future__ import annotations

from random import Random

from agent_reach.routing.index import Change
from agent_reach.routing.outcomes import Outcome
from agent_reach.routing.session import CallSession
from agent_reach.routing.steps import Raise, Return, Send, Step
from agent_reach.testing.simulation import (
    AgentReach,
    Algorithm,
    CallRequest,
    FailFast,
    Network,
    Poisson,
    Simulation,
    Slow,
)
from tests.simulation.compared import Arrival, Called, World
from tests.simulation.real_agent import WORK

__all__ = ["arrivals", "simulate"]


def simulate(world: World, seed: int, rtt_s: float) -> list[Called]:
    """Run it; `rtt_s` is what a call costs beside its work."""
    return _run(world, seed, rtt_s).calls


def arrivals(world: World, seed: int) -> list[Arrival]:
    """The calls that the simulator makes with this seed."""
    return _run(world, seed, 0.001).arrivals


def _run(world: World, seed: int, rtt_s: float) -> _Notes:
    sim, notes = Simulation(seed, network=Network(rtt_s=rtt_s)), _Notes()
    servers = sim.fleet(
        WORK,
        world.agents,
        service=world.service,
        slots=world.slots,
        idempotent=not world.unsafe,
        lease_ttl_s=world.lease_ttl_s,
    )
    if world.kill_s is not None:
        sim.kill(servers[0], world.kill_s)
    if world.trouble is not None:
        from_s, until_s, slower = world.trouble.from_s, world.trouble.until_s, world.trouble.slower
        during = {"from_s": from_s, "until_s": until_s}
        sim.inject(FailFast(**during) if slower is None else Slow(slower, **during), servers[1])
    sim.load(sim.clients(world.clients, notes.client), WORK, Poisson(world.per_s))
    sim.run(world.length_s)
    return notes


class _Notes:
    """Looks over the shoulders of the clients: Agent-Reach decides, as anywhere."""

    def __init__(self) -> None:
        self.arrivals: list[Arrival] = []
        self.calls: list[Called] = []
        self._clients = 0

    def client(self, rng: Random, zone: str | None) -> Algorithm:
        self._clients += 1
        return _NotedClient(AgentReach(rng, zone=zone), self._clients - 1, self)


class _NotedClient:
    def __init__(self, inner: AgentReach, number: int, notes: _Notes) -> None:
        self._inner, self._number, self._notes = inner, number, notes

    def apply(self, change: Change, now: float) -> None:
        self._inner.apply(change, now)

    def open(self, request: CallRequest) -> _NotedSession | None:
        self._notes.arrivals.append(Arrival(request.started, self._number))
        session = self._inner.open(request)
        if session is None:
            self._notes.calls.append(Called(request.started, 0.0, "AgentNotFound", ()))
            return None
        return _NotedSession(session, request.started, self._notes)


class _NotedSession:
    def __init__(self, inner: CallSession, started: float, notes: _Notes) -> None:
        self._inner, self._started, self._notes = inner, started, notes

    def next(self, now: float) -> Step:
        step = self._inner.next(now)
        if isinstance(step, Return | Raise):
            failure = type(step.error).__name__ if isinstance(step, Raise) else None
            self._notes.calls.append(Called(self._started, now - self._started, failure, self._inner.attempts))
        return step

    def record(self, outcome: Outcome, now: float, send: Send | None = None) -> None:
        self._inner.record(outcome, now, send)
