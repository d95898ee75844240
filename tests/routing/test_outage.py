"""All calls of a capability fail: they wait, one looks whether it is over, and they are let go in steps."""

from __future__ import annotations

import heapq
import itertools
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_reach.config import RetryConfig
from agent_reach.errors import DeadlineExceeded, NoHealthyAgent, OutcomeUnknown, ReachError, RemoteError
from agent_reach.routing.budget import RetryAllowance
from agent_reach.routing.outage import Outage, OutageState
from agent_reach.routing.outcomes import Cancelled, LostAnswer, Outcome, Unsent
from agent_reach.routing.session import CallSession
from agent_reach.routing.steps import Await, Raise, Return, Send, Wait
from tests.routing.world import CAPABILITY, World, agent, ok, rejected

REFUSED = Unsent("connect", "connection refused")
RESET = LostAnswer("connection reset")
ONCE = RetryConfig(max_attempts=1)


def rng() -> random.Random:
    return random.Random(1)


def fail(outage: Outage, times: int, now: float = 0.0) -> None:
    for _ in range(times):
        outage.failed(now, rng())


def down(now: float = 0.0) -> Outage:
    outage = Outage()
    fail(outage, 20, now)
    return outage


def recovering(now: float = 0.0) -> Outage:
    outage = down(now)
    outage.succeeded(now)
    return outage


def state_of(outage: Outage) -> OutageState:
    return outage.state


# --- the state machine ---------------------------------------------------------------------------------------


def test_twenty_failures_in_a_row_are_an_outage_and_nineteen_are_none() -> None:
    outage = Outage()
    fail(outage, 19)
    assert (state_of(outage), outage.wait_s(0.0)) == (OutageState.UP, 0.0)
    fail(outage, 1)
    assert state_of(outage) is OutageState.DOWN
    assert 0.25 <= outage.wait_s(0.0) <= 0.5


def test_a_success_in_between_begins_the_count_anew() -> None:
    outage = Outage()
    for _ in range(10):
        fail(outage, 19)
        outage.succeeded(0.0)
    assert (state_of(outage), outage.in_a_row) == (OutageState.UP, 0)


@pytest.mark.parametrize(("apart_s", "state"), [(30.0, OutageState.DOWN), (31.0, OutageState.UP)])
def test_failures_that_are_far_apart_are_no_outage(apart_s: float, state: OutageState) -> None:
    outage = Outage()
    for number in range(20):
        outage.failed(number * apart_s, rng())
    assert state_of(outage) is state


def test_a_probe_goes_out_every_quarter_to_half_a_second_and_no_client_in_step_with_another() -> None:
    gaps = set()
    for seed in range(50):
        outage, drawn = down(), random.Random(seed)
        outage.sent(10.0, drawn)
        gaps.add(outage.wait_s(10.0))
        assert outage.wait_s(10.0 + outage.wait_s(10.0)) == 0.0
    assert all(0.25 <= gap <= 0.5 for gap in gaps)
    assert len(gaps) > 40


def test_failures_while_it_is_down_put_no_probe_off() -> None:
    outage = down()
    due = outage.wait_s(0.0)
    fail(outage, 50, 0.2)
    assert outage.wait_s(0.2) == pytest.approx(due - 0.2)


def test_the_first_success_lets_two_go_and_each_more_two_more() -> None:
    outage = recovering()
    assert state_of(outage) is OutageState.RECOVERING
    for _ in range(2):
        assert outage.wait_s(0.1) == 0.0
        outage.sent(0.1, rng())
    assert outage.wait_s(0.1) == pytest.approx(4.9)
    outage.succeeded(0.2)
    for _ in range(2):
        assert outage.wait_s(0.2) == 0.0
        outage.sent(0.2, rng())
    assert outage.wait_s(0.2) > 0.0


def test_it_is_over_once_dozens_at_once_were_borne() -> None:
    outage, now, most = recovering(), 0.0, 0
    while state_of(outage) is OutageState.RECOVERING:
        now += 0.1
        gone = 0
        while outage.wait_s(now) == 0.0:
            outage.sent(now, rng())
            gone += 1
        for _ in range(gone):
            outage.succeeded(now)
            if state_of(outage) is OutageState.UP:
                break
        most = max(most, gone)
    assert 32 <= most <= 64
    assert now < 1.0


def test_it_is_over_after_five_seconds_however_few_calls_there_are() -> None:
    outage = recovering()
    for _ in range(2):
        outage.sent(0.0, rng())
    assert outage.wait_s(4.99) > 0.0
    assert outage.wait_s(5.0) == 0.0
    outage.succeeded(5.0)
    assert state_of(outage) is OutageState.UP


def test_while_it_recovers_twenty_failures_in_a_row_are_an_outage_again_and_a_few_are_none() -> None:
    outage = recovering()
    fail(outage, 19, 0.1)
    assert state_of(outage) is OutageState.RECOVERING
    fail(outage, 1, 0.1)
    assert state_of(outage) is OutageState.DOWN
    assert 0.25 <= outage.wait_s(0.1) <= 0.5


@given(
    st.lists(
        st.tuples(st.sampled_from(["sent", "succeeded", "failed", "all fail"]), st.floats(0, 3)), max_size=100
    ),
    st.randoms(use_true_random=False),
)
def test_whatever_happened_nobody_waits_longer_than_five_seconds_and_successes_end_it(
    steps: list[tuple[str, float]], drawn: random.Random
) -> None:
    """Sent without asking, too, as pinned calls are."""
    outage, now = Outage(), 0.0
    for what, seconds in steps:
        now += seconds
        if what == "sent":
            outage.sent(now, drawn)
        elif what == "succeeded":
            outage.succeeded(now)
        else:
            for _ in range(20 if what == "all fail" else 1):
                outage.failed(now, drawn)
        assert 0.0 <= outage.wait_s(now) <= (0.5 if outage.state is OutageState.DOWN else 5.0)
    for _ in range(100):
        now += outage.wait_s(now)
        assert outage.wait_s(now) == 0.0
        outage.sent(now, drawn)
        now += 0.1
        outage.succeeded(now)
    assert state_of(outage) is OutageState.UP


# --- many calls ------------------------------------------------------------------------------------------------


@dataclass
class Played:
    """What became of one call."""

    session: CallSession
    started: float
    sends: list[float] = field(default_factory=list)
    end: Return | Raise | None = None
    ended: float = 0.0
    # Counts its waits, so that a timer of an earlier one is known to be out of date.
    turn: int = 0

    @property
    def error(self) -> ReachError:
        assert isinstance(self.end, Raise), self.end
        return self.end.error


def drive(
    world: World,
    starts: Sequence[float],
    answer: Callable[[float], Outcome],
    *,
    took_s: float = 0.02,
    deadline_s: float = 30.0,
    **plan: Any,
) -> list[Played]:
    """Play calls that start at these times to their ends; an attempt gets `answer(when it ends)`. As in the client,
    a call that waits for a place is asked again when any call ended.
    """
    calls = [Played(world.session(now=at, deadline=at + deadline_s, **plan), at) for at in starts]
    order = itertools.count()
    events: list[tuple[float, int, Played, int, Send | None]] = []
    waiting: dict[int, Played] = {}
    for call in calls:
        heapq.heappush(events, (call.started, next(order), call, 0, None))

    def ask(call: Played, now: float) -> None:
        call.turn += 1
        waiting.pop(id(call), None)
        step = call.session.next(now)
        match step:
            case Send():
                call.sends.append(now)
                heapq.heappush(events, (now + min(took_s, step.timeout_s), next(order), call, call.turn, step))
            case Wait(seconds, until_place):
                assert seconds > 0
                heapq.heappush(events, (now + seconds, next(order), call, call.turn, None))
                if until_place:
                    waiting[id(call)] = call
            case Return() | Raise():
                call.end, call.ended = step, now
            case Await():
                raise AssertionError("nothing is under way")

    while events:
        now, _, call, turn, sent = heapq.heappop(events)
        if sent is not None:
            call.session.record(answer(now), now, sent)
            for asked in (call, *list(waiting.values())):
                ask(asked, now)
        elif turn == call.turn:
            ask(call, now)
    return calls


def world_of(count: int = 3, *, idempotent: bool = True, seed: int = 1) -> World:
    return World(*(agent(f"a{n}", idempotent=idempotent) for n in range(count)), seed=seed)


def nothing_is_left(world: World) -> bool:
    learnt = [candidate.learnt.began for candidate in world.index.lookup(CAPABILITY).candidates]
    return world.in_flight() == 0 and world.router.in_flight == {} and not any(learnt)


def outage_of(world: World) -> Outage:
    return world.router.shared(CAPABILITY).outage


def knock_out(world: World, now: float = 0.0) -> None:
    """Twenty calls failed, and the first probe is due within half a second."""
    fail(outage_of(world), 20, now)


@pytest.mark.parametrize(
    ("failure", "rate"),
    [(RESET, 20), (REFUSED, 20), (rejected(503), 20), (RESET, 100)],
    ids=["lost", "refused", "503", "many calls"],
)
def test_when_everything_fails_there_are_fewer_attempts_than_calls(failure: Outcome, rate: int) -> None:
    """Ten seconds of calls: until twenty failed all go, and then four probes a second at the most."""
    world = world_of()
    calls = drive(world, [n / rate for n in range(10 * rate)], lambda now: failure)
    attempts = sum(len(call.sends) for call in calls)
    assert attempts <= 20 + 20 + 4 * 15.5
    assert attempts < 0.6 * len(calls)
    assert all(isinstance(call.end, Raise) for call in calls)
    assert all(call.ended <= call.started + 5.0 + 0.02 + 1e-9 for call in calls), (
        "nobody waits longer than patience"
    )
    assert all(len(call.error.attempts) == len(call.sends) for call in calls)
    assert nothing_is_left(world)


def test_whoever_waits_is_answered_soon_after_it_is_over() -> None:
    """Down for six seconds. All that had patience left when the next probe went out get their answer."""
    for seed in range(3):
        world = world_of(seed=seed)
        calls = drive(world, [n / 20 for n in range(200)], lambda now: RESET if now < 6.0 else ok())
        first = min(call.ended for call in calls if isinstance(call.end, Return))
        assert first <= 6.0 + 0.5 + 0.02 + 1e-9, "one probe interval"
        for call in calls:
            if call.started + 5.0 > first + 0.2:
                assert isinstance(call.end, Return), call
                assert call.ended <= max(first + 0.2, call.started + 0.2)
            elif call.started + 5.0 < 6.0:
                assert isinstance(call.end, Raise)
        assert outage_of(world).state is OutageState.UP
        assert nothing_is_left(world)


def test_those_that_waited_are_let_go_in_steps_that_double_and_not_all_at_once() -> None:
    world = world_of()
    knock_out(world)
    calls = drive(world, [0.0] * 300, lambda now: ok(), took_s=0.1)
    assert all(isinstance(call.end, Return) and len(call.sends) == 1 for call in calls)
    rounds: dict[float, int] = {}
    for call in calls:
        at = round(call.sends[0], 6)
        rounds[at] = rounds.get(at, 0) + 1
    sizes = [rounds[at] for at in sorted(rounds)]
    assert sizes[:6] == [1, 2, 4, 8, 16, 32]
    assert sum(sizes[6:]) == 300 - 63
    assert max(call.ended for call in calls) < 0.5 + 10 * 0.1
    assert nothing_is_left(world)


def test_while_it_is_down_one_call_at_a_time_goes_out() -> None:
    world = world_of()
    knock_out(world)
    calls = drive(world, [0.0] * 50, lambda now: RESET, took_s=0.01)
    sends = sorted(at for call in calls for at in call.sends)
    assert all(0.25 <= later - earlier <= 0.5 + 1e-9 for earlier, later in itertools.pairwise(sends)), sends
    assert 9 <= len(sends) <= 20


@pytest.mark.parametrize("seed", range(2))
def test_a_capability_that_fails_six_times_in_ten_is_not_down(seed: int) -> None:
    world, dice = world_of(seed=seed), random.Random(seed)
    times = [n / 100 for n in range(1500)]
    calls = drive(world, times, lambda now: RESET if dice.random() < 0.6 else ok(), retry=ONCE)
    late = [call for call in calls if call.ended - call.started > 0.1]
    assert len(late) < 15, "a run of twenty by chance ends with the first success"
    succeeded = sum(isinstance(call.end, Return) for call in calls) / len(calls)
    assert succeeded == pytest.approx(0.4, abs=0.05)


def test_five_seconds_after_the_first_success_nobody_is_held_though_most_calls_go_on_failing() -> None:
    for seed in range(3):
        world, dice, succeeded = world_of(seed=seed), random.Random(seed), list[float]()
        knock_out(world)

        def answer(now: float, dice: random.Random = dice, succeeded: list[float] = succeeded) -> Outcome:
            if dice.random() < 0.6:
                return RESET
            succeeded.append(now)
            return ok()

        calls = drive(world, [n / 20 for n in range(300)], answer, retry=ONCE)
        assert outage_of(world).state is OutageState.UP
        held = [call.started for call in calls if call.ended - call.started > 0.1]
        assert max(held) <= succeeded[0] + 5.0


# --- who is held, and who isn't --------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["pinned", "without patience"])
def test_a_call_that_is_not_held_goes_out_at_once_and_fails(how: str) -> None:
    world = world_of(1)
    knock_out(world)
    plan: dict[str, Any] = {"pinned": "a0"} if how == "pinned" else {"retry": RetryConfig(patience_s=0.0)}
    (call,) = drive(world, [0.0], lambda now: RESET, **plan)
    assert call.sends[0] == 0.0
    assert len(call.sends) == 3
    assert "whichever instance they went to" not in str(call.error)
    assert nothing_is_left(world)


def test_a_call_waits_as_long_as_its_own_settings_say() -> None:
    for patience_s in (0.1, 2.0, 9.0):
        world = world_of()
        knock_out(world)
        # A probe of another call is under way all the time, so that this one is never sent.
        session = world.session(retry=RetryConfig(patience_s=patience_s))
        now = 0.0
        while isinstance(step := session.next(now), Wait):
            now += step.seconds
            outage_of(world).sent(now, world.rng)
        assert isinstance(step, Raise)
        assert now == pytest.approx(patience_s)


def test_another_capability_of_the_same_instances_is_not_held() -> None:
    world = World(*(agent(f"a{n}", [CAPABILITY, "other.thing.v1"]) for n in range(3)))
    knock_out(world)
    assert isinstance(world.session(capability="other.thing.v1").next(0.0), Send)
    assert isinstance(world.session().next(0.0), Wait)


@pytest.mark.parametrize("before", [None, REFUSED], ids=["never sent", "refused"])
def test_a_call_that_is_not_idempotent_may_wait_as_long_as_nothing_ran(before: Outcome | None) -> None:
    world = world_of(idempotent=False)
    session = world.session()
    if before is not None:
        assert isinstance(session.next(0.0), Send)
        session.record(before, 0.0)
    knock_out(world)
    step = session.next(0.0)
    assert isinstance(step, Wait)
    assert step.until_place
    assert isinstance(session.next(step.seconds), Send)
    session.record(ok(), 1.0)
    assert isinstance(session.next(1.0), Return)


def test_one_that_may_have_run_is_not_repeated_by_waiting_either() -> None:
    world = world_of(idempotent=False)
    session = world.session()
    assert isinstance(session.next(0.0), Send)
    knock_out(world)
    session.record(RESET, 0.1)
    step = session.next(0.1)
    assert isinstance(step, Raise)
    assert isinstance(step.error, OutcomeUnknown)


@pytest.mark.parametrize("why", ["last attempt", "no retry left in the tree"])
def test_a_call_that_may_not_be_repeated_ends_with_its_failure_and_doesnt_wait(why: str) -> None:
    world = world_of()
    retry, purse = (ONCE, 5) if why == "last attempt" else (RetryConfig(), 0)
    session = world.session(retry=retry, allowance=RetryAllowance(purse))
    assert isinstance(session.next(0.0), Send)
    knock_out(world)
    session.record(RESET, 0.1)
    assert isinstance(session.next(0.1), Raise)


def test_a_repeat_waits_too_and_takes_one_of_the_trees_retries_and_none_of_the_capabilitys() -> None:
    world, purse = world_of(), RetryAllowance(2)
    session = world.session(allowance=purse)
    assert isinstance(session.next(0.0), Send)
    knock_out(world)
    session.record(RESET, 0.1)
    step = session.next(0.1)
    assert isinstance(step, Wait)
    assert step.until_place
    assert world.router.shared(CAPABILITY).retries.left(0.1) == 3
    now = 0.1 + step.seconds
    assert isinstance(session.next(now), Send)
    session.record(ok(), now + 0.1)
    assert isinstance(session.next(now + 0.1), Return)
    assert purse.left == 0, "one went along with the first attempt and was lost, one was this repeat"
    assert world.router.shared(CAPABILITY).retries.left(1.0) == 3, "what cost nothing of it earns nothing"


# --- how it ends -------------------------------------------------------------------------------------------------


def test_the_deadline_comes_before_patience() -> None:
    world = world_of()
    knock_out(world)
    calls = drive(world, [0.0] * 30, lambda now: RESET, deadline_s=2.0)
    unsent = [call for call in calls if not call.sends]
    assert len(unsent) > 10
    for call in unsent:
        assert isinstance(call.error, DeadlineExceeded)
        assert call.error.phase == "pick"
    assert all(call.ended <= 2.0 + 1e-9 for call in calls)
    assert nothing_is_left(world)


def test_patience_counts_from_the_start_of_the_call_and_not_from_its_failure() -> None:
    world = world_of()
    session = world.session()
    assert isinstance(session.next(0.0), Send)
    knock_out(world, 4.75)
    session.record(RESET, 4.9)
    step = session.next(4.9)
    assert isinstance(step, Wait)
    assert step.seconds == pytest.approx(0.1)
    assert isinstance(session.next(5.0), Raise)


def waited_in_vain(failure: Outcome | None) -> ReachError:
    world = world_of()
    session = world.session()
    now = 0.0
    if failure is not None:
        assert isinstance(session.next(0.0), Send)
        session.record(failure, 0.0)
    knock_out(world)
    while isinstance(step := session.next(now), Wait):
        now += step.seconds
        outage_of(world).sent(now, world.rng)
    assert isinstance(step, Raise)
    assert now == pytest.approx(5.0)
    assert nothing_is_left(world)
    return step.error


@pytest.mark.parametrize(
    ("failure", "expected", "text"),
    [
        (RESET, NoHealthyAgent, "connection reset"),
        (LostAnswer("no answer", timed_out=True), DeadlineExceeded, "no answer in time"),
        (rejected(500, "KeyError"), RemoteError, "KeyError: no"),
        (REFUSED, NoHealthyAgent, "connection refused"),
    ],
    ids=["lost", "timeout", "500", "refused"],
)
def test_one_that_waited_in_vain_ends_with_its_last_failure_and_says_that_it_waited(
    failure: Outcome, expected: type[ReachError], text: str
) -> None:
    error = waited_in_vain(failure)
    assert type(error) is expected
    assert text in str(error)
    assert re.search(r"so did the last 2\d calls, whichever instance they went to", str(error))
    assert len(error.attempts) == 1


def test_one_that_was_never_sent_says_that_nothing_ran_and_why_it_was_held() -> None:
    error = waited_in_vain(None)
    assert type(error) is NoHealthyAgent
    assert error.attempts == ()
    assert "the last 20 calls of knowledge.retrieve.v1 failed" in str(error)
    assert "waited 5 s" in str(error)
    assert "Nothing was executed" in str(error)


# --- what counts ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "outcome",
    [
        Cancelled(),
        rejected(422, "InvalidPayload", executed=False, retryable=False),
        rejected(429, "Overloaded", executed=False, retryable=False),
        Unsent("pool", "no connection free", local=True),
    ],
    ids=["cancelled", "invalid", "overloaded", "pool"],
)
def test_what_is_nobodys_failure_neither_begins_an_outage_nor_ends_one(outcome: Outcome) -> None:
    world = world_of()
    for number in range(40):
        session = world.session(retry=ONCE, now=number * 0.01)
        assert isinstance(session.next(number * 0.01), Send)
        session.record(outcome, number * 0.01)
    assert outage_of(world).in_a_row == 0
    knock_out(world, 1.0)
    probe = world.session(retry=ONCE, now=1.5)
    assert isinstance(probe.next(1.5), Send)
    probe.record(outcome, 1.6)
    assert outage_of(world).state is OutageState.DOWN
    assert isinstance(world.session(now=2.0).next(2.0), Send), "the next probe goes all the same"


def test_failures_of_all_instances_together_are_counted_and_attempts_and_not_calls() -> None:
    world = world_of(5)
    for number in range(4):
        for name in range(5):
            assert outage_of(world).state is OutageState.UP
            session = world.session(pinned=f"a{name}", retry=ONCE, now=number * 0.1)
            assert isinstance(session.next(number * 0.1), Send)
            session.record(RESET, number * 0.1)
    assert outage_of(world).state is OutageState.DOWN
