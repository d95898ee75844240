"""Slots, queues, deadlines and load reports of a simulated server."""

from __future__ import annotations

import random
from math import factorial

import pytest

from agent_reach.model import LoadReport
from agent_reach.routing.outcomes import Outcome, Rejected, Succeeded
from agent_reach.testing.simulation import ClosedLoop, Constant, Exponential, Network, Poisson, Simulation
from tests.simulation.engine.support import CAPABILITY, OneShot, Small


def erlang_c(servers: int, offered: float) -> float:
    """The share of the calls that wait in an M/M/c queue."""
    last = offered**servers / factorial(servers) * servers / (servers - offered)
    return last / (sum(offered**k / factorial(k) for k in range(servers)) + last)


@pytest.mark.parametrize(("slots", "per_s", "calls"), [(1, 5.0, 20_000), (4, 26.0, 30_000)])
def test_the_mean_wait_is_that_of_erlang_c(slots: int, per_s: float, calls: int) -> None:
    mean_s = 0.1
    sim = Simulation(3, network=Network(rtt_s=0.0))
    sim.fleet(CAPABILITY, 1, service=Exponential(mean_s), slots=slots, queue=10**6)
    clients = sim.clients(1, lambda rng, zone: OneShot(rng, zone, timeout_s=1e5))
    sim.load(clients, CAPABILITY, Poisson(per_s), most_calls=calls)
    summary = sim.run(10 * calls / per_s).summary()
    assert summary.successes == calls
    offered = per_s * mean_s
    expected_s = erlang_c(slots, offered) * mean_s / (slots - offered)
    assert summary.ok_mean_s - mean_s == pytest.approx(expected_s, rel=0.05)


def load_of(outcome: Outcome) -> LoadReport:
    load = outcome.reply.load if isinstance(outcome, Succeeded) else getattr(outcome, "load", None)
    assert isinstance(load, LoadReport)
    return load


def test_what_finds_every_slot_and_place_taken_is_refused_unexecuted_with_a_time() -> None:
    small = Small(slots=1, queue=2)
    for _ in range(4):
        small.call(1.0)
    small.run()
    refused = small.algorithm.outcomes[0]
    assert isinstance(refused, Rejected)
    assert (refused.status, refused.error.type, refused.error.executed) == (503, "Overloaded", False)
    assert refused.error.retryable
    # Nothing has ended yet, so half a second a call is assumed, for the two that wait and this one.
    assert refused.retry_after_s == 1.5
    assert refused.state == "overloaded"
    assert [round(at, 4) for at, _ in small.algorithm.ended] == [1.001, 1.101, 1.201, 1.301]


def test_the_time_asked_for_follows_the_service_time() -> None:
    small = Small(slots=1, queue=0)
    small.call(1.0)
    for _ in range(2):
        small.call(2.0)
    small.run()
    refused = next(o for o in small.algorithm.outcomes if isinstance(o, Rejected))
    assert refused.retry_after_s == pytest.approx(0.1, abs=0.002)


def test_the_queue_is_three_times_the_slots_unless_told_otherwise() -> None:
    small = Small(slots=2)
    for _ in range(9):
        small.call(1.0)
    small.run()
    assert sum(isinstance(o, Rejected) for o in small.algorithm.outcomes) == 1


def test_every_answer_tells_the_load_after_it() -> None:
    small = Small(slots=1)
    for _ in range(3):
        small.call(1.0)
    small.run()
    loads = [load_of(outcome) for outcome in small.algorithm.outcomes]
    assert loads == [
        LoadReport(in_flight=1, queued=1, max_concurrency=1),
        LoadReport(in_flight=1, queued=0, max_concurrency=1),
        LoadReport(in_flight=0, queued=0, max_concurrency=1),
    ]


def test_reports_can_be_late() -> None:
    small = Small(slots=1, report_delay_s=0.15)
    for _ in range(3):
        small.call(1.0)
    small.call(5.0)
    small.run()
    told = [(load_of(o).in_flight, load_of(o).queued) for o in small.algorithm.outcomes]
    # At 1.1 that of 0.95; at 1.2 that of 1.05; at 1.3 that of 1.15; at 5.1 that of 4.95.
    assert told == [(0, 0), (1, 2), (1, 1), (0, 0)]


def test_queued_work_whose_time_is_up_is_refused_unexecuted() -> None:
    small = Small(slots=1)
    small.call(1.0)
    small.sim.heap.at(1.01, setattr, small.algorithm, "timeout_s", 0.04)
    small.call(1.02)
    metrics = small.run()
    at, late = small.algorithm.ended[0]
    assert isinstance(late, Rejected)
    assert (late.status, late.error.type, late.error.executed) == (504, "DeadlineExceeded", False)
    # It waited for 95 % of its caller's time, and its word got there before the caller gave up.
    assert at == pytest.approx(1.02 + 0.001 + 0.04 * 0.95)
    assert metrics.counts().executions == 1
    assert metrics.counts().outcomes == {"Succeeded": 1, "Rejected": 1}


def test_running_work_whose_time_is_up_is_cut_short_and_counts_as_executed() -> None:
    small = Small(OneShot(random.Random(1), timeout_s=0.06), slots=1, service=Constant(10.0))
    small.call(1.0)
    small.call(2.0)
    metrics = small.run()
    cut = small.algorithm.outcomes[0]
    assert isinstance(cut, Rejected)
    assert (cut.status, cut.error.type, cut.error.executed) == (504, "DeadlineExceeded", True)
    assert metrics.counts().executions == 2, "the slot was free again for the second"


def test_a_slower_server_takes_longer_for_the_same_luck() -> None:
    took = {}
    for speed in (0.5, 2.0):
        small = Small(service=Exponential(0.1), speeds=(speed,))
        small.call(1.0)
        small.run()
        took[speed] = small.algorithm.ended[0][0] - 1.001
    assert took[0.5] == pytest.approx(4 * took[2.0])


def test_workers_of_a_closed_loop_never_have_more_calls_open_than_they_are() -> None:
    sim = Simulation(1)
    (server,) = sim.fleet(CAPABILITY, 1, service=Constant(0.1), slots=None)
    clients = sim.clients(2)
    sim.load(clients, CAPABILITY, ClosedLoop(workers=5, think_s=0.099))
    most: list[int] = []
    for tick in range(1, 90):
        sim.heap.at(tick * 0.1, lambda: most.append(sum(c.calls_open for c in clients)))
    calls = sim.run(10.0).summary().calls
    assert max(most) <= 5
    # Each takes a tenth of a second of work, a round trip, and a tenth of thinking.
    assert calls == pytest.approx(5 * 10 / 0.2, rel=0.03)
    assert server.in_flight == 0


def test_messages_between_zones_and_regions_take_longer() -> None:
    took = {}
    for zone in ("eu/a", "eu/b", "us/a"):
        sim = Simulation(1, network=Network(rtt_s=0.001, cross_zone_s=0.002, cross_region_s=0.08))
        sim.fleet(CAPABILITY, 1, service=Constant(0.1), zones=(zone,))
        sim.load(sim.clients(1, zones=("eu/a",)), CAPABILITY, Poisson(1.0), most_calls=1)
        took[zone] = sim.run(10.0).summary().ok_mean_s
    assert took == pytest.approx({"eu/a": 0.101, "eu/b": 0.103, "us/a": 0.181})
