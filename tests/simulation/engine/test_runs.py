"""Whole runs: the same seed, the same result; and what the metrics say."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from agent_reach.testing.simulation import (
    BlackHole,
    Busy,
    Constant,
    DropAfterExecuting,
    FailFast,
    FailSlow,
    Fault,
    Hang,
    LogNormal,
    Metrics,
    Nested,
    Pauses,
    Poisson,
    Refuse,
    Simulation,
    Slow,
    WarmUp,
    quantile,
)
from tests.simulation.engine.support import CAPABILITY, OneShot, agent_reach, assert_nothing_left


def everything(seed: int, algorithm: Callable[..., Any] = agent_reach) -> Simulation:
    """A run with all that there is."""
    sim = Simulation(seed)
    below = sim.fleet("below.do.v1", 3, service=LogNormal(0.01), slots=2, idempotent=False)
    kb = sim.fleet(
        CAPABILITY, 8, service=LogNormal(0.03, 1.0), slots=3, calls=(Nested("below.do.v1", share=0.3),),
        zones=("eu/a", "eu/b", "us/a"), speeds=(1.0, 0.5), report_delay_s=0.1,
    )  # fmt: skip
    clients = sim.clients(5, algorithm, zones=("eu/a", "us/a"), view=0.9)
    faults: tuple[Fault, ...] = (
        Refuse(from_s=5, until_s=9),
        BlackHole(from_s=8, until_s=12),
        Hang(0.2),
        FailFast(0.3),
        FailSlow(0.3),
        Busy(0.3, 0.5),
        DropAfterExecuting(0.2),
        Slow(4.0, from_s=3),
    )
    for server, fault in zip(kb, faults, strict=True):
        sim.inject(fault, server)
    sim.inject(Pauses(every_s=2.0, for_s=0.2), below[0])
    sim.inject(WarmUp(for_s=5.0, factor=3.0), kb)
    sim.kill(kb[1], 4.0)
    sim.restart(kb[2], 6.0)
    sim.kill(kb[3], 7.0, silent=True)
    sim.drain(kb[4], 8.0)
    sim.load(clients, CAPABILITY, Poisson(100), timeout_s=2.0, cancel_share=0.1, cancel_after=LogNormal(0.05))
    sim.load(clients[:2], "below.do.v1", Poisson(20))
    sim.run(12.0)
    return sim


def fingerprint(sim: Simulation) -> str:
    metrics = sim.metrics
    used = {s: metrics.attempts_over_time(s, 20.0) for s in sim.servers}
    parts = (metrics.summary(), metrics.counts(), metrics.dead_attempts, used, sim.heap.now)
    return repr(parts)


def test_the_same_seed_gives_the_same_result_in_another_process_too() -> None:
    first = fingerprint(everything(1))
    code = (
        "from tests.simulation.engine.test_runs import everything, fingerprint; print(fingerprint(everything(1)))"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONHASHSEED": "7"}
    other = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True, timeout=60
    )
    assert other.stdout.strip() == first


def test_another_seed_gives_another_result() -> None:
    assert fingerprint(everything(1)) != fingerprint(everything(2))


def test_at_the_end_of_a_run_nothing_is_left_whatever_happened() -> None:
    sim = everything(3)
    assert_nothing_left(sim)
    summary = sim.metrics.summary()
    assert summary.calls > 1000
    assert summary.cancelled > 50
    assert 0.5 < summary.success_share < 1


def test_other_algorithms_face_the_same_arrivals() -> None:
    seen = []
    for algorithm in (agent_reach, lambda rng, zone: OneShot(rng, zone)):
        sim = Simulation(1)
        sim.fleet(CAPABILITY, 3, service=LogNormal(0.05))
        clients = sim.clients(4, algorithm)
        opened: list[tuple[float, str]] = []
        for client in clients:
            setattr(client.algorithm, "open", noting(client.algorithm.open, client.client_id, opened))  # noqa: B010
        sim.load(clients, CAPABILITY, Poisson(50), most_calls=300)
        sim.run(60.0)
        seen.append(opened)
    assert len(seen[0]) == 300
    assert seen[0] == seen[1]


def noting(real: Callable[[Any], Any], client_id: str, opened: list[tuple[float, str]]) -> Callable[[Any], Any]:
    def open_and_note(request: Any) -> Any:
        opened.append((request.started, client_id))
        return real(request)

    return open_and_note


def test_a_run_can_be_stopped_looked_at_and_continued() -> None:
    whole, parts = [run_in(steps) for steps in ((10.0,), (2.0, 3.5, 10.0))]
    assert whole == parts


def run_in(steps: tuple[float, ...]) -> str:
    sim = Simulation(1)
    sim.fleet(CAPABILITY, 2, service=LogNormal(0.05))
    sim.load(sim.clients(2), CAPABILITY, Poisson(30))
    for step in steps[:-1]:
        sim.run(step, drain=False)
        assert sim.heap.now == step
    sim.run(steps[-1])
    with pytest.raises(ValueError, match="run to its end"):
        sim.run(100.0)
    return fingerprint(sim)


def test_a_failed_call_counts_as_its_whole_deadline() -> None:
    sim = Simulation(1)
    (server,) = sim.fleet(CAPABILITY, 1, service=Constant(0.1), slots=None)
    sim.inject(FailFast(0.1), server)
    clients = sim.clients(1, lambda rng, zone: OneShot(rng, zone))
    sim.load(clients, CAPABILITY, Poisson(20), timeout_s=3.0, most_calls=500)
    summary = sim.run(60.0).summary()
    assert 20 < summary.failed < 80
    assert summary.failures == {"ReachError": summary.failed}
    assert summary.p50_s == pytest.approx(0.101)
    assert summary.p99_s == summary.p999_s == 3.0
    assert summary.ok_p99_s == pytest.approx(0.101)


def test_without_a_timeout_a_failure_costs_the_total_of_the_capability() -> None:
    costs = {}
    for timeout in ("light", "heavy", "long", 0.5):
        sim = Simulation(1)
        (server,) = sim.fleet(CAPABILITY, 1, service=Constant(0.1), timeout=timeout)
        sim.inject(FailFast(), server)
        sim.load(sim.clients(1, lambda rng, zone: OneShot(rng, zone)), CAPABILITY, Poisson(1), most_calls=1)
        costs[timeout] = sim.run(60.0).summary().p50_s
    assert costs == {"light": 9.0, "heavy": 30.0, "long": 60.0, 0.5: 1.5}


def test_calls_that_their_callers_give_up_are_neither_successes_nor_failures() -> None:
    sim = Simulation(1)
    (server,) = sim.fleet(CAPABILITY, 1, service=Constant(0.1), slots=None)
    clients = sim.clients(1, agent_reach)
    sim.load(clients, CAPABILITY, Poisson(50), most_calls=1000, cancel_share=0.2, cancel_after=Constant(0.05))
    metrics = sim.run(60.0)
    summary = metrics.summary()
    assert summary.cancelled == pytest.approx(200, abs=40)
    assert (summary.calls, summary.failed) == (1000 - summary.cancelled, 0)
    assert metrics.counts().outcomes == {"Cancelled": summary.cancelled, "Succeeded": summary.successes}
    assert metrics.counts().executions == 1000
    assert server.in_flight == 0


def test_the_warm_up_is_left_out_of_summaries_and_counts() -> None:
    sim = Simulation(1, warm_up_s=5.0)
    sim.fleet(CAPABILITY, 1, service=Constant(0.01))
    sim.load(sim.clients(1), CAPABILITY, Poisson(20))
    metrics = sim.run(10.0)
    later, whole = metrics.summary(), metrics.summary(from_s=0.0)
    assert later.calls == metrics.counts().attempts == metrics.counts().executions
    assert later.calls + metrics.summary(from_s=0.0, until_s=5.0).calls == whole.calls
    assert whole.calls > 1.5 * later.calls


def test_executions_beyond_the_first_are_counted_and_those_that_may_do_harm_apart() -> None:
    duplicates = {}
    for idempotent in (True, False):
        sim = Simulation(1)
        servers = sim.fleet(CAPABILITY, 3, service=Constant(0.01), idempotent=idempotent)
        sim.inject(DropAfterExecuting(0.2), servers)
        sim.load(sim.clients(2), CAPABILITY, Poisson(20), most_calls=200)
        counts = sim.run(60.0).counts()
        assert counts.executions == 200 + counts.duplicates
        duplicates[idempotent] = (counts.duplicates, counts.unsafe_duplicates)
    assert duplicates[True][0] > 20
    assert duplicates[True][1] == 0
    assert duplicates[False] == (0, 0)


def test_harmful_repeats_are_seen() -> None:
    sim = Simulation(1)
    servers = sim.fleet(CAPABILITY, 2, service=Constant(0.01), idempotent=False)
    # A wrong record: it says that repeating does no harm.
    sim.inject(DropAfterExecuting(), servers)
    client = sim.clients(1, lambda rng, zone: Stubborn(rng, zone))
    sim.load(client, CAPABILITY, Poisson(1), most_calls=10)
    counts = sim.run(60.0).counts()
    assert (counts.executions, counts.duplicates, counts.unsafe_duplicates) == (30, 20, 20)


class Stubborn(OneShot):
    """Repeats whatever failed, twice."""

    def open(self, request: Any) -> Any:
        session = super().open(request)
        assert session is not None
        left, next_of_one = [2], session.next

        def next_step(now: float) -> Any:
            if session.outcome is not None and left[0]:
                left[0] -= 1
                session.outcome = None
            return next_of_one(now)

        session.next = next_step  # type: ignore[method-assign]
        return session


def test_the_use_of_a_server_can_be_asked_for() -> None:
    metrics = Metrics()
    for at_s in (0.5, 0.7, 2.0, 3.5):
        metrics.sent_to("a")(at_s)
    assert metrics.attempts_over_time("a", 4.0) == [2, 0, 1, 1]
    assert metrics.attempts_over_time("a", 4.0, bucket_s=2.0) == [2, 2]
    assert metrics.attempts_to("a") == 4
    assert metrics.attempts_to("a", 0.7, 2.0) == 1
    assert metrics.first_use_after("a", 0.7) == 0.7
    assert metrics.first_use_after("a", 0.71) == 2.0
    assert metrics.first_use_after("a", 4.0) is None
    assert metrics.last_use_before("a", 0.7) == 0.5
    assert metrics.last_use_before("a", math.inf) == 3.5
    assert metrics.last_use_before("a", 0.5) is None
    assert metrics.first_use_after("nobody", 0.0) is None


def test_quantiles_are_of_the_nearest_rank() -> None:
    values = [float(i) for i in range(1, 1001)]
    assert [quantile(values, share) for share in (0.5, 0.99, 0.999, 1.0)] == [500.0, 990.0, 999.0, 1000.0]
    assert math.isnan(quantile([], 0.5))


def test_the_test_kit_does_not_load_the_simulator() -> None:
    code = "import sys, agent_reach.testing; print([m for m in sys.modules if 'simulation' in m])"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"
