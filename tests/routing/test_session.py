"""One call's decisions: where to, how long, again or not, and how it ends."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_reach.config import BulkheadConfig, EjectionConfig, ReachConfig, RetryConfig
from agent_reach.errors import (
    AgentNotFound,
    DeadlineExceeded,
    Forbidden,
    InvalidPayload,
    InvalidReply,
    NoHealthyAgent,
    OutcomeUnknown,
    Overloaded,
    ReachError,
    RemoteError,
    Unauthorized,
)
from agent_reach.routing.breaker import BreakerState
from agent_reach.routing.budget import RetryAllowance
from agent_reach.routing.index import Remove, Upsert
from agent_reach.routing.outcomes import Cancelled, LostAnswer, Outcome, Rejected, Succeeded, Unreadable, Unsent
from agent_reach.routing.session import CallSession
from agent_reach.routing.steps import Await, CallPlan, Raise, Return, Send, Wait
from tests.routing.world import CAPABILITY, World, agent, ok, rejected

REFUSED = Unsent("connect", "connection refused")
RESET = LostAnswer("connection reset")
TIMED_OUT = LostAnswer("no answer", timed_out=True)


def sent(session: CallSession, now: float) -> Send:
    step = session.next(now)
    assert isinstance(step, Send), step
    return step


def play(session: CallSession, answers: dict[str, Outcome] | Outcome, now: float = 0.0, took: float = 0.01) -> Any:
    """Drive a call to its end; `answers` gives each instance's outcome. Returns (end, agent ids tried, time)."""
    tried: list[str] = []
    while True:
        step = session.next(now)
        match step:
            case Send():
                tried.append(step.candidate.agent_id)
                now += min(took, step.timeout_s)
                answer = answers[tried[-1]] if isinstance(answers, dict) else answers
                session.record(answer, now)
            case Wait(seconds):
                assert seconds > 0
                now += seconds
            case Return() | Raise():
                return step, tried, now


def error_of(end: Return | Raise) -> ReachError:
    assert isinstance(end, Raise), end
    return end.error


# --- success and refusal -----------------------------------------------------------------------------------


def test_a_good_answer_ends_the_call_and_gives_every_permit_back() -> None:
    world = World(agent("a"))
    end, tried, _ = play(world.session(), ok("a"))
    assert isinstance(end, Return)
    assert [a.outcome for a in end.attempts] == ["ok"]
    assert (tried, world.in_flight()) == (["a"], 0)


def test_a_refused_connection_goes_elsewhere_at_once_even_if_not_idempotent() -> None:
    """C06: nothing was sent, so another instance may have it; no back-off, and it isn't charged as an attempt."""
    world = World(*(agent(f"a{n}", idempotent=False) for n in range(5)))
    answers: dict[str, Outcome] = dict.fromkeys(("a0", "a1", "a2", "a3"), REFUSED)
    answers["a4"] = ok("a4")
    for _ in range(50):
        world = World(*(agent(f"a{n}", idempotent=False) for n in range(5)))
        end, tried, now = play(world.session(), answers, took=0.0)
        assert isinstance(end, Return)
        assert len(set(tried)) == len(tried)
        assert now == 0.0


def test_when_nothing_can_be_reached_the_error_says_so_and_dials_stay_bounded() -> None:
    world = World(*(agent(f"a{n}") for n in range(4)))
    end, tried, _ = play(world.session(), REFUSED)
    error = error_of(end)
    assert isinstance(error, NoHealthyAgent)
    assert "connection refused" in str(error)
    assert "Nothing was executed" in str(error)
    assert len(tried) <= 4 + 3
    assert {a.agent_id for a in error.attempts} == {"a0", "a1", "a2", "a3"}


def test_a_lone_instance_is_tried_again_after_backing_off() -> None:
    """T04: alone, A is retried after back-off; no hang, and no more than three attempts."""
    world = World(agent("a"))
    end, tried, now = play(world.session(), rejected(503))
    assert isinstance(error_of(end), RemoteError)
    assert tried == ["a", "a", "a"]
    assert 0 < now < 1.0


def test_a_retry_never_lands_on_the_same_failing_peer_while_another_is_left() -> None:
    """T04: A always 503, B fine, idempotent: every call gets through."""
    for seed in range(200):
        world = World(agent("a"), agent("b"), seed=seed)
        end, tried, _ = play(world.session(retry=RetryConfig(max_attempts=2)), {"a": rejected(503), "b": ok("b")})
        assert isinstance(end, Return)
        assert tried in (["b"], ["a", "b"])


@pytest.mark.parametrize("failure", [RESET, TIMED_OUT, rejected(500), Unreadable("HTML")], ids=str)
def test_a_failure_is_repeated_elsewhere_at_once_and_a_pause_comes_only_when_all_were_tried(
    failure: Outcome,
) -> None:
    world = World(agent("a"), agent("b"))
    session = world.session(retry=RetryConfig(max_attempts=4), allowance=RetryAllowance(64))
    first = sent(session, 0.0)
    session.record(failure, 1.0)
    second = sent(session, 1.0)
    assert {first.candidate.agent_id, second.candidate.agent_id} == {"a", "b"}
    session.record(failure, 2.0)
    step = session.next(2.0)
    assert isinstance(step, Wait)
    assert not step.until_place, "it is a pause, not a queue"
    assert 0 < step.seconds <= 0.6


@pytest.mark.parametrize("why", ["full", "busy", "shut out", "pinned"])
def test_one_that_takes_no_calls_now_is_none_that_is_left_to_try(why: str) -> None:
    world = World(agent("a"), agent("b"))
    session = world.session(pinned="a" if why == "pinned" else None, preferred=("a",))
    assert sent(session, 0.0).candidate.agent_id == "a"
    other = world.index.lookup(CAPABILITY).candidates[1]
    if why == "full":
        other.instance.in_flight = 100
    elif why == "busy":
        other.learnt.busy_until = 99.0
    elif why == "shut out":
        open_breaker(world, "b")
    session.record(RESET, 0.5)
    step = session.next(0.5)
    assert isinstance(step, Wait)
    assert not step.until_place


# --- what may be repeated ----------------------------------------------------------------------------------


@pytest.mark.parametrize("lost", [RESET, TIMED_OUT], ids=["reset", "timeout"])
def test_a_lost_answer_is_repeated_only_if_idempotent(lost: LostAnswer) -> None:
    """T01."""
    end, tried, _ = play(World(agent("a", idempotent=False), agent("b", idempotent=False)).session(), lost)
    error = error_of(end)
    assert isinstance(error, OutcomeUnknown)
    assert error.agent_id == tried[0]
    assert len(tried) == 1
    end, tried, _ = play(World(agent("a"), agent("b")).session(), {"a": lost, "b": ok("b")})
    assert isinstance(end, Return)


@pytest.mark.parametrize(
    ("outcome", "expected"),
    [
        (rejected(422, "InvalidPayload", executed=False, retryable=False), InvalidPayload),
        (rejected(500, "ValueError", retryable=False), RemoteError),
        (rejected(401, "Unauthorized", executed=False, retryable=False), Unauthorized),
        (rejected(403, "Forbidden", executed=False, retryable=False), Forbidden),
        (rejected(504, "DeadlineExceeded", retryable=False), DeadlineExceeded),
        # Raised inside the handler by a nested call: not the caller's own payload, time or rights.
        (rejected(500, "InvalidPayload", retryable=False), RemoteError),
        (rejected(500, "DeadlineExceeded", retryable=False), RemoteError),
        (rejected(500, "Forbidden", retryable=False), RemoteError),
        (rejected(500, "InvalidResult", retryable=False), InvalidReply),
    ],
)
def test_what_another_instance_would_refuse_too_is_not_repeated(
    outcome: Outcome, expected: type[ReachError]
) -> None:
    end, tried, _ = play(World(agent("a"), agent("b")).session(), outcome)
    assert type(error_of(end)) is expected
    assert len(tried) == 1


def test_a_remote_error_carries_type_and_message() -> None:
    end, _, _ = play(World(agent("a")).session(), rejected(500, "KeyError", retryable=False))
    error = error_of(end)
    assert isinstance(error, RemoteError)
    assert (error.remote_type, error.remote_message, error.status, error.agent_id) == ("KeyError", "no", 500, "a")


@pytest.mark.parametrize("status", [502, 503, 504])
def test_a_proxys_error_leaves_the_outcome_of_a_non_idempotent_call_unknown(status: int) -> None:
    outcome = rejected(status, f"HTTP {status}")
    outcome = type(outcome)(status, outcome.error, enveloped=False)
    end, tried, _ = play(World(agent("a", idempotent=False), agent("b", idempotent=False)).session(), outcome)
    assert isinstance(error_of(end), OutcomeUnknown)
    assert len(tried) == 1


@pytest.mark.parametrize(("status", "kind"), [(504, "DeadlineExceeded"), (503, "NotStarted")])
def test_a_handler_that_its_agent_cut_short_leaves_the_outcome_unknown(status: int, kind: str) -> None:
    outcome = rejected(status, kind)
    end, tried, _ = play(World(agent("a", idempotent=False), agent("b", idempotent=False)).session(), outcome)
    assert isinstance(error_of(end), OutcomeUnknown)
    assert len(tried) == 1
    end, _, _ = play(World(agent("a"), agent("b")).session(), {"a": outcome, "b": ok("b")})
    assert isinstance(end, Return)


def test_an_unreadable_answer_is_repeated_elsewhere_if_idempotent() -> None:
    end, _, _ = play(World(agent("a"), agent("b")).session(), {"a": Unreadable("HTML"), "b": ok("b")})
    assert isinstance(end, Return)
    end, tried, _ = play(World(agent("a", idempotent=False)).session(), Unreadable("HTML"))
    assert isinstance(error_of(end), InvalidReply)
    assert len(tried) == 1


# --- overload ------------------------------------------------------------------------------------------------


def overloaded(ms: int | None = None) -> Outcome:
    return rejected(503, "Overloaded", executed=False, state="overloaded", retry_after_ms=ms)


def test_an_overloaded_instance_is_left_for_another_at_once_and_does_not_trip() -> None:
    """B03: 429 and 'I am full' back off without tripping."""
    for _ in range(50):
        world = World(agent("a", idempotent=False), agent("b", idempotent=False))
        end, tried, _ = play(world.session(), {"a": overloaded(2000), "b": ok("b")})
        assert isinstance(end, Return)
        assert tried[-1] == "b"
        assert world.index.instances["a"].breaker.state is BreakerState.CLOSED


def test_retry_after_is_waited_for_if_it_ends_in_time() -> None:
    """T05."""
    world = World(agent("a"))
    session = world.session()
    sent(session, 0.0)
    session.record(overloaded(2000), 0.0)
    step = session.next(1.0)
    assert isinstance(step, Wait)
    assert step.seconds == pytest.approx(1.0)
    assert isinstance(session.next(2.01), Send)


def test_a_retry_after_past_the_deadline_ends_the_call_now_and_says_when() -> None:
    world = World(agent("a"))
    end, tried, now = play(world.session(deadline=5.0), overloaded(3_600_000))
    error = error_of(end)
    assert isinstance(error, Overloaded)
    # It named an hour; a wrong number must not keep a lone instance dark for that long.
    assert error.retry_after_s == pytest.approx(60, abs=1)
    assert len(tried) == 1
    assert now < 1.0


def test_a_draining_instance_is_avoided_but_not_shut_out() -> None:
    world = World(agent("a"), agent("b"))
    session = world.session()
    first = sent(session, 0.0)
    session.record(ok(first.candidate.agent_id, state="draining"), 0.0)
    others = {play(world.session(), ok())[1][0] for _ in range(20)}
    assert first.candidate.agent_id not in others
    other = ({"a", "b"} - {first.candidate.agent_id}).pop()
    world.index.apply(Remove(other, 9), 0.0)
    assert play(world.session(), ok())[1] == [first.candidate.agent_id]


def test_a_full_instance_is_waited_for_briefly_then_refused_locally() -> None:
    """H03: the surplus to a hanging peer fails fast and opens no breaker."""
    world = World(agent("a"), config=ReachConfig(bulkheads=BulkheadConfig(per_instance=2)))
    held = [world.session() for _ in range(2)]
    for session in held:
        sent(session, 0.0)
    end, tried, now = play(world.session(), ok())
    assert isinstance(error_of(end), Overloaded)
    assert tried == []
    assert 0.9 < now < 1.2
    waiting = world.session()
    assert isinstance(waiting.next(0.0), Wait)
    held[0].record(ok(), 0.1)
    assert isinstance(waiting.next(0.1), Send)


# --- time ----------------------------------------------------------------------------------------------------


def test_an_attempt_gets_its_capabilitys_time_and_never_more_than_is_left() -> None:
    world = World(agent("a", timeout="heavy"))
    assert sent(world.session(deadline=30.0), 0.0).timeout_s == 10.0
    assert sent(world.session(deadline=4.0), 0.0).timeout_s == 4.0


def test_with_an_explicit_timeout_the_last_attempt_may_use_all_that_is_left() -> None:
    world = World(agent("a", timeout="light", idempotent=False))
    assert sent(world.session(deadline=20.0, explicit_timeout=True), 0.0).timeout_s == 20.0
    world = World(agent("a", timeout="light"))
    assert sent(world.session(deadline=20.0, explicit_timeout=True), 0.0).timeout_s == 3.0
    once = RetryConfig(max_attempts=1)
    assert sent(world.session(deadline=20.0, explicit_timeout=True, retry=once), 0.0).timeout_s == 20.0


def test_past_the_deadline_nothing_is_sent_and_the_error_says_in_which_phase() -> None:
    world = World(agent("a"))
    end = world.session(deadline=1.0).next(1.0)
    error = error_of(end)
    assert isinstance(error, DeadlineExceeded)
    assert error.phase == "pick"
    end, _, _ = play(world.session(deadline=1.0), TIMED_OUT, took=99.0)
    error = error_of(end)
    assert isinstance(error, DeadlineExceeded)
    assert error.phase == "answer"
    end, _, _ = play(world.session(deadline=1.0), Unsent("connect", "timed out", timed_out=True), took=99.0)
    error = error_of(end)
    assert isinstance(error, DeadlineExceeded)
    assert error.phase == "connect"


def test_no_back_off_is_begun_that_cannot_end_in_time() -> None:
    world = World(agent("a"), config=ReachConfig(retry=RetryConfig(base_s=50.0, max_s=50.0)))
    end, tried, now = play(world.session(deadline=0.5), RESET)
    assert isinstance(error_of(end), NoHealthyAgent)
    assert len(tried) == 1
    assert now < 0.1


# --- the tree's allowance, pins and routes -------------------------------------------------------------------


def test_retries_draw_from_the_call_trees_purse() -> None:
    """T05: what the tree has spent nobody else may spend."""
    purse = RetryAllowance(1)
    world = World(agent("a"), agent("b"))
    assert len(play(world.session(allowance=purse), RESET)[1]) == 2
    assert purse.left == 0
    assert len(play(world.session(allowance=purse), RESET)[1]) == 1


@pytest.mark.parametrize(
    ("outcome", "back"),
    [
        (ok("a", retry_allowance=1), 1),
        (ok("a"), 0),
        # A peer can't make us richer.
        (ok("a", retry_allowance=99), 2),
        (REFUSED, 2),
        (rejected(503, "Overloaded", executed=False), 2),
        (RESET, 0),
        (Unreadable("HTML"), 0),
        (Cancelled(), 0),
    ],
)
def test_the_purse_is_split_with_the_callee_and_comes_back_as_the_answer_says(outcome: Outcome, back: int) -> None:
    purse = RetryAllowance(5)
    session = World(agent("a")).session(allowance=purse)
    assert (sent(session, 0.0).retry_allowance, purse.left) == (2, 3)
    session.record(outcome, 0.1)
    retried = isinstance(session.next(0.1), Wait)
    assert purse.left + retried == 3 + back


def test_an_attempt_that_nothing_can_follow_takes_the_whole_purse_along() -> None:
    """Where we don't retry any more, those further down may."""
    world = World(agent("a", idempotent=False))
    assert sent(world.session(allowance=RetryAllowance(5)), 0.0).retry_allowance == 5
    world = World(agent("a"))
    once = RetryConfig(max_attempts=1)
    assert sent(world.session(allowance=RetryAllowance(5), retry=once), 0.0).retry_allowance == 5


@given(hops=st.integers(1, 6), purse=st.integers(0, 5), seed=st.integers(0, 1000))
def test_however_deep_the_tree_its_leaf_runs_once_and_then_as_often_as_the_root_allowed(
    hops: int, purse: int, seed: int
) -> None:
    """Each hop retries by the rules; the leaf fails, or hangs, each time; answers tell what is left, or don't."""
    rng = random.Random(seed)
    runs = 0

    def call(hop: int, allowance: RetryAllowance) -> Outcome:
        nonlocal runs
        if hop == hops:
            runs += 1
            return rng.choice([RESET, rejected(500)])
        session, now = World(agent("a"), agent("b"), seed=seed).session(allowance=allowance, deadline=1e9), 0.0
        while True:
            step = session.next(now)
            match step:
                case Send():
                    lent = RetryAllowance(step.retry_allowance)
                    outcome = call(hop + 1, lent)
                    if isinstance(outcome, Rejected) and rng.random() < 0.7:
                        outcome = dataclasses.replace(outcome, retry_allowance=lent.left)
                    session.record(outcome, now)
                case Wait(seconds):
                    now += seconds
                case Return() | Raise():
                    return rng.choice([RESET, rejected(500)])

    call(0, RetryAllowance(purse))
    assert 1 <= runs <= 1 + purse


def test_a_pinned_call_goes_to_that_instance_only() -> None:
    world = World(*(agent(f"a{n}") for n in range(5)))
    for _ in range(20):
        assert set(play(world.session(pinned="a3"), RESET)[1]) == {"a3"}


def test_a_routes_ranking_is_followed_and_left_when_it_fails() -> None:
    for seed in range(20):
        world = World(*(agent(f"a{n}") for n in range(5)), seed=seed)
        assert play(world.session(preferred=("a3", "a1")), ok())[1] == ["a3"]
        tried = play(world.session(preferred=("a3", "a1")), {"a3": REFUSED, "a1": ok("a1")})[1]
        assert tried == ["a3", "a1"]


def test_an_instance_that_left_during_the_call_is_not_tried_again() -> None:
    world = World(agent("a"))
    session = world.session()
    sent(session, 0.0)
    world.index.apply(Remove("a", 2), 0.0)
    session.record(REFUSED, 0.0)
    end, tried, _ = play(session, ok())
    error = error_of(end)
    assert isinstance(error, AgentNotFound)
    assert len(error.attempts) == 1
    assert tried == []


def test_an_instance_that_came_during_the_call_is_used() -> None:
    world = World(agent("a"))
    session = world.session()
    sent(session, 0.0)
    world.index.apply(Upsert(agent("b"), 2), 0.0)
    session.record(REFUSED, 0.0)
    assert play(session, ok("b"))[1] == ["b"]


# --- health --------------------------------------------------------------------------------------------------


def test_a_dead_instance_of_two_costs_its_callers_nothing_and_is_dialed_rarely() -> None:
    """C06: no caller notices; ten seconds of 20 calls/s dial the corpse five times at the most."""
    world = World(agent("dead", idempotent=False), agent("b", idempotent=False))
    dials = 0
    for call in range(200):
        now = call * 0.05
        end, tried, _ = play(world.session(now=now, deadline=100.0), {"dead": REFUSED, "b": ok("b")}, now=now)
        assert isinstance(end, Return)
        dials += tried.count("dead")
    assert 1 <= dials <= 5


def test_a_lone_instance_never_goes_dark() -> None:
    """B04."""
    world = World(agent("a"))
    for call in range(20):
        play(world.session(now=float(call), deadline=call + 30.0), rejected(500), now=float(call))
    assert world.index.instances["a"].breaker.state is BreakerState.CLOSED
    end, _, _ = play(world.session(now=50.0, deadline=80.0), ok("a"), now=50.0)
    assert isinstance(end, Return)


def test_all_shut_out_differs_from_nobody_there_and_says_until_when() -> None:
    config = ReachConfig(ejection=EjectionConfig(max_share=1.0, panic_share=0.0))
    world = World(agent("a"), agent("b"), config=config)
    world.index.lookup(CAPABILITY).candidates[1].learnt.busy_until = 1e9
    for _ in range(5):
        session = world.session(pinned="a", retry=RetryConfig(max_attempts=1))
        sent(session, 0.0)
        session.record(RESET, 0.0)
    world.index.apply(Remove("b", 9), 0.0)
    end, tried, _ = play(world.session(deadline=2.0), ok())
    error = error_of(end)
    assert isinstance(error, NoHealthyAgent)
    assert error.retry_after_s is not None
    assert 15 <= error.retry_after_s <= 30
    assert tried == []


@pytest.mark.parametrize(
    "outcome",
    [
        Cancelled(),
        rejected(400, "InvalidPayload", executed=False, retryable=False),
        rejected(404, "UnknownCapability", executed=False),
        rejected(422, "InvalidPayload", executed=False, retryable=False),
        rejected(429, "Overloaded", executed=False),
        Unsent("pool", "no connection free", local=True),
    ],
    ids=lambda outcome: str(getattr(outcome, "status", type(outcome).__name__)),
)
def test_what_is_not_the_instances_fault_never_shuts_it_out(outcome: Outcome) -> None:
    """B03, 20 times each on a healthy peer."""
    world = World(agent("a"), agent("b"))
    instance = world.index.instances["a"]
    for _ in range(20):
        session = world.session(pinned="a", retry=RetryConfig(max_attempts=1))
        sent(session, 0.0)
        session.record(outcome, 0.0)
    assert instance.breaker.state is BreakerState.CLOSED
    assert instance.breaker.counts(0.0) == (0, 0)


def test_a_caller_that_gave_a_millisecond_learnt_nothing_of_the_instance() -> None:
    """B03, last item; a second is enough to learn something."""
    world = World(agent("a"), agent("b"))
    for _ in range(20):
        play(world.session(deadline=0.001, pinned="a"), TIMED_OUT, took=0.001)
    assert world.index.instances["a"].breaker.state is BreakerState.CLOSED
    for _ in range(5):
        play(world.session(deadline=1.0, pinned="a"), TIMED_OUT, took=1.0)
    assert world.index.instances["a"].breaker.state is BreakerState.OPEN


def test_an_instance_that_fails_in_a_millisecond_attracts_no_load() -> None:
    """L01: with the breaker as good as off, the broken one of three gets less than a fair third."""
    world = World(agent("bad"), agent("b"), agent("c"), config=ReachConfig(ejection=EjectionConfig(max_share=0.0)))
    tried: list[str] = []
    for call in range(300):
        now = call * 0.005
        answers = {"bad": rejected(500, retryable=False), "b": ok("b"), "c": ok("c")}
        session = world.session(now=now, deadline=now + 30)
        step = sent(session, now)
        tried.append(step.candidate.agent_id)
        took = 0.001 if tried[-1] == "bad" else 0.05
        session.record(answers[tried[-1]], now + took)
    assert tried.count("bad") < 30


def test_a_breakers_change_is_told_once() -> None:
    world = World(agent("a"), agent("b"))
    told = []
    for _ in range(5):
        session = world.session(pinned="a", retry=RetryConfig(max_attempts=1))
        sent(session, 0.0)
        session.record(RESET, 0.0)
        told += session.take_transitions()
        assert session.take_transitions() == []
    assert [(agent_id, change.after) for agent_id, change in told] == [("a", BreakerState.OPEN)]


# --- anything at all -----------------------------------------------------------------------------------------

OUTCOMES: list[Outcome] = [
    ok(),
    REFUSED,
    Unsent("connect", "timed out", timed_out=True),
    Unsent("pool", "full", local=True),
    RESET,
    TIMED_OUT,
    Unreadable("HTML"),
    rejected(500),
    rejected(503),
    overloaded(300),
    overloaded(10_000_000),
    rejected(503, "Draining", executed=False, state="draining"),
    rejected(404, "UnknownCapability", executed=False),
    rejected(421, "Misdirected", executed=False),
    rejected(422, "InvalidPayload", executed=False, retryable=False),
    Cancelled(),
]


@given(
    count=st.integers(1, 5),
    idempotent=st.booleans(),
    attempts=st.integers(1, 4),
    deadline=st.floats(0.01, 40),
    seed=st.integers(0, 2**32),
    script=st.lists(st.tuples(st.sampled_from(OUTCOMES), st.floats(0, 20)), min_size=60, max_size=60),
    calls=st.integers(1, 4),
)
def test_whatever_happens_a_call_keeps_its_promises(
    count: int,
    idempotent: bool,
    attempts: int,
    deadline: float,
    seed: int,
    script: list[tuple[Outcome, float]],
    calls: int,
) -> None:
    """Never two permits, never more attempts than allowed, never past the deadline, never a second execution of
    what isn't idempotent, never a decision after the end; and every permit comes back.
    """
    world = World(*(agent(f"a{n}", idempotent=idempotent) for n in range(count)), seed=seed)
    now, script = 0.0, list(script)
    for _ in range(calls):
        end_at = now + deadline
        retry = RetryConfig(max_attempts=attempts)
        session = world.session(now=now, deadline=end_at, retry=retry)
        maybe_executed = sends = 0
        while script:
            step = session.next(now)
            match step:
                case Send():
                    sends += 1
                    assert world.in_flight() == 1
                    assert now < end_at
                    assert 0 < step.timeout_s <= end_at - now + 1e-9
                    outcome, took = script.pop()
                    now += min(took, step.timeout_s)
                    session.record(outcome, now)
                    unsafe = isinstance(outcome, LostAnswer | Unreadable | Succeeded) or (
                        getattr(getattr(outcome, "error", None), "executed", False)
                    )
                    maybe_executed += bool(unsafe)
                    assert world.in_flight() == 0
                    if isinstance(outcome, Cancelled):
                        assert isinstance(session.next(now), Raise)
                        break
                case Wait(seconds):
                    assert seconds > 0
                    now += seconds
                    assert now <= end_at + 1e-6
                case Return() | Raise():
                    assert session.next(now + 1000) is step
                    break
        assert maybe_executed <= (attempts if idempotent else 1)
        assert sends <= attempts + count
    assert world.in_flight() == 0


def test_while_an_attempt_is_under_way_no_second_one_begins() -> None:
    session = World(agent("a"), agent("b")).session()
    sent(session, 0.0)
    assert session.next(0.0) == Await()
    assert session.next(1000.0) == Await()
    session.record(ok("a"), 0.0)
    with pytest.raises(RuntimeError, match="under way"):
        session.record(ok("a"), 0.0)


def test_the_same_seed_gives_the_same_decisions() -> None:
    def trace(seed: int) -> list[str]:
        world = World(*(agent(f"a{n}") for n in range(8)), seed=seed)
        rng = random.Random(seed)
        return [play(world.session(), rng.choice([ok(), RESET, REFUSED]))[1][-1] for _ in range(50)]

    assert trace(3) == trace(3)
    assert trace(3) != trace(4)


# --- rules that are easy to lose -----------------------------------------------------------------------------


def open_breaker(world: World, agent_id: str, now: float = 0.0) -> None:
    for _ in range(5):
        session = world.session(pinned=agent_id, retry=RetryConfig(max_attempts=1), now=now, deadline=now + 30)
        sent(session, now)
        session.record(RESET, now)
    assert world.index.instances[agent_id].breaker.state is BreakerState.OPEN


def test_while_the_probe_is_out_a_call_waits_for_its_end_instead_of_failing() -> None:
    world = World(agent("a"), agent("b"))
    open_breaker(world, "a")
    world.index.lookup(CAPABILITY).candidates[1].learnt.busy_until = 1e9
    due = world.index.instances["a"].breaker.until
    probe = world.session(now=due, deadline=due + 30)
    sent(probe, due)
    other = world.session(now=due, deadline=due + 30)
    step = other.next(due)
    assert isinstance(step, Wait)
    assert step.until_place
    probe.record(ok("a"), due + 0.1)
    assert sent(other, due + 0.1).candidate.agent_id == "a"


def test_slow_start_begins_anew_when_a_breaker_closes() -> None:
    world = World(agent("a"), agent("b"))
    open_breaker(world, "a", now=100.0)
    due = world.index.instances["a"].breaker.until
    session = world.session(pinned="a", now=due, deadline=due + 30)
    sent(session, due)
    session.record(ok("a"), due + 0.1)
    assert world.index.instances["a"].warm_from == due + 0.1


def test_what_was_not_executed_goes_elsewhere_without_a_pause() -> None:
    for seed in range(20):
        world = World(agent("a"), agent("b"), seed=seed)
        end, tried, now = play(world.session(), {"a": overloaded(), "b": ok("b")}, took=0.0)
        assert isinstance(end, Return)
        assert (tried[-1], now) == ("b", 0.0)


def test_a_route_doesnt_override_a_breaker() -> None:
    world = World(agent("a"), agent("b"))
    open_breaker(world, "a")
    assert play(world.session(preferred=("a", "b")), ok("b"))[1] == ["b"]


@pytest.mark.parametrize(
    "refusal",
    [rejected(503, "Draining", executed=False, state="draining"), rejected(421, "Misdirected", executed=False)],
)
def test_a_refusal_that_cost_nobody_anything_is_free_and_the_instance_comes_last_from_then_on(
    refusal: Outcome,
) -> None:
    for seed in range(20):
        world = World(agent("a"), agent("b"), agent("c"), seed=seed)
        answers = {"a": refusal, "b": refusal, "c": ok("c")}
        end, tried, _ = play(world.session(allowance=RetryAllowance(0)), answers)
        assert isinstance(end, Return)
        for _ in range(10):
            assert play(world.session(), ok())[1][0] not in set(tried) - {"c"}


def test_a_good_answer_takes_back_that_an_instance_was_busy() -> None:
    world = World(agent("a"))
    session, other = world.session(), world.session()
    sent(other, 0.0)
    sent(session, 0.0)
    session.record(overloaded(30_000), 0.0)
    other.record(ok("a"), 0.1)
    assert play(world.session(), ok("a"))[1] == ["a"]


def test_no_more_calls_of_a_capability_are_in_flight_than_it_runs_and_queues() -> None:
    info = agent("a")
    info = info.model_copy(
        update={"capabilities": (info.capabilities[0].model_copy(update={"max_concurrency": 2}),)}
    )
    world = World(info)
    for _ in range(8):
        sent(world.session(), 0.0)
    step = world.session().next(0.0)
    assert isinstance(step, Wait)
    assert step.until_place


@pytest.mark.parametrize(
    ("timeout", "attempts", "total_s"),
    [("light", 3, 9.0), ("interactive", 3, 15.0), ("heavy", 9, 30.0), ("long", 3, 60.0), (0.5, 2, 1.0)],
)
def test_a_call_without_a_timeout_gets_its_capabilitys_time_for_each_attempt_up_to_30_s(
    timeout: str | float, attempts: int, total_s: float
) -> None:
    world = World(agent("a", timeout=timeout))
    plan = CallPlan.of(
        CAPABILITY,
        "r",
        world.index.lookup(CAPABILITY).candidates,
        started=100.0,
        timeout_s=None,
        left_s=float("inf"),
        retry=RetryConfig(max_attempts=attempts),
        timeouts=world.config.timeouts,
        allowance=None,
        pinned=None,
        preferred=(),
    )
    assert plan.deadline == 100.0 + total_s
    assert plan.allowance.left == attempts - 1


def test_a_nested_call_never_gets_more_time_or_retries_than_its_caller_has_left() -> None:
    world, purse = World(agent("a")), RetryAllowance(1)
    plan = CallPlan.of(
        CAPABILITY,
        "r",
        world.index.lookup(CAPABILITY).candidates,
        started=100.0,
        timeout_s=20.0,
        left_s=2.0,
        retry=RetryConfig(tree_allowance=0),
        timeouts=world.config.timeouts,
        allowance=purse,
        pinned=None,
        preferred=(),
    )
    assert (plan.deadline, plan.allowance) == (102.0, purse)
