"""Conversations stay with the instance that holds them."""

from __future__ import annotations

import pickle
import random
from collections import Counter
from typing import Any

import pytest

from agent_reach.config import AffinityConfig, ReachConfig, RetryConfig
from agent_reach.errors import ConfigError, ContextLost
from agent_reach.model import AgentInfo
from agent_reach.routing.affinity import owner_by_hash
from agent_reach.routing.breaker import Verdict
from agent_reach.routing.explain import Route, explain
from agent_reach.routing.index import Remove, Upsert
from agent_reach.routing.outcomes import LostAnswer, Outcome, Unsent
from agent_reach.routing.session import CallSession
from agent_reach.routing.steps import Raise, Return, Send, Wait
from tests.routing.world import CAPABILITY, World, agent, ok, rejected

REFUSED = Unsent("connect", "connection refused")
RESET = LostAnswer("connection reset")


def fleet(count: int = 5) -> list[AgentInfo]:
    return [agent(f"a{n}") for n in range(count)]


def ask(world: World, context_id: str = "conv", *, now: float = 0.0, **plan: Any) -> str:
    """Who answers the next call of a conversation; everybody works."""
    session = world.session(context_id=context_id, now=now, deadline=now + 30, **plan)
    step = session.next(now)
    assert isinstance(step, Send), step
    session.record(ok(step.candidate.agent_id), now)
    return step.candidate.agent_id


def ends(session: CallSession, bad: dict[str, Outcome], now: float = 0.0) -> tuple[Return | Raise, list[str]]:
    """Drive a call to its end; who isn't bad answers."""
    tried = []
    while True:
        step = session.next(now)
        match step:
            case Send():
                tried.append(step.candidate.agent_id)
                session.record(bad.get(tried[-1], ok(tried[-1])), now)
            case Wait(seconds):
                now += seconds
            case Return() | Raise():
                return step, tried


def shut_out(world: World, agent_id: str, now: float = 0.0) -> None:
    breaker = world.index.instances[agent_id].breaker
    for _ in range(5):
        permit, _ = breaker.admit(now)
        breaker.record(permit, Verdict.FAILURE, now, world.rng, lambda: True)


def route(world: World, context_id: str = "conv") -> Route:
    return explain(CAPABILITY, world.router, context_id=context_id, now=0.0, stale=False, age_s=0.0)


# --- the owner by hash ---------------------------------------------------------------------------------------


def owners(infos: list[AgentInfo], contexts: int = 3000) -> dict[str, str]:
    offering = World(*infos).index.lookup(CAPABILITY).candidates
    return {f"c{n}": owner_by_hash(f"c{n}", offering).agent_id for n in range(contexts)}


def test_the_calls_of_a_conversation_go_to_one_instance_and_conversations_to_all_of_them() -> None:
    world = World(*fleet())
    assert len({ask(world) for _ in range(50)}) == 1
    assert {ask(world, f"conv{n}") for n in range(100)} == {info.agent_id for info in fleet()}


def test_callers_agree_on_the_owner_without_talking_whatever_they_heard_first() -> None:
    infos = fleet(9)
    expected: dict[str, str] = {}
    for seed in range(5):
        random.Random(seed).shuffle(infos)
        world = World(*infos, seed=seed)
        found = {f"c{n}": ask(world, f"c{n}") for n in range(200)}
        expected = expected or found
        assert found == expected


def test_when_an_instance_leaves_only_its_own_conversations_move_and_spread_evenly() -> None:
    infos = fleet(6)
    before, after = owners(infos), owners(infos[1:])
    assert {c: owner for c, owner in before.items() if owner != "a0"}.items() <= after.items()
    moved = Counter(after[c] for c, owner in before.items() if owner == "a0")
    assert sum(moved.values()) == pytest.approx(3000 / 6, rel=0.15)
    assert all(times == pytest.approx(sum(moved.values()) / 5, rel=0.35) for times in moved.values()), moved


def test_when_an_instance_comes_it_takes_its_share_and_nothing_else_moves() -> None:
    before, after = owners(fleet(5)), owners(fleet(6))
    moved = {c for c in before if before[c] != after[c]}
    assert {after[c] for c in moved} == {"a5"}
    assert len(moved) == pytest.approx(3000 / 6, rel=0.15)


def test_a_heavier_instance_holds_more_conversations_in_proportion() -> None:
    held = Counter(owners([agent("a", weight=1.0), agent("b", weight=2.0), agent("c", weight=5.0)], 8000).values())
    for name, weight in (("a", 1), ("b", 2), ("c", 5)):
        assert held[name] / 8000 == pytest.approx(weight / 8, abs=0.02)


def test_changing_one_weight_moves_conversations_to_or_from_that_instance_only() -> None:
    before, after = owners(fleet(4)), owners([*fleet(3), agent("a3", weight=3.0)])
    assert {after[c] for c in before if before[c] != after[c]} == {"a3"}


# --- remembering ---------------------------------------------------------------------------------------------


def test_a_newcomer_takes_over_no_conversation_that_is_held() -> None:
    world = World(*fleet(2))
    held = {f"c{n}": ask(world, f"c{n}") for n in range(50)}
    for number in range(2, 10):
        world.index.apply(Upsert(agent(f"a{number}"), number + 10), 0.0)
    assert {c: ask(world, c) for c in held} == held
    assert len({ask(world, f"new{n}") for n in range(100)}) > 5


@pytest.mark.parametrize("how", ["shut out", "fails", "is full", "is unreachable"])
def test_an_owner_that_is_only_passed_over_keeps_its_conversation(how: str) -> None:
    world = World(*fleet(3))
    owner = ask(world)
    instance = world.index.instances[owner]
    if how == "shut out":
        shut_out(world, owner)
    elif how == "is full":
        instance.in_flight = 100
    outcomes: dict[str, Outcome] = {"fails": RESET, "is unreachable": REFUSED}
    bad = {owner: outcomes[how]} if how in outcomes else {}
    end, tried = ends(world.session(context_id="conv"), bad)
    assert isinstance(end, Return)
    assert tried[-1] != owner
    assert tried[:-1] == ([owner] if bad else [])
    if how == "is full":
        instance.in_flight = 0
    assert ask(world, now=100.0) == owner, "it is back"


def test_a_conversation_that_began_elsewhere_than_its_hash_says_stays_there() -> None:
    world = World(*fleet(3))
    by_hash = owner_by_hash("conv", world.index.lookup(CAPABILITY).candidates).agent_id
    end, tried = ends(world.session(context_id="conv"), {by_hash: REFUSED})
    assert isinstance(end, Return)
    assert tried[0] == by_hash
    assert ask(world, now=100.0) == tried[-1]


def test_each_capability_has_its_own_owner_of_a_conversation() -> None:
    other = "other.thing.v1"
    world = World(*(agent(f"a{n}", [CAPABILITY, other]) for n in range(3)))
    by_hash = owner_by_hash("conv", world.index.lookup(CAPABILITY).candidates).agent_id
    _, tried = ends(world.session(context_id="conv"), {by_hash: REFUSED})
    world.index.instances[by_hash].breaker.unreachable = False
    world.index.instances[by_hash].breaker.until = 0.0
    assert ask(world, capability=other) == by_hash
    assert ask(world) == tried[-1]


def test_no_more_conversations_are_remembered_than_the_settings_say() -> None:
    world = World(*fleet(3), config=ReachConfig(affinity=AffinityConfig(remembered=10)))
    for number in range(100):
        ask(world, f"c{number}")
        ask(world, "busy")
    assert len(world.router.contexts._owners) == 10
    assert world.router.contexts.owner(CAPABILITY, "busy") is not None, "the least used are forgotten first"
    assert world.router.contexts.owner(CAPABILITY, "c0") is None


def test_calls_without_a_conversation_are_remembered_by_nobody() -> None:
    world = World(*fleet(3))
    end, _ = ends(world.session(), {})
    assert isinstance(end, Return)
    assert len(world.router.contexts._owners) == 0


# --- when the owner is gone ----------------------------------------------------------------------------------


def test_when_the_owner_is_gone_the_conversation_goes_on_elsewhere_and_stays_there() -> None:
    world = World(*fleet(4))
    owner = ask(world)
    world.index.apply(Remove(owner, 9), 0.0)
    heir = ask(world)
    assert heir != owner
    world.index.apply(Upsert(agent(owner, incarnation="two"), 10), 0.0)
    assert {ask(world) for _ in range(20)} == {heir}


def test_a_restarted_owner_holds_the_conversation_no_longer_and_the_route_says_so() -> None:
    world = World(*fleet(4))
    owner = ask(world)
    assert (route(world).owner, route(world).context_lost) == (owner, None)
    assert route(world).candidates[0].agent_id == owner
    assert f"conversation held by {owner}" in str(route(world))
    world.index.apply(Upsert(agent(owner, incarnation="two"), 9), 0.0)
    lost = route(world)
    assert lost.context_lost == owner
    assert f"conversation lost: {owner} held it and is gone; {lost.owner} takes it over" in str(lost)
    heir = ask(world)
    assert heir == lost.owner
    assert (route(world).owner, route(world).context_lost) == (heir, None), "the next one is at home again"


def test_a_changed_record_is_no_restart() -> None:
    world = World(*fleet(4))
    owner = ask(world)
    world.index.apply(Upsert(agent(owner, weight=0.01), 9), 0.0)
    assert ask(world) == owner
    assert ask(world, require_context=True) == owner


@pytest.mark.parametrize("restarted", [False, True])
def test_who_requires_the_conversation_is_told_that_it_is_lost_and_nothing_runs(restarted: bool) -> None:
    world = World(*fleet(4))
    owner = ask(world, require_context=True)
    world.index.apply(Upsert(agent(owner, incarnation="two"), 9) if restarted else Remove(owner, 9), 0.0)
    for _ in range(2):
        end, tried = ends(world.session(context_id="conv", require_context=True), {})
        assert isinstance(end, Raise)
        error = end.error
        assert isinstance(error, ContextLost)
        assert tried == []
        assert f"agent {owner!r} held this conversation and is gone" in str(error)
        assert "Nothing was executed" in str(error)
        copy = pickle.loads(pickle.dumps(error))
        assert (type(copy), str(copy), copy.request_id) == (ContextLost, str(error), "r")
    assert ask(world) is not None, "without the requirement it goes on, and is held again"
    assert ask(world, require_context=True) == route(world).owner


@pytest.mark.parametrize("out", ["shut out", "unreachable"])
def test_who_requires_the_conversation_is_sent_to_its_owner_even_if_that_is_out(out: str) -> None:
    """Nobody else may answer, so trying is all that is left."""
    world = World(*fleet(4))
    owner = ask(world)
    if out == "shut out":
        shut_out(world, owner)
    else:
        ends(world.session(context_id="conv"), {owner: REFUSED})
    end, tried = ends(world.session(context_id="conv", require_context=True), {})
    assert isinstance(end, Return)
    assert tried == [owner]


def test_a_retry_of_who_requires_the_conversation_goes_to_its_owner_only() -> None:
    for bad in (RESET, REFUSED, rejected(503)):
        world = World(*fleet(4))
        owner = ask(world)
        end, tried = ends(world.session(context_id="conv", require_context=True), {owner: bad})
        assert isinstance(end, Raise)
        assert tried[:2] == [owner] * 2
        assert set(tried) == {owner}


@pytest.mark.parametrize("restarted", [False, True])
def test_an_owner_that_is_lost_during_the_call_gets_no_heir_where_the_conversation_is_required(
    restarted: bool,
) -> None:
    world = World(*fleet(4))
    owner = ask(world)
    session = world.session(context_id="conv", require_context=True, retry=RetryConfig(base_s=0.0))
    assert isinstance(session.next(0.0), Send)
    world.index.apply(Upsert(agent(owner, incarnation="two"), 9) if restarted else Remove(owner, 9), 0.0)
    session.record(RESET, 0.0)
    end = session.next(0.0)
    assert isinstance(end, Raise)
    assert isinstance(end.error, ContextLost)
    assert "An earlier attempt may have been executed" in str(end.error)


# --- pinned calls --------------------------------------------------------------------------------------------


def test_asking_another_instance_in_between_moves_no_conversation() -> None:
    world = World(*fleet(4))
    owner = ask(world)
    for info in fleet(4):
        assert ask(world, pinned=info.agent_id) == info.agent_id
        assert route(world).context_lost is None
        assert ask(world) == owner
        assert ask(world, require_context=True) == owner


def test_a_conversation_that_began_with_a_pinned_call_stays_where_it_was_pinned() -> None:
    for name in ("a0", "a1", "a2"):
        world = World(*fleet(3))
        ask(world, pinned=name)
        assert ask(world) == name


def test_a_pin_elsewhere_and_a_required_conversation_exclude_each_other() -> None:
    world = World(*fleet(4))
    owner = ask(world)
    assert ask(world, pinned=owner, require_context=True) == owner
    other = next(info.agent_id for info in fleet(4) if info.agent_id != owner)
    end, tried = ends(world.session(context_id="conv", pinned=other, require_context=True), {})
    assert isinstance(end, Raise)
    assert isinstance(end.error, ConfigError)
    assert f"agent {owner!r} holds this conversation, so agent_id={other!r}" in str(end.error)
    assert tried == []
    world.index.apply(Upsert(agent(owner, incarnation="two"), 9), 0.0)
    end, _ = ends(world.session(context_id="conv", pinned=owner, require_context=True), {})
    assert isinstance(end, Raise)
    assert isinstance(end.error, ContextLost)
