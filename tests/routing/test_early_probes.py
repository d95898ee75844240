"""One that is shut out is looked at before its time when nobody else has room; where all fail, some stay in."""

from __future__ import annotations

from typing import Any

import pytest

from agent_reach.config import RetryConfig
from agent_reach.routing.breaker import Breaker, BreakerState
from agent_reach.routing.outcomes import LostAnswer, Outcome, Unsent
from agent_reach.routing.session import CallSession
from agent_reach.routing.steps import Send, Wait
from tests.routing.world import CAPABILITY, World, agent, ok

RESET = LostAnswer("connection reset")
ONCE = RetryConfig(max_attempts=1)


def fail(world: World, agent_id: str, times: int = 5, now: float = 0.0, outcome: Outcome = RESET) -> None:
    for _ in range(times):
        session = world.session(pinned=agent_id, retry=ONCE, now=now, deadline=now + 30)
        assert isinstance(session.next(now), Send)
        session.record(outcome, now)


def crowded(idempotent: bool = True) -> World:
    """ "out" is shut out since 0.0 s, and "full" has no room."""
    world = World(agent("out", idempotent=idempotent), agent("full", idempotent=idempotent))
    fail(world, "out")
    assert breaker_of(world, "out").state is BreakerState.OPEN
    world.index.instances["full"].in_flight = 100
    return world


def breaker_of(world: World, agent_id: str) -> Breaker:
    return world.index.instances[agent_id].breaker


def call(world: World, now: float, **plan: Any) -> CallSession:
    return world.session(now=now, deadline=now + 30, **plan)


def test_a_call_that_nobody_else_takes_looks_at_one_that_is_shut_out_a_second_after_it_was() -> None:
    world = crowded()
    step = call(world, 1.0).next(1.0)
    assert isinstance(step, Send)
    assert step.candidate.agent_id == "out"
    assert breaker_of(world, "out").state is BreakerState.HALF_OPEN


def test_sooner_it_waits_for_a_place_and_gets_its_turn_as_the_second_is_over() -> None:
    world = crowded()
    session = call(world, 0.5)
    step = session.next(0.5)
    assert isinstance(step, Wait)
    assert step.until_place
    assert isinstance(session.next(1.2), Send)


@pytest.mark.parametrize("why", ["not idempotent", "one attempt"])
def test_a_call_that_cannot_be_repeated_isnt_risked_for_it(why: str) -> None:
    world = crowded(idempotent=why != "not idempotent")
    retry = ONCE if why == "one attempt" else RetryConfig()
    assert isinstance(call(world, 2.0, retry=retry).next(2.0), Wait)
    assert breaker_of(world, "out").until > 15.0, "nor is it made due for the next one"


@pytest.mark.parametrize("why", ["busy", "full"])
def test_one_that_would_take_no_call_anyway_is_left_alone(why: str) -> None:
    world = crowded()
    candidate = world.index.lookup(CAPABILITY).candidates[0]
    if why == "busy":
        candidate.learnt.busy_until = 99.0
    else:
        candidate.instance.in_flight = 100
    until = breaker_of(world, "out").until
    assert not isinstance(call(world, 2.0).next(2.0), Send)
    assert breaker_of(world, "out").until == until


def test_while_somebody_has_room_it_stays_shut_out() -> None:
    world = crowded()
    world.index.instances["full"].in_flight = 99
    for now in (1.0, 5.0, 14.0):
        session = call(world, now)
        step = session.next(now)
        assert isinstance(step, Send)
        assert step.candidate.agent_id == "full"
        session.record(ok("full"), now)


def test_one_call_at_a_time_looks_at_one_instance() -> None:
    world = World(*(agent(f"out{n}") for n in range(2)), *(agent(f"full{n}") for n in range(2)))
    for n in range(2):
        fail(world, f"out{n}")
        world.index.instances[f"full{n}"].in_flight = 100
    steps = [call(world, 1.0).next(1.0) for _ in range(4)]
    sends = [step.candidate.agent_id for step in steps if isinstance(step, Send)]
    assert sorted(sends) == ["out0", "out1"], "each by another call, and then there is none left"
    assert all(isinstance(step, Wait) for step in steps[2:])


def test_after_an_early_look_that_failed_the_next_one_is_a_second_away_and_the_time_in_all_no_longer() -> None:
    world, looks = crowded(), []
    for tenth in range(10, 100):
        now = tenth / 10
        session = call(world, now, retry=RetryConfig(max_attempts=2, patience_s=0.0))
        if isinstance(session.next(now), Send):
            looks.append(now)
            session.record(RESET, now)
            assert 15.0 <= breaker_of(world, "out").until - now <= 30.0
    assert len(looks) == 9
    assert looks == pytest.approx([1.0 * n for n in range(1, 10)], abs=0.11)


def test_an_early_look_that_succeeds_brings_it_back() -> None:
    world = crowded()
    session = call(world, 1.0)
    assert isinstance(session.next(1.0), Send)
    session.record(ok("out"), 1.1)
    assert breaker_of(world, "out").state is BreakerState.CLOSED
    assert isinstance(call(world, 1.2).next(1.2), Send)


def test_one_where_nothing_listened_is_looked_at_early_too() -> None:
    world = World(agent("dead"), agent("full"))
    fail(world, "dead", 1, outcome=Unsent("connect", "connection refused"))
    world.index.instances["full"].in_flight = 100
    assert isinstance(call(world, 1.0).next(1.0), Send)
    assert world.router.decisions.latest()[-1].rule == "early probe, as nobody else is left"


# --- where all fail ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [2, 3, 6])
def test_where_all_fail_alike_some_stay_in_whatever_the_cap_would_allow(count: int) -> None:
    world = World(*(agent(f"a{n}") for n in range(count)))
    for _ in range(20):
        for n in range(count):
            fail(world, f"a{n}", 1)
    out = [n for n in range(count) if breaker_of(world, f"a{n}").state is BreakerState.OPEN]
    assert len(out) <= count // 2


def test_a_last_one_that_fails_like_the_others_is_shut_out_as_soon_as_another_is_well() -> None:
    world = World(*(agent(f"a{n}") for n in range(4)))
    for name in ("a0", "a1", "a2", "a3"):
        fail(world, name, 20)
    assert [breaker_of(world, f"a{n}").state for n in range(4)].count(BreakerState.OPEN) == 2
    # Those two are in though they fail. One that was out comes back, so there is somebody to compare with.
    due = breaker_of(world, "a0").until
    session = world.session(pinned="a0", now=due, deadline=due + 30)
    assert isinstance(session.next(due), Send)
    session.record(ok("a0"), due)
    fail(world, "a2", 1, now=due)
    assert breaker_of(world, "a2").state is BreakerState.OPEN
