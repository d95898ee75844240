"""Agents that call other agents: time, retries and failures travel along."""

from __future__ import annotations

import random
from typing import Any

import pytest

from agent_reach.errors import NoHealthyAgent, ReachError, RemoteError
from agent_reach.routing.outcomes import Rejected, Succeeded
from agent_reach.routing.steps import Raise
from agent_reach.testing.simulation import (
    Algorithm,
    CallRequest,
    Constant,
    DropAfterExecuting,
    FailFast,
    Nested,
    Poisson,
    Simulation,
)
from tests.simulation.engine.support import CAPABILITY, OneShot, Small, assert_nothing_left

BELOW, DEEPER = "below.do.v1", "deeper.do.v1"


class Spy(OneShot):
    """Notes what nested calls are asked for; may spend retries of the purse, and fail as told."""

    def __init__(self, rng: random.Random, spend: int = 0, error: ReachError | None = None) -> None:
        super().__init__(rng)
        self.spend = spend
        self.error = error
        self.requests: list[CallRequest] = []

    def open(self, request: CallRequest) -> Any:
        self.requests.append(request)
        if request.allowance is not None:
            request.allowance.left -= self.spend
        return super().open(request) if self.error is None else Failing(self.error)


class Failing:
    def __init__(self, error: ReachError) -> None:
        self.error = error

    def next(self, now: float) -> Raise:
        return Raise(self.error)


class Tree(Small):
    """kb calls below, which takes 50 ms."""

    def __init__(self, spy: Algorithm, calls: tuple[Nested | str, ...] = (BELOW,), **fleet: Any) -> None:
        super().__init__(calls=calls, nested=lambda rng, zone: spy, **fleet)
        (self.below,) = self.sim.fleet(BELOW, 1, service=Constant(0.05))


def test_a_nested_call_carries_the_time_and_the_retries_that_are_left() -> None:
    spy = Spy(random.Random(1), spend=1)
    tree = Tree(spy)
    tree.call(1.0)
    metrics = tree.run()
    (request,) = spy.requests
    assert request.capability == BELOW
    assert request.started == pytest.approx(1.1005)
    # Of 2 s, 0.1 s are kept back for the answer's way, and 0.1 s went into the agent's own work.
    assert request.left_s == pytest.approx(2.0 - 0.1 - 0.1)
    ((at, outcome),) = tree.algorithm.ended
    assert isinstance(outcome, Succeeded)
    assert outcome.reply.retry_allowance == 1, "two came along, the nested call spent one"
    assert at == pytest.approx(1.0 + 0.001 + 0.1 + 0.05 + 0.001)
    assert metrics.counts(BELOW).nested_calls == metrics.counts(BELOW).executions == 1
    assert metrics.capabilities == [BELOW, CAPABILITY]
    assert metrics.summary(BELOW).calls == 0, "it is no root call"
    assert_nothing_left(tree.sim)


def test_nested_calls_come_one_after_the_other_and_share_the_purse() -> None:
    spy = Spy(random.Random(1))
    tree = Tree(spy, calls=(BELOW, Nested(BELOW, timeout_s=0.7)))
    tree.call(1.0)
    tree.run()
    first, second = spy.requests
    assert second.started == pytest.approx(first.started + 0.051)
    assert (first.timeout_s, second.timeout_s) == (None, 0.7)
    assert first.allowance is second.allowance is not None
    assert first.request_id != second.request_id


@pytest.mark.parametrize(
    ("starved", "idempotent", "retryable"), [(False, True, False), (True, True, True), (True, False, False)]
)
def test_a_nested_failure_is_told_by_its_class_and_repeated_only_if_it_was_starved_of_retries(
    starved: bool, idempotent: bool, retryable: bool
) -> None:
    error = NoHealthyAgent("nobody is well")
    error.starved = starved
    tree = Tree(Spy(random.Random(1), error=error), idempotent=idempotent)
    tree.call(1.0)
    metrics = tree.run()
    (outcome,) = tree.algorithm.outcomes
    assert isinstance(outcome, Rejected)
    assert (outcome.status, outcome.error.type) == (500, "NoHealthyAgent")
    assert (outcome.error.executed, outcome.error.retryable) == (True, retryable)
    assert outcome.retry_allowance == 2
    assert metrics.counts(BELOW).nested_failures == 1
    assert_nothing_left(tree.sim)


def test_a_nested_call_that_nobody_offers_fails_as_not_found() -> None:
    tree = Tree(Spy(random.Random(1)), calls=("nobody.offers.v1",))
    tree.call(1.0)
    tree.run()
    (outcome,) = tree.algorithm.outcomes
    assert isinstance(outcome, Rejected)
    assert outcome.error.type == "AgentNotFound"


def test_the_nested_call_of_a_caller_that_left_is_cancelled_too() -> None:
    tree = Tree(Spy(random.Random(1)))
    tree.call(1.0)
    seen: list[tuple[int, int]] = []
    for at_s in (1.12, 1.13):
        tree.sim.heap.at(at_s, lambda: seen.append((tree.server.running, tree.below.running)))
    tree.sim.heap.at(1.121, tree.give_up)
    metrics = tree.run()
    assert seen == [(1, 1), (0, 0)]
    assert metrics.counts(BELOW).outcomes == {"Cancelled": 1}
    assert metrics.counts(BELOW).executions == 1
    assert_nothing_left(tree.sim)


def test_the_nested_calls_of_a_server_that_is_killed_go_with_it() -> None:
    tree = Tree(Spy(random.Random(1)))
    tree.call(1.0)
    tree.sim.kill(tree.server, 1.12)
    seen: list[int] = []
    tree.sim.heap.at(1.13, lambda: seen.append(tree.below.running))
    tree.run()
    assert seen == [0]
    assert tree.errors == ["ReachError"]
    assert_nothing_left(tree.sim)


def test_a_handler_whose_nested_call_takes_too_long_is_cut_short() -> None:
    spy = Spy(random.Random(1))
    spy.timeout_s = 100.0
    tree = Tree(spy)
    tree.below.speed = 0.001
    tree.call(1.0)
    tree.run()
    ((at, outcome),) = tree.algorithm.ended
    assert isinstance(outcome, Rejected)
    assert (outcome.status, outcome.error.type, outcome.error.executed) == (504, "DeadlineExceeded", True)
    assert at == pytest.approx(1.0 + 1.9 + 0.001)
    assert_nothing_left(tree.sim)


def test_agents_that_call_each_other_in_a_circle_end_at_the_hop_limit() -> None:
    sim = Simulation(1)
    sim.fleet(CAPABILITY, 1, service=Constant(0.001), slots=None, calls=(BELOW,), name="one")
    sim.fleet(BELOW, 1, service=Constant(0.001), slots=None, calls=(CAPABILITY,), name="other")
    sim.load(sim.clients(1), CAPABILITY, Poisson(1.0), most_calls=1)
    metrics = sim.run(10.0)
    assert metrics.summary().failures == {"RemoteError": 1}
    assert metrics.counts().executions == 16
    assert_nothing_left(sim)


def test_a_share_of_the_runs_makes_the_nested_call() -> None:
    sim = Simulation(1)
    sim.fleet(BELOW, 1, service=Constant(0.01))
    sim.fleet(CAPABILITY, 1, service=Constant(0.01), calls=(Nested(BELOW, share=0.25),))
    sim.load(sim.clients(1), CAPABILITY, Poisson(100), most_calls=1000)
    metrics = sim.run(60.0)
    assert metrics.counts(BELOW).nested_calls == pytest.approx(250, abs=40)


@pytest.mark.parametrize("fault", [FailFast(), DropAfterExecuting()])
def test_a_tree_of_three_hops_runs_its_leaf_three_times_at_the_most(fault: FailFast | DropAfterExecuting) -> None:
    sim = Simulation(1)
    leaves = sim.fleet(DEEPER, 4, service=Constant(0.01), timeout="light")
    sim.fleet(BELOW, 4, service=Constant(0.01), calls=(DEEPER,))
    sim.fleet(CAPABILITY, 4, service=Constant(0.01), calls=(BELOW,))
    sim.inject(fault, leaves)
    sim.load(sim.clients(4), CAPABILITY, Poisson(2), most_calls=50)
    metrics = sim.run(60.0)
    assert metrics.summary().failures == {RemoteError.__name__: 50}
    assert 50 <= metrics.counts(DEEPER).executions <= 150
    assert_nothing_left(sim)
