"""Second copies: when they are sent, where to, what they cost, and who wins."""

from __future__ import annotations

from typing import Any

import pytest

from agent_reach.config import BulkheadConfig, HedgeConfig, ReachConfig, RetryConfig
from agent_reach.errors import NoHealthyAgent, RemoteError
from agent_reach.routing.breaker import BreakerState
from agent_reach.routing.budget import RetryAllowance
from agent_reach.routing.outcomes import Cancelled, LostAnswer, Unsent
from agent_reach.routing.session import CallSession
from agent_reach.routing.steps import Await, Raise, Return, Send, Wait
from tests.routing.world import CAPABILITY, World, agent, ok, rejected

HEDGE = HedgeConfig()
REFUSED = Unsent("connect", "connection refused")
RESET = LostAnswer("connection reset")


def world_of(
    count: int = 3, *, idempotent: bool = True, samples: int = 100, per_tier: int = 500, seed: int = 1
) -> World:
    """The capability's latencies so far: 0.01 s, 0.02 s, ... so that the 95th of 100 is 0.96 s."""
    config = ReachConfig(retry=RetryConfig(base_s=0.0), hedge=HEDGE, bulkheads=BulkheadConfig(per_tier=per_tier))
    world = World(*(agent(f"a{n}", idempotent=idempotent) for n in range(count)), config=config, seed=seed)
    for number in range(samples):
        world.router.shared(CAPABILITY).latencies.observe((number + 1) / 100)
    # Long known and idle, so that newcomers' shares play no part.
    for instance in world.index.instances.values():
        instance.warm_from = -100.0
    return world


def open_call(world: World, hedge: HedgeConfig | None = HEDGE, **plan: Any) -> CallSession:
    return world.session(hedge=hedge, **plan)


def sent(session: CallSession, now: float) -> Send:
    step = session.next(now)
    assert isinstance(step, Send), step
    return step


def two_copies(world: World, **plan: Any) -> tuple[CallSession, Send, Send]:
    """A call whose first copy was slow, so that a second one is under way."""
    session = open_call(world, **plan)
    first = sent(session, 0.0)
    assert first.hedge_after_s is not None
    return session, first, sent(session, first.hedge_after_s)


# --- when ----------------------------------------------------------------------------------------------------


def test_a_second_copy_is_due_once_the_first_takes_longer_than_95_of_100() -> None:
    session = open_call(world_of())
    first = sent(session, 0.0)
    assert first.hedge_after_s == pytest.approx(0.96)
    early = session.next(0.5)
    assert isinstance(early, Await)
    assert early.seconds == pytest.approx(0.46)
    second = sent(session, 0.96)
    assert (first.number, second.number) == (1, 2)
    assert second.candidate.agent_id != first.candidate.agent_id
    assert second.hedge_after_s is None
    assert session.next(0.97) == session.next(100.0) == Await(), "two is the most"


def test_the_percentile_and_the_least_are_settings_of_the_call() -> None:
    world = world_of()
    assert sent(open_call(world, HedgeConfig(percentile=0.5)), 0.0).hedge_after_s == pytest.approx(0.51)
    assert sent(open_call(world, HedgeConfig(least_s=2.0)), 0.0).hedge_after_s == 2.0
    assert sent(open_call(world, HedgeConfig(percentile=1.0)), 0.0).hedge_after_s == pytest.approx(1.0)


@pytest.mark.parametrize(("samples", "due"), [(0, False), (19, False), (20, True)])
def test_before_twenty_answers_nobody_knows_what_slow_is(samples: int, due: bool) -> None:
    first = sent(open_call(world_of(samples=samples)), 0.0)
    assert (first.hedge_after_s is not None) is due


@pytest.mark.parametrize("why", ["not asked for", "not idempotent", "one attempt", "no retry left in the tree"])
def test_there_is_no_second_copy_where_a_repeat_is_out_of_the_question(why: str) -> None:
    world = world_of(idempotent=why != "not idempotent")
    session = {
        "not asked for": lambda: open_call(world, None),
        "not idempotent": lambda: open_call(world),
        "one attempt": lambda: open_call(world, retry=RetryConfig(max_attempts=1)),
        "no retry left in the tree": lambda: open_call(world, allowance=RetryAllowance(0)),
    }[why]()
    assert sent(session, 0.0).hedge_after_s is None
    assert session.next(29.0) == Await()


def test_a_copy_that_starts_where_no_time_is_left_is_not_sent() -> None:
    session = open_call(world_of(), deadline=0.9)
    assert sent(session, 0.0).hedge_after_s == pytest.approx(0.96)
    assert session.next(0.96) == Await()


def test_a_timer_that_fires_a_rounding_error_early_is_on_time() -> None:
    session = open_call(world_of())
    first = sent(session, 0.0)
    assert first.hedge_after_s is not None
    assert isinstance(session.next(first.hedge_after_s - 1e-9), Send)


def test_a_retry_may_have_a_second_copy_too_but_a_call_has_one_in_all() -> None:
    world = world_of(5)
    session = open_call(world, retry=RetryConfig(max_attempts=5, base_s=0.0), allowance=RetryAllowance(64))
    session.record(RESET, 0.1, sent(session, 0.0))
    second = sent(session, 0.1)
    assert second.hedge_after_s is not None
    third = sent(session, 0.1 + second.hedge_after_s)
    session.record(RESET, 1.5, second)
    session.record(RESET, 1.5, third)
    assert sent(session, 1.5).hedge_after_s is None


# --- where to ------------------------------------------------------------------------------------------------


def test_the_second_copy_goes_to_another_instance_always() -> None:
    for seed in range(50):
        _, first, second = two_copies(world_of(2, seed=seed))
        assert {first.candidate.agent_id, second.candidate.agent_id} == {"a0", "a1"}


@pytest.mark.parametrize("why", ["alone", "pinned", "others are full", "others drain", "others are shut out"])
def test_without_another_instance_there_is_no_second_copy(why: str) -> None:
    world = world_of(1 if why == "alone" else 2)
    session = open_call(world, preferred=("a0",), pinned="a0" if why == "pinned" else None)
    first = sent(session, 0.0)
    assert first.candidate.agent_id == "a0"
    other = world.index.instances.get("a1")
    if other is not None and why == "others are full":
        other.in_flight = 100
    elif other is not None and why == "others drain":
        other.avoid_until = 100.0
    elif other is not None and why == "others are shut out":
        other.breaker.state, other.breaker.until = BreakerState.OPEN, 100.0
    purse, budget = session._plan.allowance.left, world.router.shared(CAPABILITY).hedges.left(1.0)
    assert session.next(1.0) == Await()
    assert session._plan.allowance.left == purse, "nothing was sent, so nothing is spent"
    assert world.router.shared(CAPABILITY).hedges.left(1.0) == budget
    session.record(ok("a0"), 2.0)
    assert isinstance(session.next(2.0), Return)


# --- what it costs -------------------------------------------------------------------------------------------


def test_second_copies_are_at_most_five_of_a_hundred_calls() -> None:
    world, copies = world_of(), 0
    for call in range(400):
        now = call * 0.01
        session = world.session(hedge=HEDGE, now=now, deadline=now + 30)
        first = sent(session, now)
        assert first.hedge_after_s is not None
        step = session.next(now + first.hedge_after_s)
        if isinstance(step, Send):
            copies += 1
            session.record(ok(step.candidate.agent_id), now + 1.0, step)
        session.record(ok(first.candidate.agent_id), now + 1.0, first)
    assert 15 <= copies <= 400 * 0.05 + 1


def test_the_first_copy_of_a_window_is_free_and_then_they_have_a_budget_of_their_own() -> None:
    world = world_of()
    two_copies(world)
    session = open_call(world)
    first = sent(session, 0.0)
    assert session.next(1.0) == Await(), "two calls don't pay for two copies"
    assert world.router.shared(CAPABILITY).retries.left(1.0) == 3, "retries are paid for by others"
    session.record(RESET, 1.0, first)
    assert isinstance(session.next(1.0), Send)


def test_a_second_copy_that_wins_earns_no_retries() -> None:
    """It wasn't paid for as one."""
    world = world_of()
    session, first, second = two_copies(world)
    session.record(ok(second.candidate.agent_id), 1.0, second)
    session.record(Cancelled(), 1.0, first)
    assert world.router.shared(CAPABILITY).retries.left(1.0) == 3


def test_a_second_copy_draws_on_the_trees_purse_and_counts_as_an_attempt() -> None:
    purse = RetryAllowance(3)
    world = world_of(5)
    session, first, second = two_copies(world, allowance=purse, retry=RetryConfig(max_attempts=3, base_s=0.0))
    # One went along with the first copy, one is the second copy, and the half of the last one, rounded down, is 0.
    assert (first.retry_allowance, second.retry_allowance, purse.left) == (1, 0, 1)
    session.record(RESET, 1.5, first)
    session.record(RESET, 1.5, second)
    third = sent(session, 1.5)
    session.record(RESET, 1.6, third)
    end = session.next(1.6)
    assert isinstance(end, Raise)
    assert [attempt.number for attempt in end.error.attempts] == [1, 2, 3]


def test_with_two_attempts_in_all_two_copies_are_all() -> None:
    session, first, second = two_copies(world_of(5), retry=RetryConfig(max_attempts=2, base_s=0.0))
    session.record(RESET, 1.5, first)
    assert session.next(1.5) == Await()
    session.record(RESET, 1.6, second)
    assert isinstance(session.next(1.6), Raise)


def test_a_full_tier_sends_no_second_copy() -> None:
    session = open_call(world_of(per_tier=1))
    sent(session, 0.0)
    assert session.next(1.0) == Await()


# --- who wins ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("winner", ["first", "second"])
def test_the_first_answer_wins_and_the_other_copy_gives_everything_back(winner: str) -> None:
    world = world_of()
    session, first, second = two_copies(world)
    assert (world.in_flight(), world.router.in_flight) == (2, {"interactive": 2})
    wins, loses = (first, second) if winner == "first" else (second, first)
    session.record(ok(wins.candidate.agent_id), 1.2, wins)
    end = session.next(1.2)
    assert isinstance(end, Return)
    assert end.reply.agent_id == wins.candidate.agent_id
    assert [(a.number, a.outcome) for a in end.attempts] == [(wins.number, "ok")]
    session.record(Cancelled(), 1.2, loses)
    assert session.next(9.0) is end
    assert (world.in_flight(), world.router.in_flight) == (0, {})
    for candidate in (first.candidate, second.candidate):
        assert (candidate.learnt.in_flight, candidate.learnt.age_s(99.0)) == (0, 0.0)
    with pytest.raises(RuntimeError, match="under way"):
        session.record(Cancelled(), 1.2, loses)


def test_the_breaker_of_who_was_slower_hears_nothing_but_its_latency_is_learnt_from() -> None:
    world = world_of()
    session, first, second = two_copies(world)
    session.record(ok(second.candidate.agent_id), 1.0, second)
    session.record(Cancelled(), 1.0, first)
    slower = first.candidate
    assert slower.instance.breaker.counts(1.0) == (0, 0)
    assert slower.learnt.success.at(1.0) == 1.0
    assert slower.latency.at(1.0) == pytest.approx(1.0), "it would have taken longer still"
    assert slower.latency.failed_s == 0.0
    assert second.candidate.latency.at(1.0) == pytest.approx(0.04)


def test_a_copy_that_was_cancelled_sooner_than_it_usually_answers_teaches_nothing() -> None:
    world = world_of()
    session, first, second = two_copies(world)
    second.candidate.latency.observe(0.5, 0.96)
    session.record(ok(first.candidate.agent_id), 0.97, first)
    session.record(Cancelled(), 0.97, second)
    assert second.candidate.latency.samples == 1
    assert second.candidate.latency.mean_s == pytest.approx(0.5)


def test_a_caller_that_gives_up_teaches_how_long_it_has_waited_for_each_and_nothing_of_their_health() -> None:
    world = world_of()
    session, first, second = two_copies(world)
    session.record(Cancelled(), 2.0, first)
    session.record(Cancelled(), 2.0, second)
    assert isinstance(session.next(2.0), Raise)
    for send, waited_s in ((first, 2.0), (second, 2.0 - 0.96)):
        assert send.candidate.latency.at(2.0) == pytest.approx(waited_s)
        assert send.candidate.latency.failed_s == 0.0
        assert send.candidate.learnt.success.at(2.0) == 1.0
        assert send.candidate.instance.breaker.counts(2.0) == (0, 0)
    assert world.in_flight() == 0


def test_a_probe_that_was_outrun_leaves_its_place_to_the_next_call() -> None:
    world = world_of(2)
    breaker = world.index.instances["a0"].breaker
    breaker.state, breaker.until = BreakerState.OPEN, 0.0
    session, first, second = two_copies(world)
    assert first.candidate.agent_id == "a0", "the probe goes first"
    session.record(ok("a1"), 1.0, second)
    session.record(Cancelled(), 1.0, first)
    assert breaker.state is BreakerState.HALF_OPEN
    assert breaker.available(1.0)


# --- when one fails ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("failed", ["first", "second"])
@pytest.mark.parametrize("how", [RESET, REFUSED, rejected(503)], ids=["lost", "refused", "503"])
def test_when_one_copy_fails_the_other_is_waited_for(failed: str, how: LostAnswer) -> None:
    world = world_of()
    session, first, second = two_copies(world)
    fails, other = (first, second) if failed == "first" else (second, first)
    session.record(how, 1.2, fails)
    assert session.next(1.2) == Await()
    assert world.in_flight() == 1
    session.record(ok(other.candidate.agent_id), 1.5, other)
    end = session.next(1.5)
    assert isinstance(end, Return)
    assert [attempt.number for attempt in end.attempts] == [fails.number, other.number]
    assert world.in_flight() == 0


def test_when_both_fail_the_usual_rules_hold() -> None:
    world = world_of(3)
    session, first, second = two_copies(world, allowance=RetryAllowance(9))
    session.record(RESET, 1.2, first)
    session.record(RESET, 1.3, second)
    third = sent(session, 1.3)
    tried = {first.candidate.agent_id, second.candidate.agent_id, third.candidate.agent_id}
    assert tried == {"a0", "a1", "a2"}
    session.record(RESET, 1.4, third)
    end = session.next(1.4)
    assert isinstance(end, Raise)
    assert isinstance(end.error, NoHealthyAgent)
    assert len(end.error.attempts) == 3


def test_an_error_that_any_instance_would_give_ends_the_call_though_another_copy_is_under_way() -> None:
    world = world_of()
    session, first, second = two_copies(world)
    session.record(rejected(500, "ValueError", retryable=False), 1.2, second)
    end = session.next(1.2)
    assert isinstance(end, Raise)
    assert isinstance(end.error, RemoteError)
    session.record(Cancelled(), 1.2, first)
    assert session.next(1.3) is end
    assert first.candidate.latency.at(1.2) == pytest.approx(1.2), "it would have taken longer still"
    assert world.in_flight() == 0


def test_after_both_of_two_instances_failed_a_pause_is_a_pause() -> None:
    world = world_of(2)
    retry = RetryConfig(base_s=1.0, max_attempts=3)
    session, first, second = two_copies(world, retry=retry, allowance=RetryAllowance(9))
    session.record(RESET, 1.2, first)
    assert session.next(1.2) == Await()
    session.record(RESET, 1.2, second)
    step = session.next(1.2)
    assert isinstance(step, Wait)
    assert 0 < step.seconds <= 3.0


def test_an_attempt_that_is_recorded_must_be_named_while_two_are_under_way() -> None:
    session, first, _ = two_copies(world_of())
    with pytest.raises(RuntimeError, match="no such attempt"):
        session.record(ok("a0"), 1.0)
    session.record(RESET, 1.0, first)
    session.record(ok("a0"), 1.1)
    assert isinstance(session.next(1.1), Return)


def test_what_a_decision_on_a_second_copy_was_made_of_is_kept() -> None:
    world = world_of()
    two_copies(world)
    first, second = world.router.decisions.latest()
    assert (first.rule, second.rule) == ("single", "second copy")
    assert (first.attempt, second.attempt) == (1, 2)
    (slow,) = [seen for seen in second.seen if seen.agent_id == first.chosen]
    assert slow.in_flight == 1
    assert slow.waiting_s == pytest.approx(0.96)
