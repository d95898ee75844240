"""What an attempt that ended teaches: whose fault it was, and how slow its instance is at least."""

from __future__ import annotations

from typing import Any

import pytest

from agent_reach.config import RetryConfig
from agent_reach.routing.breaker import BreakerState, Verdict
from agent_reach.routing.instance import Candidate
from agent_reach.routing.outcomes import Cancelled, LostAnswer, Outcome, Unsent, verdict
from agent_reach.routing.steps import Send
from tests.routing.world import CAPABILITY, World, agent, ok, rejected

ONCE = RetryConfig(max_attempts=1)
RESET = LostAnswer("connection reset")
TIMED_OUT = LostAnswer("no answer", timed_out=True)
CUT_SHORT = rejected(504, "DeadlineExceeded", retryable=False)


def candidate_of(world: World, agent_id: str = "a", capability: str = CAPABILITY) -> Candidate:
    (found,) = [c for c in world.index.lookup(capability).candidates if c.agent_id == agent_id]
    return found


def state_of(world: World) -> BreakerState:
    return world.index.instances["a"].breaker.state


def attempt(world: World, outcome: Outcome, took_s: float, now: float = 100.0, **plan: Any) -> None:
    """One attempt at "a" that ends `took_s` seconds after `now`."""
    plan = {"pinned": "a", "retry": ONCE, "now": now, "deadline": now + max(took_s, 0.001), **plan}
    session = world.session(**plan)
    assert isinstance(session.next(now), Send)
    session.record(outcome, now + took_s)


# --- whose fault it was --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("outcome", "blamed"),
    [
        (TIMED_OUT, Verdict.FAILURE),
        (CUT_SHORT, Verdict.FAILURE),
        (Unsent("connect", "timed out", timed_out=True), Verdict.UNREACHABLE),
    ],
    ids=["no answer", "given up there", "no connection"],
)
@pytest.mark.parametrize(
    ("attempt_s", "waited_s", "fair"),
    # Nine tenths: the callee gives up a twentieth sooner than we do.
    [(5.0, 0.89, False), (5.0, 0.91, True), (5.0, 5.0, True), (0.2, 0.17, False), (0.2, 0.19, True)],
)
def test_running_out_of_time_is_blamed_on_the_instance_if_it_had_a_second_or_its_own_time_if_that_is_less(
    outcome: Outcome, blamed: Verdict, attempt_s: float, waited_s: float, fair: bool
) -> None:
    said = verdict(outcome, waited_s=waited_s, attempt_s=attempt_s)
    assert said is (blamed if fair else Verdict.NEUTRAL)


@pytest.mark.parametrize("outcome", [RESET, rejected(500), rejected(503)], ids=["reset", "500", "503"])
def test_what_fails_by_itself_is_blamed_on_the_instance_however_soon(outcome: Outcome) -> None:
    assert verdict(outcome, waited_s=0.0, attempt_s=5.0) is Verdict.FAILURE


# --- how slow it is at least -----------------------------------------------------------------------------------


@pytest.mark.parametrize("given_up", [Cancelled(), TIMED_OUT, CUT_SHORT], ids=["cancelled", "timeout", "504"])
def test_a_caller_that_gave_up_early_teaches_that_an_answer_takes_longer_and_nothing_of_health(
    given_up: Outcome,
) -> None:
    world = World(agent("a"), agent("b"))
    candidate = candidate_of(world)
    candidate.latency.observe(0.1, 99.0)
    for call in range(30):
        attempt(world, given_up, 0.6, now=100.0 + call)
    assert 0.5 < candidate.latency.at(130.0) < 0.6
    assert candidate.latency.failed_s == 0.0
    assert candidate.learnt.success.at(130.0) == 1.0
    assert candidate.instance.breaker.counts(130.0) == (0, 0)
    assert candidate.instance.breaker.state is BreakerState.CLOSED
    # Or second copies would be sent the sooner the more often they win: their losers are among these.
    assert len(world.router.shared(CAPABILITY).latencies) > 0
    assert world.router.shared(CAPABILITY).outage.in_a_row == 0


@pytest.mark.parametrize("given_up", [Cancelled(), TIMED_OUT, CUT_SHORT], ids=["cancelled", "timeout", "504"])
def test_one_that_gave_up_sooner_than_an_answer_takes_learnt_nothing(given_up: Outcome) -> None:
    world = World(agent("a"))
    candidate = candidate_of(world)
    candidate.latency.observe(0.5, 100.0)
    attempt(world, given_up, 0.3)
    assert candidate.latency.samples == 1
    assert candidate.latency.mean_s == pytest.approx(0.5)


@pytest.mark.parametrize(
    "outcome",
    [
        rejected(429, "Overloaded", executed=False),
        rejected(422, "InvalidPayload", executed=False, retryable=False),
        rejected(503, "Draining", executed=False, state="draining"),
        Unsent("pool", "no connection free", local=True),
        Unsent("connect", "timed out", timed_out=True),
    ],
    ids=["overloaded", "invalid", "draining", "pool", "connect"],
)
def test_who_never_had_the_call_isnt_slow(outcome: Outcome) -> None:
    world = World(agent("a"))
    candidate = candidate_of(world)
    candidate.latency.observe(0.1, 100.0)
    attempt(world, outcome, 0.8)
    assert candidate.latency.samples == 1


def test_an_instance_that_hangs_loses_its_calls_though_all_its_callers_give_up_in_half_a_second() -> None:
    world = World(agent("a"), agent("b"))
    for name in ("a", "b"):
        candidate_of(world, name).latency.observe(0.1, 99.0)
        world.index.instances[name].warm_from = 0.0
    went = []
    for call in range(60):
        now = 100.0 + call
        session = world.session(now=now, deadline=now + 0.5, retry=ONCE)
        step = session.next(now)
        assert isinstance(step, Send)
        went.append(step.candidate.agent_id)
        if went[-1] == "a":
            session.record(TIMED_OUT, now + 0.5)
        else:
            session.record(ok("b"), now + 0.1)
    assert went.count("a") < 10


# --- being well again -------------------------------------------------------------------------------------------


def test_when_its_breaker_closes_what_its_failures_were_booked_as_is_forgotten_for_all_it_offers() -> None:
    other = "other.thing.v1"
    world = World(agent("a", [CAPABILITY, other]), agent("b", [CAPABILITY, other]))
    attempt(world, RESET, 0.01, capability=other)
    for _ in range(4):
        attempt(world, RESET, 0.01)
    due = world.index.instances["a"].breaker.until
    assert state_of(world) is BreakerState.OPEN
    assert candidate_of(world).latency.at(100.01) == candidate_of(world, "a", other).latency.at(100.01) == 5.0
    attempt(world, ok("a"), 0.1, now=due)
    assert state_of(world) is BreakerState.CLOSED
    now = due + 0.1
    assert candidate_of(world).latency.at(now) == pytest.approx(0.1)
    # Of the other one nothing is known, so that it is taken for as fast as its rival, not for infinitely fast.
    candidate_of(world, "b", other).latency.observe(0.3, now)
    score = world.scorer.scores([candidate_of(world, "a", other), candidate_of(world, "b", other)], now)[0]
    assert not score.known
    assert score.latency_s == pytest.approx(0.3)


def test_an_answer_while_it_isnt_shut_out_forgets_no_failure() -> None:
    world = World(agent("a"), agent("b"))
    attempt(world, RESET, 0.01)
    attempt(world, ok("a"), 0.01)
    assert candidate_of(world).latency.at(100.01) == 5.0
