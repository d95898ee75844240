"""The log of decisions: what it keeps, and that what it keeps is how things were."""

from __future__ import annotations

from typing import Any

import pytest

from agent_reach.config import EjectionConfig, ReachConfig, RetryConfig
from agent_reach.routing.breaker import Verdict
from agent_reach.routing.decisions import CandidateSeen, Decision
from agent_reach.routing.outcomes import Unsent
from agent_reach.routing.steps import Send
from tests.routing.world import CAPABILITY, World, agent, ok, rejected


def call(world: World, now: float = 0.0, **plan: Any) -> str:
    session = world.session(now=now, deadline=now + 30, **plan)
    step = session.next(now)
    assert isinstance(step, Send), step
    session.record(ok(step.candidate.agent_id), now)
    return step.candidate.agent_id


def latest(world: World) -> Decision:
    return world.router.decisions.latest()[-1]


def seen(world: World, agent_id: str) -> CandidateSeen:
    """How the latest decision saw it."""
    (found,) = [candidate for candidate in latest(world).seen if candidate.agent_id == agent_id]
    return found


def shut_out(world: World, agent_id: str, now: float = 0.0) -> None:
    breaker = world.index.instances[agent_id].breaker
    for _ in range(5):
        permit, _ = breaker.admit(now)
        breaker.record(permit, Verdict.FAILURE, now, world.rng, lambda: True)


def test_the_latest_thousand_are_kept_the_newest_last() -> None:
    world = World(agent("a"), agent("b"))
    for number in range(1100):
        call(world, now=number * 0.01)
    kept = world.router.decisions.latest()
    assert len(kept) == 1000
    assert [decision.at for decision in kept] == [number * 0.01 for number in range(100, 1100)]


def test_those_of_one_capability_can_be_asked_for() -> None:
    other = "other.thing.v1"
    world = World(agent("a", [CAPABILITY, other]))
    for name in (CAPABILITY, other, other):
        call(world, capability=name)
    assert [decision.capability for decision in world.router.decisions.latest()] == [CAPABILITY, other, other]
    assert [decision.capability for decision in world.router.decisions.latest(other)] == [other, other]
    assert world.router.decisions.latest("no.such.v1") == ()


def test_each_attempt_is_a_decision_with_its_call_and_number() -> None:
    world = World(agent("a"), agent("b"))
    session = world.session()
    for outcome in (Unsent("connect", "refused"), ok("b")):
        assert isinstance(session.next(0.0), Send)
        session.record(outcome, 0.0)
    first, second = world.router.decisions.latest()
    assert [(d.request_id, d.attempt) for d in (first, second)] == [("r", 1), ("r", 2)]
    assert first.chosen != second.chosen


def test_of_many_candidates_sixteen_are_noted() -> None:
    world = World(*(agent(f"a{n}") for n in range(40)))
    call(world)
    assert len(latest(world).seen) == 16


# --- the rules -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["single", "round_robin", "weighted_random"])
def test_the_rule_of_a_usual_call_is_its_strategy(strategy: str) -> None:
    world = World(agent("a"), agent("b"))
    call(world, strategy=strategy)
    assert latest(world).rule == strategy


def test_a_route_and_a_conversation_are_rules_of_their_own() -> None:
    world = World(agent("a"), agent("b"))
    call(world, preferred=("b",))
    assert (latest(world).rule, latest(world).chosen) == ("route", "b")
    call(world, context_id="conv")
    assert latest(world).rule == "affinity"


def test_one_that_drains_is_avoided_and_said_to_be_where_nobody_else_is_left() -> None:
    world = World(agent("a"), agent("b"))
    world.index.instances["a"].avoid_until = 30.0
    call(world)
    assert latest(world).chosen == "b"
    assert seen(world, "a").excluded == "asked last: it drains, or another answers at its address"
    assert seen(world, "a").for_s == 30.0
    world.index.instances["b"].in_flight = 100
    call(world, now=1.0)
    assert (latest(world).chosen, latest(world).rule) == ("a", "avoided, but nobody else is left")


def test_panic_is_a_rule() -> None:
    world = World(*(agent(f"a{n}") for n in range(4)))
    for number in range(3):
        shut_out(world, f"a{number}")
    rules = set()
    for _ in range(30):
        call(world, now=1.0)
        rules.add(latest(world).rule)
        for number in range(3):
            if world.index.instances[f"a{number}"].breaker.available(1.0):
                shut_out(world, f"a{number}", 1.0)
    assert "panic: health ignored" in rules


def test_a_dead_one_tried_because_nobody_else_is_left_is_said_to_be() -> None:
    world = World(agent("a"))
    session = world.session(retry=RetryConfig(max_attempts=1))
    assert isinstance(session.next(0.0), Send)
    session.record(Unsent("connect", "refused"), 0.0)
    call(world, now=0.9)
    assert latest(world).rule == "unreachable, but nobody else is left"
    assert seen(world, "a").excluded == "breaker open: nothing listens at its address"


def test_one_that_is_looked_at_before_its_time_because_nobody_else_is_left_is_said_to_be() -> None:
    world = World(agent("a"), agent("b"))
    shut_out(world, "a")
    world.index.instances["b"].in_flight = 100
    call(world, now=1.0)
    assert (latest(world).rule, latest(world).chosen) == ("early probe, as nobody else is left", "a")


# --- who was out, why, and for how long ----------------------------------------------------------------------


def test_an_open_breaker_is_named_with_its_reason_and_the_time_that_is_left() -> None:
    world = World(agent("a"), agent("b"), agent("c"))
    shut_out(world, "a")
    call(world, now=10.0)
    out = seen(world, "a")
    assert out.breaker == "open"
    assert out.excluded == "breaker open: 5 failures in a row"
    assert out.for_s == pytest.approx(world.index.instances["a"].breaker.until - 10.0)
    assert seen(world, "b").excluded == ""
    assert seen(world, "b").for_s is None


def test_a_breaker_whose_time_is_over_excludes_nobody_and_one_whose_probe_is_out_does() -> None:
    world = World(agent("a"), agent("b"))
    shut_out(world, "a")
    due = world.index.instances["a"].breaker.until
    probe = world.session(now=due, deadline=due + 30)
    assert isinstance(probe.next(due), Send)
    assert (latest(world).chosen, seen(world, "a").excluded) == ("a", "")
    call(world, now=due + 1.0)
    assert latest(world).chosen == "b"
    out = seen(world, "a")
    assert out.excluded == "breaker half_open: its time is over: one call probes it"
    assert out.for_s is None
    probe.record(ok("a"), due + 2.0)
    call(world, now=due + 2.0)
    assert seen(world, "a").excluded == ""


def test_one_that_is_busy_and_one_that_is_full_are_named() -> None:
    world = World(agent("a"), agent("b"), agent("c"))
    world.index.lookup(CAPABILITY).candidates[0].learnt.busy_until = 7.0
    world.index.instances["b"].in_flight = 100
    assert call(world, now=2.0) == "c"
    busy, full = seen(world, "a"), seen(world, "b")
    assert (busy.excluded, busy.for_s) == ("it said that it is overloaded", 5.0)
    assert (full.excluded, full.for_s) == ("100 calls of ours are in flight, as many as it gets", None)


# --- what is kept is how it was ------------------------------------------------------------------------------


def test_the_values_are_those_of_the_moment_whatever_happens_afterwards() -> None:
    world = World(agent("a", weight=2.0), agent("b"), config=ReachConfig(ejection=EjectionConfig(max_share=0.0)))
    a = world.index.lookup(CAPABILITY).candidates[0]
    a.latency.observe(0.4, 90.0)
    a.learnt.began = [98.0, 99.0]
    a.instance.in_flight = 2
    call(world, now=100.0)
    before = str(latest(world))
    told = seen(world, "a")
    assert told.latency_s == pytest.approx(0.4 / 2.718281828)
    assert (told.waiting_s, told.in_flight, told.weight) == (1.0, 2, 2.0)
    decision = latest(world)
    a.latency.observe(9.0, 101.0)
    a.latency.fail(7.0, 101.0)
    a.learnt.began.append(101.0)
    a.instance.in_flight = 50
    a.learnt.busy_until = a.instance.avoid_until = 1e9
    shut_out(world, "a", 101.0)
    a.instance.info = a.instance.info.model_copy(update={"weight": 9.0})
    assert latest(world) == decision
    assert str(latest(world)) == before


def test_how_old_the_knowledge_was_is_kept_too() -> None:
    age_s: list[float | None] = [None]
    world = World(agent("a"), age_s=lambda: age_s[0])
    call(world)
    assert latest(world).age_s is None
    assert " old" not in str(latest(world))
    age_s[0] = 2.5
    call(world)
    age_s[0] = 99.0
    assert latest(world).age_s == 2.5
    assert "knowledge 2.5 s old" in str(latest(world))


def test_a_decision_prints_who_was_chosen_by_which_rule_and_who_was_out() -> None:
    world = World(agent("a"), agent("b"))
    candidate = world.index.lookup(CAPABILITY).candidates[1]
    candidate.latency.observe(0.05, 0.0)
    session = world.session(pinned="a", retry=RetryConfig(max_attempts=1))
    assert isinstance(session.next(0.0), Send)
    session.record(rejected(503, "Overloaded", executed=False, retry_after_ms=4000), 0.0)
    call(world, now=1.0)
    assert str(latest(world)).splitlines() == [
        "knowledge.retrieve.v1 attempt 1 -> b (single) [r]",
        "  a: out, it said that it is overloaded for 3.0 s more",
        "  b: latency 45.2 ms, 0 in flight, weight 1, breaker closed",
    ]
