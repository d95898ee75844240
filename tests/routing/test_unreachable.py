"""Where nothing listens: shut out at once, looked at again soon, and never a reason to overload the rest."""

from __future__ import annotations

import itertools

import pytest

from agent_reach.config import EjectionConfig, ReachConfig, RetryConfig
from agent_reach.errors import NoHealthyAgent
from agent_reach.routing import ejection
from agent_reach.routing.breaker import Breaker, BreakerState, Verdict
from agent_reach.routing.explain import explain
from agent_reach.routing.outcomes import Cancelled, LostAnswer, Outcome, Unsent
from agent_reach.routing.session import CallSession
from agent_reach.routing.steps import Raise, Return, Send, Wait
from tests.routing.world import CAPABILITY, World, agent, ok, rejected

REFUSED = Unsent("connect", "connection refused")
TIMED_OUT = Unsent("connect", "timed out", timed_out=True)
RESET = LostAnswer("connection reset")
CAP_OF_NONE = ReachConfig(ejection=EjectionConfig(max_share=0.0))


def world_of(count: int, config: ReachConfig | None = None, seed: int = 1) -> World:
    return World(*(agent(f"a{n}") for n in range(count)), config=config, seed=seed)


def ends(
    session: CallSession, bad: dict[str, Outcome], now: float = 0.0, took: float = 0.001
) -> tuple[Return | Raise, list[str], float]:
    """Drive a call to its end; who isn't bad answers."""
    tried = []
    while True:
        step = session.next(now)
        match step:
            case Send():
                tried.append(step.candidate.agent_id)
                now += took
                session.record(bad.get(tried[-1], ok(tried[-1])), now)
            case Wait(seconds):
                now += seconds
            case Return() | Raise():
                return step, tried, now


def dial(world: World, agent_id: str, outcome: Outcome, now: float, took: float = 0.0) -> None:
    """One attempt at this very instance."""
    session = world.session(
        pinned=agent_id, now=now, deadline=now + max(took, 30), retry=RetryConfig(max_attempts=1)
    )
    assert isinstance(session.next(now), Send)
    session.record(outcome, now + took)


def breaker_of(world: World, agent_id: str) -> Breaker:
    return world.index.instances[agent_id].breaker


@pytest.mark.parametrize("config", [None, CAP_OF_NONE], ids=["default cap", "cap of none"])
def test_one_refused_connection_shuts_out_at_once_and_asks_no_cap(config: ReachConfig | None) -> None:
    lengths = set()
    for seed in range(30):
        world = world_of(3, config, seed)
        dial(world, "a0", REFUSED, 100.0)
        breaker = breaker_of(world, "a0")
        assert (breaker.state, breaker.unreachable) == (BreakerState.OPEN, True)
        lengths.add(round(breaker.until - 100.0, 3))
        assert {ends(world.session(now=101.0, deadline=131.0), {}, 101.0)[1][0] for _ in range(20)} == {"a1", "a2"}
    assert all(2.5 <= length <= 5.0 for length in lengths)
    assert len(lengths) > 20, "clients don't look again in step"


def test_it_is_looked_at_again_after_times_that_double_up_to_the_longest() -> None:
    world, now, lengths = world_of(3), 100.0, []
    for _ in range(9):
        dial(world, "a0", REFUSED, now)
        lengths.append(breaker_of(world, "a0").until - now)
        now = breaker_of(world, "a0").until
    for times, length in enumerate(lengths):
        whole = min(5.0 * 2**times, 300.0)
        assert whole / 2 <= length <= whole
    dial(world, "a0", ok("a0"), now)
    assert (breaker_of(world, "a0").state, breaker_of(world, "a0").unreachable) == (BreakerState.CLOSED, False)
    dial(world, "a0", REFUSED, now)
    assert breaker_of(world, "a0").until - now <= 5.0, "an answer forgets the doubling"


def test_others_may_be_shut_out_as_if_it_were_not_there() -> None:
    """Of four, two are dead. Of the two that are left one may be shut out, and the last never."""
    world = world_of(4)
    dial(world, "a0", REFUSED, 0.0)
    dial(world, "a1", REFUSED, 0.0)
    for name in ("a2", "a3"):
        for _ in range(5):
            dial(world, name, RESET, 0.0)
    assert breaker_of(world, "a2").state is BreakerState.OPEN
    assert breaker_of(world, "a3").state is BreakerState.CLOSED


def test_dead_ones_are_no_reason_to_panic_however_many_they_are() -> None:
    world = world_of(10)
    offering = world.index.lookup(CAPABILITY).candidates
    for number in range(9):
        dial(world, f"a{number}", REFUSED, 0.0)
        assert not ejection.panics(offering, 1.0, world.config.ejection)
    for _ in range(50):
        assert ends(world.session(now=1.0), {}, 1.0)[1] == ["a9"]


def test_two_dead_ones_of_three_are_dialed_once_a_window_each_and_no_caller_notices() -> None:
    world = world_of(3)
    bad: dict[str, Outcome] = {"a0": REFUSED, "a1": REFUSED}
    dialed: list[tuple[float, str]] = []
    for call in range(1000):
        now = call * 0.1
        end, tried, _ = ends(world.session(now=now, deadline=now + 30), bad, now, took=0.0)
        assert isinstance(end, Return)
        dialed += [(now, name) for name in tried if name in bad]
    for name in bad:
        times = [now for now, dead in dialed if dead == name]
        # 100 s: at once, then after 2.5 to 5 s, 5 to 10 s, 10 to 20 s, 20 to 40 s and 40 to 80 s.
        assert 4 <= len(times) <= 6, times
        assert all(later - earlier >= 2.5 for earlier, later in itertools.pairwise(times))


def test_a_dead_one_is_the_last_resort_when_the_others_are_full_or_shut_out() -> None:
    world = world_of(2)
    dial(world, "a0", REFUSED, 0.0)
    world.index.instances["a1"].in_flight = 100
    end, tried, now = ends(world.session(), {})
    assert isinstance(end, Return)
    assert tried == ["a0"]
    assert now < 0.01, "it waits for nobody"
    (decision,) = world.router.decisions.latest()[-1:]
    assert decision.rule == "unreachable, but nobody else is left"


def test_where_all_are_known_to_be_dead_each_call_tries_one_all_the_same_and_soon_all_of_them() -> None:
    world = world_of(3)
    bad: dict[str, Outcome] = dict.fromkeys(("a0", "a1", "a2"), REFUSED)
    dialed: set[str] = set()
    for call in range(10):
        end, tried, _ = ends(world.session(now=float(call), deadline=call + 30.0), bad, float(call))
        assert isinstance(end, Raise)
        assert isinstance(end.error, NoHealthyAgent)
        assert "could be reached" in str(end.error)
        # The first call finds out that all are dead; the next ones move on only as far as their retries go.
        assert 3 <= len(tried) <= 5 if call == 0 else 1 <= len(tried) <= 3
        if call:
            dialed.update(tried)
    assert dialed == set(bad)
    end, _, _ = ends(world.session(now=10.0, deadline=40.0), {}, 10.0)
    assert isinstance(end, Return), "the first call after they came back succeeds"


def test_a_lone_dead_instance_is_always_tried() -> None:
    world = world_of(1)
    for call in range(20):
        end, tried, _ = ends(world.session(now=float(call), deadline=call + 30.0), {"a0": REFUSED}, float(call))
        assert isinstance(end, Raise)
        assert tried[0] == "a0"
    end, tried, _ = ends(world.session(now=20.0, deadline=50.0), {}, 20.0)
    assert isinstance(end, Return)
    assert tried == ["a0"]
    assert breaker_of(world, "a0").state is BreakerState.CLOSED


def test_a_connection_that_timed_out_after_a_second_counts_as_refused_and_one_after_a_millisecond_as_nothing() -> (
    None
):
    world = world_of(3)
    for _ in range(20):
        dial(world, "a0", TIMED_OUT, 0.0, took=0.001)
    assert breaker_of(world, "a0").state is BreakerState.CLOSED
    assert breaker_of(world, "a0").counts(0.0) == (0, 0)
    dial(world, "a0", TIMED_OUT, 0.0, took=1.0)
    assert (breaker_of(world, "a0").state, breaker_of(world, "a0").unreachable) == (BreakerState.OPEN, True)


def test_a_fault_of_this_process_says_nothing_of_the_instance() -> None:
    world = world_of(3)
    for _ in range(20):
        dial(world, "a0", Unsent("pool", "no connection free", local=True), 0.0)
    assert breaker_of(world, "a0").state is BreakerState.CLOSED


def test_one_that_answers_again_but_fails_is_shut_out_for_its_failures_from_then_on() -> None:
    world = world_of(4)
    dial(world, "a0", REFUSED, 0.0)
    now = breaker_of(world, "a0").until
    dial(world, "a0", rejected(500), now)
    breaker = breaker_of(world, "a0")
    assert (breaker.state, breaker.unreachable) == (BreakerState.OPEN, False)
    assert 15.0 <= breaker.until - now <= 30.0
    assert breaker.reason == "its probe failed"


def test_it_is_explained_with_the_time_that_is_left() -> None:
    world = world_of(3)
    dial(world, "a0", REFUSED, 0.0)
    told = explain(CAPABILITY, world.router, now=1.0, stale=False, age_s=0.0)
    (gone,) = told.excluded
    assert gone.agent_id == "a0"
    assert gone.reason == "breaker open: nothing listens at its address"
    assert gone.for_s == pytest.approx(breaker_of(world, "a0").until - 1.0)
    assert not told.panic


def test_a_good_answer_to_a_call_that_was_on_its_way_proves_that_somebody_listens() -> None:
    """One connection was refused, as at a full backlog, while another call is being answered there."""
    world = world_of(3)
    session = world.session(pinned="a0")
    assert isinstance(session.next(0.0), Send)
    dial(world, "a0", REFUSED, 0.1)
    assert breaker_of(world, "a0").state is BreakerState.OPEN
    assert breaker_of(world, "a0").until <= 5.1
    session.record(ok("a0"), 0.2)
    assert breaker_of(world, "a0").state is BreakerState.CLOSED


@pytest.mark.parametrize(
    "outcome", [REFUSED, Cancelled(), LostAnswer("reset")], ids=["refused", "cancelled", "reset"]
)
def test_any_other_end_of_a_call_that_was_on_its_way_proves_nothing(outcome: Outcome) -> None:
    world = world_of(3)
    session = world.session(pinned="a0")
    assert isinstance(session.next(0.0), Send)
    dial(world, "a0", REFUSED, 0.1)
    until = breaker_of(world, "a0").until
    session.record(outcome, 0.2)
    assert (breaker_of(world, "a0").state, breaker_of(world, "a0").until) == (BreakerState.OPEN, until)


def test_the_verdict_on_what_never_left() -> None:
    from agent_reach.routing.outcomes import verdict

    def of(outcome: Outcome, waited_s: float) -> Verdict:
        return verdict(outcome, waited_s=waited_s, attempt_s=5.0)

    assert of(REFUSED, 0.0) is Verdict.UNREACHABLE
    assert of(TIMED_OUT, 1.0) is Verdict.UNREACHABLE
    # A callee gives up a twentieth sooner than its caller, so a second is 0.9 s.
    assert of(TIMED_OUT, 0.91) is Verdict.UNREACHABLE
    assert of(TIMED_OUT, 0.89) is Verdict.NEUTRAL
    assert of(Unsent("connect", "full", local=True), 5.0) is Verdict.NEUTRAL
