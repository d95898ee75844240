"""Each fault, seen by a client as the real dialer would tell it."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from agent_reach.routing.outcomes import LostAnswer, Outcome, Rejected, Succeeded, Unsent
from agent_reach.testing.simulation import (
    BlackHole,
    Busy,
    Constant,
    DropAfterExecuting,
    FailFast,
    FailSlow,
    Fault,
    Hang,
    Pauses,
    Poisson,
    Refuse,
    SharedDownstream,
    Simulation,
    Slow,
    WarmUp,
)
from tests.simulation.engine.support import CAPABILITY, OneShot, Small, agent_reach, assert_nothing_left


def seen(fault: Fault, *, idempotent: bool = True) -> tuple[float, Outcome, int]:
    """How long one call to a server with this fault takes, how it ends, and how often it is executed."""
    small = Small(idempotent=idempotent)
    small.sim.inject(fault, small.server)
    small.call(1.0)
    metrics = small.run()
    assert_nothing_left(small.sim)
    ((at, outcome),) = small.algorithm.ended
    return round(at - 1.0, 6), outcome, metrics.counts().executions


def test_a_closed_port_refuses_after_a_round_trip() -> None:
    took_s, outcome, executions = seen(Refuse())
    assert outcome == Unsent("connect", "Connection refused")
    assert (took_s, executions) == (0.001, 0)


def test_a_black_hole_takes_the_connect_timeout_and_nothing_was_sent() -> None:
    took_s, outcome, executions = seen(BlackHole())
    assert isinstance(outcome, Unsent)
    assert (outcome.phase, outcome.timed_out, outcome.local) == ("connect", True, False)
    assert (took_s, executions) == (1.0, 0)


def test_a_black_hole_takes_no_longer_than_the_attempt() -> None:
    small = Small(OneShot(random.Random(1), timeout_s=0.3))
    small.sim.inject(BlackHole(), small.server)
    small.call(1.0)
    small.run()
    ((at, outcome),) = small.algorithm.ended
    assert isinstance(outcome, Unsent)
    assert outcome.timed_out
    assert at == pytest.approx(1.3)


def test_a_hanging_server_takes_the_whole_attempt_and_may_have_executed_it() -> None:
    took_s, outcome, executions = seen(Hang())
    assert isinstance(outcome, LostAnswer)
    assert outcome.timed_out
    assert (took_s, executions) == (2.0, 0)


@pytest.mark.parametrize("idempotent", [True, False])
@pytest.mark.parametrize(
    ("fault", "took_s"),
    [
        (FailFast(), 0.002),
        (FailFast(after_s=0.01), 0.011),
        (FailSlow(), 0.101),
        (SharedDownstream("db", after_s=None), 0.101),
        (SharedDownstream("db"), 0.002),
    ],
)
def test_a_failing_handler_is_told_as_executed(fault: Fault, took_s: float, idempotent: bool) -> None:
    took, outcome, executions = seen(fault, idempotent=idempotent)
    assert isinstance(outcome, Rejected)
    assert (outcome.status, outcome.error.executed, outcome.error.retryable) == (500, True, idempotent)
    assert outcome.retry_allowance == 2
    assert took == pytest.approx(took_s)
    assert executions == 1


def test_a_busy_server_executes_nothing_and_says_when_to_come_back() -> None:
    took_s, outcome, executions = seen(Busy(retry_after_s=0.7))
    assert isinstance(outcome, Rejected)
    assert (outcome.status, outcome.error.type, outcome.error.executed) == (429, "Overloaded", False)
    assert outcome.retry_after_s == 0.7
    assert (took_s, executions) == (0.001, 0)


def test_a_dropped_answer_was_executed() -> None:
    took_s, outcome, executions = seen(DropAfterExecuting())
    assert outcome == LostAnswer("connection reset")
    assert (took_s, executions) == (0.101, 1)


def test_slowness_multiplies() -> None:
    small = Small()
    small.sim.inject(Slow(3.0), small.server)
    small.sim.inject(Slow(2.0), small.server)
    small.call(1.0)
    small.run()
    assert small.algorithm.ended[0][0] == pytest.approx(1.601)


def test_a_server_that_warms_up_gets_faster_and_does_so_after_each_start() -> None:
    small = Small()
    small.sim.inject(WarmUp(for_s=10.0, factor=5.0), small.server)
    small.sim.restart(small.server, 20.0, down_s=5.0)
    for at_s in (0.0, 5.0, 15.0, 25.5, 40.0):
        small.call(at_s)
    small.run()
    took = [at - began for (at, _), began in zip(small.algorithm.ended, (0.0, 5.0, 15.0, 25.5, 40.0), strict=True)]
    assert took == pytest.approx([0.501, 0.301, 0.101, 0.481, 0.101], abs=0.001)


@pytest.mark.parametrize(
    ("called_s", "ended_s"),
    [
        (0.5, 0.601),  # before the first pause
        (0.95, 1.351),  # it stands still for 0.3 s, 0.05 s of work before the pause
        (1.1, 1.4005),  # it comes in the pause, and is taken after it
        (1.5, 1.601),
        (1.95, 2.351),
        (2.95, 3.051),  # no pause begins at 3 or later
    ],
)
def test_in_a_pause_everything_stands_still(called_s: float, ended_s: float) -> None:
    small = Small()
    small.sim.inject(Pauses(every_s=1.0, for_s=0.3, from_s=1.0, until_s=3.0), small.server)
    small.call(called_s)
    small.run()
    assert small.algorithm.ended[0][0] == pytest.approx(ended_s)


def test_work_longer_than_many_pauses_takes_all_of_them() -> None:
    small = Small(OneShot(random.Random(1), timeout_s=50.0), service=Constant(7.0), timeout=60.0)
    small.sim.inject(Pauses(every_s=0.1, for_s=0.03), small.server)
    small.call(0.0295)
    small.run()
    # 0.07 s of work in each 0.1 s, from the end of the first pause on: a hundred times, 99 pauses between them.
    assert small.algorithm.ended[0][0] == pytest.approx(0.03 + 7.0 + 99 * 0.03 + 0.0005, abs=1e-6)


def test_a_caller_that_left_in_a_pause_is_noticed_after_it() -> None:
    small = Small(OneShot(random.Random(1), timeout_s=0.1))
    small.sim.inject(Pauses(every_s=10.0, for_s=1.0), small.server)
    small.call(0.2)
    metrics = small.run()
    assert small.algorithm.ended[0] == (pytest.approx(0.3), LostAnswer("no answer in time", timed_out=True))
    assert metrics.counts().executions == 1, "the request was in its buffer, and was read first"
    assert_nothing_left(small.sim)


def test_a_fault_lasts_for_its_interval_and_then_the_server_is_well_again() -> None:
    small = Small()
    small.sim.inject(FailFast(from_s=1.0, until_s=2.0), small.server)
    for at_s in (0.9, 1.0, 1.99, 2.0):
        small.call(at_s)
    small.run()
    kinds = [type(o) for _, o in sorted(small.algorithm.ended, key=lambda e: e[0])]
    # That of 0.9 ends with that of 1.0; sent at 1.0, a request arrives half a millisecond later.
    assert sorted(k.__name__ for k in kinds) == ["Rejected", "Rejected", "Succeeded", "Succeeded"]


@pytest.mark.parametrize("fault", [Hang(0.3), FailFast(0.3), FailSlow(0.3), Busy(0.3), DropAfterExecuting(0.3)])
def test_a_fault_hits_its_share_of_the_requests(fault: Fault) -> None:
    sim = Simulation(1)
    (server,) = sim.fleet(CAPABILITY, 1, service=Constant(0.01), slots=None)
    clients = sim.clients(1, lambda rng, zone: OneShot(rng, zone))
    sim.inject(fault, server)
    sim.load(clients, CAPABILITY, Poisson(200), most_calls=2000)
    summary = sim.run(60.0).summary()
    assert summary.success_share == pytest.approx(0.7, abs=0.03)
    assert_nothing_left(sim)


def test_the_same_requests_are_hit_whoever_serves_them() -> None:
    hit = []
    for index in (0, 2):
        algorithm = OneShot(random.Random(1), index=index)
        small = Small(algorithm, count=3)
        small.sim.inject(FailFast(0.3), small.servers)
        small.sim.load([small.client], CAPABILITY, Poisson(20), most_calls=200)
        metrics = small.run()
        assert metrics.attempts_to(small.servers[index].agent_id) == 200
        hit.append([type(outcome) for outcome in algorithm.outcomes])
    assert hit[0] == hit[1]
    assert set(hit[0]) == {Succeeded, Rejected}


def test_a_shared_downstream_fails_all_who_use_it_and_nobody_else() -> None:
    sim = Simulation(1)
    users = sim.fleet(CAPABILITY, 2, service=Constant(0.01), name="user", uses=("db",))
    others = sim.fleet("other.do.v1", 1, service=Constant(0.01))
    clients = sim.clients(1, agent_reach)
    sim.inject(SharedDownstream("db", from_s=0.0, until_s=100.0))
    for capability in (CAPABILITY, "other.do.v1"):
        sim.load(clients, capability, Poisson(5), most_calls=20)
    metrics = sim.run(20.0)
    assert metrics.summary(CAPABILITY).successes == 0
    assert metrics.summary("other.do.v1").successes == metrics.summary("other.do.v1").calls == 20
    assert all(metrics.attempts_to(server.agent_id) for server in (*users, *others))


def test_a_fault_that_befalls_nobody_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="befalls nobody"):
        Simulation(1).inject(SharedDownstream("nothing"))


def test_a_pause_longer_than_its_period_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="for_s"):
        replace(Pauses(every_s=1.0, for_s=0.5), for_s=1.0)


def test_what_succeeds_says_how_many_retries_are_left() -> None:
    small = Small()
    small.call(1.0)
    small.run()
    (outcome,) = small.algorithm.outcomes
    assert isinstance(outcome, Succeeded)
    assert outcome.reply.retry_allowance == 2
    assert (outcome.reply.agent_id, outcome.reply.state) == ("kb-1", "accepting")
