"""What can happen to a fleet of agents, as worlds that every algorithm is put into, with the same seeds.

Rates and sizes are those of agents: 2 to 20 replicas that answer within 30 ms to a minute, five callers, about 60 %
of what the fleet bears unless the scenario is about load. Nothing is tuned to an algorithm.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from agent_reach.testing.simulation import (
    AlgorithmFactory,
    Bimodal,
    Bursts,
    Busy,
    DropAfterExecuting,
    FailFast,
    FailSlow,
    Hang,
    LogNormal,
    Nested,
    Pauses,
    Poisson,
    SharedDownstream,
    Simulation,
    Slow,
    WarmUp,
)

__all__ = ["SCENARIOS", "WORK", "Build", "Scenario"]

Build: TypeAlias = Callable[[Simulation, AlgorithmFactory], None]
"""Puts servers, callers and faults into a world."""

WORK = "work.do.v1"
# Half of the answers within 100 ms, 99 % within 320 ms; 113 ms on average.
SERVICE = LogNormal(0.1, 0.5)
MEAN_S = 0.1133


@dataclass(frozen=True, slots=True)
class Scenario:
    """`build` puts servers, callers and faults into a world; it runs for `length_s`, the first `warm_up_s` of which
    don't count.
    """

    name: str
    title: str
    build: Build
    length_s: float
    warm_up_s: float


SCENARIOS: dict[str, Scenario] = {}


def scenario(
    title: str, *, length_s: float = 60.0, warm_up_s: float = 0.0
) -> Callable[[Callable[[Simulation, AlgorithmFactory], None]], Callable[[Simulation, AlgorithmFactory], None]]:
    def add(
        build: Callable[[Simulation, AlgorithmFactory], None],
    ) -> Callable[[Simulation, AlgorithmFactory], None]:
        name = build.__name__.replace("_", "-")
        SCENARIOS[name] = Scenario(name, title, build, length_s, warm_up_s)
        return build

    return add


@scenario("Nothing goes wrong: 8 replicas at 60 %", length_s=40)
def steady(sim: Simulation, algorithm: AlgorithmFactory) -> None:
    sim.fleet(WORK, 8, service=SERVICE, slots=4)
    sim.load(sim.clients(5, algorithm), WORK, Poisson(170))


@scenario("One of eleven takes 2 s, callers give 1 s in all", length_s=45)
def one_slow_of_eleven(sim: Simulation, algorithm: AlgorithmFactory) -> None:
    servers = sim.fleet(WORK, 11, service=LogNormal(0.03, 0.3), slots=20)
    sim.inject(Slow(66), servers[0])
    sim.load(sim.clients(5, algorithm), WORK, Poisson(200), timeout_s=1.0)


@scenario("One of three fails in 1 ms for 30 s")
def one_fails_fast(sim: Simulation, algorithm: AlgorithmFactory) -> None:
    servers = sim.fleet(WORK, 3, service=SERVICE, slots=10)
    sim.inject(FailFast(from_s=10, until_s=40), servers[0])
    sim.load(sim.clients(5, algorithm), WORK, Poisson(100))


@scenario("Of five, one dies at 10 s (port closed), one at 30 s (host gone); both stay listed for 15 s")
def two_die(sim: Simulation, algorithm: AlgorithmFactory) -> None:
    servers = sim.fleet(WORK, 5, service=SERVICE, slots=10)
    sim.kill(servers[0], 10)
    sim.kill(servers[1], 30, silent=True)
    sim.load(sim.clients(5, algorithm), WORK, Poisson(100))


@scenario("One of six hangs on 30 % of its calls for 40 s")
def gray_failure(sim: Simulation, algorithm: AlgorithmFactory) -> None:
    servers = sim.fleet(WORK, 6, service=SERVICE, slots=10)
    sim.inject(Hang(0.3, from_s=10, until_s=50), servers[0])
    sim.load(sim.clients(5, algorithm), WORK, Poisson(100))


@scenario("Two of four fail for 15 s, at 65 % load: for that time the others don't suffice")
def half_fail(sim: Simulation, algorithm: AlgorithmFactory) -> None:
    servers = sim.fleet(WORK, 4, service=SERVICE, slots=6)
    sim.inject(FailFast(from_s=15, until_s=30), servers[:2])
    sim.load(sim.clients(5, algorithm), WORK, Poisson(0.65 * 24 / MEAN_S))


@scenario("All fail 60 % of their calls for 10 s, at 65 % load")
def all_fail_60(sim: Simulation, algorithm: AlgorithmFactory) -> None:
    servers = sim.fleet(WORK, 3, service=SERVICE, slots=8)
    sim.inject(FailSlow(0.6, from_s=20, until_s=30), servers)
    sim.load(sim.clients(5, algorithm), WORK, Poisson(137))


@scenario("What all six depend on fails for 15 s")
def shared_downstream(sim: Simulation, algorithm: AlgorithmFactory) -> None:
    sim.fleet(WORK, 6, service=SERVICE, slots=6, uses=["database"])
    sim.inject(SharedDownstream(name="database", share=1.0, from_s=20, until_s=35))
    sim.load(sim.clients(5, algorithm), WORK, Poisson(120))


@scenario("Six replicas of 1, 2 and 4 times the speed, at 70 %", length_s=40)
def mixed_capacity(sim: Simulation, algorithm: AlgorithmFactory) -> None:
    sim.fleet(WORK, 6, service=SERVICE, slots=2, speeds=(1.0, 2.0, 4.0))
    sim.load(sim.clients(5, algorithm), WORK, Poisson(0.7 * 14 * 2 / MEAN_S))


@scenario("1.2 times what the fleet bears, for a minute", length_s=90)
def overload(sim: Simulation, algorithm: AlgorithmFactory) -> None:
    sim.fleet(WORK, 3, service=SERVICE, slots=4)
    bears = 12 / MEAN_S
    sim.load(sim.clients(5, algorithm), WORK, Poisson([(0, 0.6 * bears), (15, 1.2 * bears), (75, 0.6 * bears)]))


@scenario("Six replicas restart one after the other; calls mustn't be repeated", length_s=75)
def rolling_restart(sim: Simulation, algorithm: AlgorithmFactory) -> None:
    servers = sim.fleet(WORK, 6, service=SERVICE, slots=6, idempotent=False)
    for number, server in enumerate(servers):
        sim.drain(server, 5 + 10 * number)
        sim.inject(WarmUp(5, 4, from_s=5 + 10 * number), server)
        sim.start(server, 5 + 10 * number + 8)
    sim.load(sim.clients(5, algorithm), WORK, Poisson(120))


@scenario("A cold replica joins four busy ones (75 %); its first 15 s are up to 8 times slower", length_s=45)
def cold_joins(sim: Simulation, algorithm: AlgorithmFactory) -> None:
    sim.fleet(WORK, 4, service=SERVICE, slots=6)
    (cold,) = sim.fleet(WORK, 1, service=SERVICE, slots=6, name="cold", start_s=None)
    sim.inject(WarmUp(15, 8), cold)
    sim.start(cold, 20)
    sim.load(sim.clients(5, algorithm), WORK, Poisson(0.75 * 24 / MEAN_S))


@scenario("Three zones of three; the hosts of one are lost at 20 s", length_s=45)
def zone_lost(sim: Simulation, algorithm: AlgorithmFactory) -> None:
    zones = ("eu-1/a", "eu-1/b", "us-1/a")
    servers = sim.fleet(WORK, 9, service=SERVICE, slots=6, zones=zones)
    for server in servers:
        if server.zone == "eu-1/b":
            sim.kill(server, 20, silent=True)
    sim.load(sim.clients(6, algorithm, zones=zones), WORK, Poisson(200))


@scenario("A calls B calls C; all of C fails for 20 s")
def three_hops(sim: Simulation, algorithm: AlgorithmFactory) -> None:
    c = sim.fleet("c.do.v1", 3, service=LogNormal(0.03, 0.4), slots=8)
    sim.fleet("b.do.v1", 3, service=LogNormal(0.03, 0.4), slots=16, calls=[Nested("c.do.v1")])
    sim.fleet("a.do.v1", 3, service=LogNormal(0.03, 0.4), slots=32, calls=[Nested("b.do.v1")])
    sim.inject(FailSlow(1.0, from_s=20, until_s=40), c)
    sim.load(sim.clients(3, algorithm), "a.do.v1", Poisson(100))


@scenario("One call in two hundred takes 40 s, the others 0.1 s", length_s=180)
def long_and_short(sim: Simulation, algorithm: AlgorithmFactory) -> None:
    service = Bimodal(SERVICE, LogNormal(40.0, 0.2), 0.005)
    sim.fleet(WORK, 8, service=service, slots=4, timeout="long")
    sim.load(sim.clients(5, algorithm), WORK, Poisson(60))


@scenario("Two replicas, one ten times slower for 30 s")
def slow_of_two(sim: Simulation, algorithm: AlgorithmFactory) -> None:
    servers = sim.fleet(WORK, 2, service=SERVICE, slots=10)
    sim.inject(Slow(10, from_s=10, until_s=40), servers[0])
    sim.load(sim.clients(5, algorithm), WORK, Poisson(50))


@scenario("One replica only; it fails 30 % of its calls for 10 s")
def lone_instance(sim: Simulation, algorithm: AlgorithmFactory) -> None:
    servers = sim.fleet(WORK, 1, service=SERVICE, slots=16)
    sim.inject(FailSlow(0.3, from_s=20, until_s=30), servers)
    sim.load(sim.clients(5, algorithm), WORK, Poisson(70))


@scenario("60 calls at once, every 2 s")
def bursts(sim: Simulation, algorithm: AlgorithmFactory) -> None:
    sim.fleet(WORK, 8, service=SERVICE, slots=4)
    sim.load(sim.clients(5, algorithm), WORK, Bursts(60, 2.0))


@scenario("20 callers, 75 % load, and what replicas say of their load is 5 s old", length_s=35)
def stale_reports(sim: Simulation, algorithm: AlgorithmFactory) -> None:
    sim.fleet(WORK, 8, service=SERVICE, slots=4, report_delay_s=5.0)
    sim.load(sim.clients(20, algorithm), WORK, Poisson(0.75 * 32 / MEAN_S))


@scenario("500 callers who each know 30 % of 20 replicas; one of those is 10 times slower", length_s=30)
def partial_views(sim: Simulation, algorithm: AlgorithmFactory) -> None:
    servers = sim.fleet(WORK, 20, service=SERVICE, slots=4)
    sim.inject(Slow(10, from_s=10), servers[0])
    sim.load(sim.clients(500, algorithm, view=0.3), WORK, Poisson(350))


@scenario("5 % of the answers are lost after the work was done; calls mustn't be repeated")
def lost_answers(sim: Simulation, algorithm: AlgorithmFactory) -> None:
    servers = sim.fleet(WORK, 4, service=SERVICE, slots=8, idempotent=False)
    sim.inject(DropAfterExecuting(0.05), servers)
    sim.load(sim.clients(5, algorithm), WORK, Poisson(100))


@scenario("Each of six stands still for 1 s every 15 s, one after the other", length_s=45)
def pauses(sim: Simulation, algorithm: AlgorithmFactory) -> None:
    servers = sim.fleet(WORK, 6, service=SERVICE, slots=6)
    for number, server in enumerate(servers):
        sim.inject(Pauses(every_s=15, for_s=1, from_s=5 + 2.5 * number), server)
    sim.load(sim.clients(5, algorithm), WORK, Poisson(150))


@scenario("One of four answers 429, come back in 3 s, for 20 s")
def too_many_requests(sim: Simulation, algorithm: AlgorithmFactory) -> None:
    servers = sim.fleet(WORK, 4, service=SERVICE, slots=8)
    sim.inject(Busy(1.0, retry_after_s=3.0, from_s=15, until_s=35), servers[0])
    sim.load(sim.clients(5, algorithm), WORK, Poisson(120))
