"""What the routing promises, each in a world of its own. It is all virtual time: the same seed, the same calls."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from agent_reach.config import ReachConfig, RetryConfig
from agent_reach.testing.simulation import (
    AgentReach,
    Algorithm,
    AlgorithmFactory,
    BlackHole,
    DropAfterExecuting,
    FailFast,
    FailSlow,
    Fault,
    Hang,
    LogNormal,
    Metrics,
    Nested,
    Poisson,
    Refuse,
    Server,
    Simulation,
    Slow,
)

CAPABILITY = "work.do.v1"
QUICK = LogNormal(0.03, 0.3)


def ours(config: ReachConfig | None = None) -> AlgorithmFactory:
    def build(rng: random.Random, zone: str | None) -> Algorithm:
        return AgentReach(rng, config, zone=zone)

    return build


def world(
    servers: int, *faults: Fault, hit: int | None = None, idempotent: bool = True, seed: int = 1
) -> tuple[Simulation, list[Server]]:
    """A fleet of which the first `hit` (None: all) suffer the faults."""
    sim = Simulation(seed)
    fleet = sim.fleet(CAPABILITY, servers, service=QUICK, slots=20, idempotent=idempotent)
    for fault in faults:
        sim.inject(fault, fleet[:hit])
    return sim, fleet


def run(
    sim: Simulation,
    rate: float,
    length_s: float,
    *,
    clients: int = 2,
    timeout_s: float | None = None,
    config: ReachConfig | None = None,
) -> Metrics:
    sim.load(sim.clients(clients, ours(config)), CAPABILITY, Poisson(rate), timeout_s=timeout_s)
    return sim.run(length_s)


def test_with_one_slow_of_eleven_999_calls_in_1000_are_answered_within_their_second() -> None:
    sim, _ = world(11, Slow(66), hit=1)
    assert run(sim, 200, 20, clients=5, timeout_s=1.0).summary().success_share >= 0.999


@pytest.mark.parametrize(
    "fault", [FailFast(), FailSlow(), Refuse(), Hang()], ids=lambda fault: type(fault).__name__
)
@pytest.mark.parametrize("patience_s", [5.0, 0.0], ids=["patient", "impatient"])
def test_when_everything_fails_a_call_makes_1_2_attempts(fault: Fault, patience_s: float) -> None:
    """A refused connection may be followed by one elsewhere at once, so of those there are a few more."""
    sim, _ = world(3, fault)
    metrics = run(sim, 60, 25, config=ReachConfig(retry=RetryConfig(patience_s=patience_s)))
    assert metrics.summary().successes == 0
    least = 2 * 3 / metrics.summary().calls
    assert metrics.summary().attempts_per_call <= 1.2 + least


def test_three_hops_run_the_leaf_three_times_at_the_most_for_each_call_at_the_root() -> None:
    """One call at a time, so that what the leaf ran is that call's."""
    for seed in range(20):
        sim = Simulation(seed, nested=ours())
        leaf = sim.fleet("c.do.v1", 3, service=QUICK)
        sim.fleet("b.do.v1", 3, service=QUICK, calls=[Nested("c.do.v1")])
        sim.fleet("a.do.v1", 3, service=QUICK, calls=[Nested("b.do.v1")])
        sim.inject(FailFast(), leaf)
        sim.load(sim.clients(1, ours()), "a.do.v1", Poisson(1000), most_calls=1)
        metrics = sim.run(60)
        assert metrics.summary().calls == 1
        assert 1 <= metrics.counts("c.do.v1").executions <= 3


@pytest.mark.parametrize("silent", [False, True], ids=["port closed", "host gone"])
def test_a_dead_instance_fails_no_call_and_is_dialed_by_one_call_a_window(silent: bool) -> None:
    sim, fleet = world(3)
    sim.kill(fleet[0], 5.0, silent=silent)
    metrics = run(sim, 40, 30)
    assert metrics.summary().failed == 0
    assert metrics.dead_attempts
    for client in {dial.client_id for dial in metrics.dead_attempts}:
        dials = [dial.time_s for dial in metrics.dead_attempts if dial.client_id == client]
        # Where the host is gone, calls go there until the first of them has waited for its connection in vain.
        windows = [dials[0], *(later for later in dials if later > dials[0] + 1.0)]
        assert len(dials) - len(windows) <= (3 if silent else 0)
        # The first window is 2.5 to 5 s.
        assert all(later - earlier >= 2.5 for earlier, later in pairwise(windows))
        assert len(windows) <= 4


def test_an_instance_that_fails_in_a_millisecond_attracts_no_load() -> None:
    sim, fleet = world(3, FailFast(), hit=1)
    metrics = run(sim, 100, 15)
    assert metrics.attempts_to(fleet[0].agent_id) < 0.01 * metrics.counts().attempts
    assert metrics.summary().failed == 0


def test_a_lone_instance_never_goes_dark() -> None:
    """It fails for 10 s; from then on every call is answered, and it was asked all the time."""
    sim, fleet = world(1, FailSlow(from_s=5, until_s=15))
    metrics = run(sim, 20, 25)
    assert all(metrics.attempts_over_time(fleet[0].agent_id, 25))
    assert metrics.summary(from_s=15.6).success_share == 1.0


@pytest.mark.parametrize("fault", [FailFast, BlackHole, Refuse], ids=lambda fault: fault.__name__)
def test_an_instance_that_is_well_again_is_used_within_one_probe_interval(fault: type[FailFast]) -> None:
    sim, fleet = world(2, fault(from_s=5, until_s=12), hit=1)
    metrics = run(sim, 40, 60)
    used = metrics.first_use_after(fleet[0].agent_id, 12.0)
    assert used is not None
    assert used - 12.0 <= 30.0
    # Not only looked at: ten seconds of slow start later it has its share.
    share = metrics.attempts_to(fleet[0].agent_id, used + 10, 60) / (60 - used - 10)
    assert share > 10


@pytest.mark.parametrize("seed", range(3))
def test_what_mustnt_be_repeated_is_never_executed_twice(seed: int) -> None:
    """Answers lost, handlers failing, hangs, restarts: whatever comes, the count of executions stays at one."""
    sim, fleet = world(
        4, DropAfterExecuting(0.1), FailSlow(0.05), Hang(0.02, from_s=5, until_s=10), idempotent=False, seed=seed
    )
    sim.kill(fleet[1], 8.0)
    sim.start(fleet[1], 10.0)
    sim.drain(fleet[2], 12.0)
    metrics = run(sim, 80, 25)
    assert metrics.counts().unsafe_duplicates == 0
    assert metrics.summary().failures["OutcomeUnknown"] > 100
