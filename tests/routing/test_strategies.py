"""How a call's instance is chosen where the best of a few isn't asked for: in turn, or by weight."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from agent_reach.config import ReachConfig
from agent_reach.config.choice import check_strategy
from agent_reach.errors import ConfigError
from agent_reach.routing.breaker import Verdict
from agent_reach.routing.outcomes import Cancelled, Unsent
from agent_reach.routing.steps import Send
from tests.routing.world import CAPABILITY, World, agent, ok

NAMES = ("a", "b", "c", "d")


def world_of(*names: str, **how: object) -> World:
    return World(*(agent(name) for name in names), **how)  # type: ignore[arg-type]


def chosen(world: World, calls: int, now: float = 100.0, **plan: Any) -> list[str]:
    """Who got each of so many calls, one after another, all answered."""
    order = []
    for _ in range(calls):
        session = world.session(now=now, deadline=now + 30, **plan)
        step = session.next(now)
        assert isinstance(step, Send)
        order.append(step.candidate.agent_id)
        session.record(ok(order[-1]), now)
    return order


def shut_out(world: World, agent_id: str, now: float = 100.0) -> None:
    breaker = world.index.instances[agent_id].breaker
    for _ in range(5):
        permit, _ = breaker.admit(now)
        breaker.record(permit, Verdict.FAILURE, now, world.rng, lambda: True)


def test_round_robin_goes_evenly_round() -> None:
    order = chosen(world_of(*NAMES), 12, strategy="round_robin")
    assert Counter(order) == dict.fromkeys(NAMES, 3)
    assert order[:4] == order[4:8] == order[8:]


@pytest.mark.parametrize("out", NAMES)
def test_round_robin_passes_over_one_that_is_shut_out_and_gives_its_calls_to_all_others(out: str) -> None:
    world = world_of(*NAMES)
    shut_out(world, out)
    assert Counter(chosen(world, 12, strategy="round_robin")) == dict.fromkeys(set(NAMES) - {out}, 4)


@pytest.mark.parametrize("full", NAMES)
def test_round_robin_passes_over_one_that_is_full(full: str) -> None:
    world = world_of(*NAMES)
    world.index.instances[full].in_flight = 100
    assert Counter(chosen(world, 12, strategy="round_robin")) == dict.fromkeys(set(NAMES) - {full}, 4)


def test_round_robin_gives_one_that_comes_back_its_turn_and_not_what_it_missed() -> None:
    world = world_of("a", "b", "c")
    world.index.instances["a"].in_flight = 100
    chosen(world, 100, strategy="round_robin")
    world.index.instances["a"].in_flight = 0
    assert Counter(chosen(world, 9, strategy="round_robin")) == {"a": 3, "b": 3, "c": 3}


def test_round_robin_goes_evenly_round_the_near_ones_while_calls_look_past_them() -> None:
    """They are crowded, but the far ones are no better: who was only looked at has had no turn."""
    near = [agent(f"near{n}", zone="eu/a", slots=4) for n in range(2)]
    far = [agent(f"far{n}", zone="us/a") for n in range(3)]
    world = World(*near, *far, zone="eu/a")
    for candidate in world.index.lookup(CAPABILITY).candidates:
        candidate.latency.observe(0.1, 100.0)
        candidate.instance.in_flight = 5 if candidate.agent_id.startswith("near") else 0
    order: list[str] = []
    for _ in range(12):
        session = world.session(now=100.0, deadline=130.0, strategy="round_robin")
        step = session.next(100.0)
        assert isinstance(step, Send)
        order.append(step.candidate.agent_id)
        session.record(Cancelled(), 100.0)
    assert Counter(order) == {"near0": 6, "near1": 6}


def test_a_retry_takes_the_next_in_turn() -> None:
    world = world_of(*NAMES)
    session = world.session(strategy="round_robin")
    first = session.next(0.0)
    assert isinstance(first, Send)
    session.record(Unsent("connect", "refused"), 0.0)
    second = session.next(0.0)
    assert isinstance(second, Send)
    rest = chosen(world, 2, now=0.0, strategy="round_robin")
    assert {first.candidate.agent_id, second.candidate.agent_id, *rest} == set(NAMES)


def test_weighted_random_chooses_in_proportion_to_the_announced_weights() -> None:
    world = World(agent("a", weight=1.0), agent("b", weight=2.0), agent("c", weight=5.0))
    picks = Counter(chosen(world, 4000, strategy="weighted_random"))
    for name, weight in (("a", 1), ("b", 2), ("c", 5)):
        assert picks[name] / 4000 == pytest.approx(weight / 8, abs=0.03)


def test_weighted_random_keeps_its_proportions_among_those_that_are_left() -> None:
    world = World(agent("a", weight=1.0), agent("b", weight=2.0), agent("c", weight=5.0))
    shut_out(world, "c")
    picks = Counter(chosen(world, 2000, strategy="weighted_random"))
    assert picks["c"] == 0
    assert picks["b"] / 2000 == pytest.approx(2 / 3, abs=0.03)


def test_weighted_random_gives_a_newcomer_a_growing_share() -> None:
    world = world_of("old", "new")
    world.index.instances["old"].warm_from = 0.0
    shares = []
    for age_s in (0.0, 5.0, 10.0):
        world.index.instances["new"].warm_from = 100.0 - age_s
        shares.append(chosen(world, 1000, strategy="weighted_random").count("new") / 1000)
    assert shares == pytest.approx([0.1 / 1.1, 0.5 / 1.5, 0.5], abs=0.05)


@pytest.mark.parametrize("strategy", ["single", "round_robin", "weighted_random"])
def test_whatever_the_strategy_the_only_usable_one_is_found_and_with_none_the_call_waits(strategy: str) -> None:
    world = world_of(*NAMES)
    for name in NAMES[1:]:
        world.index.instances[name].in_flight = 100
    assert set(chosen(world, 10, strategy=strategy)) == {"a"}
    world.index.instances["a"].in_flight = 100
    assert not isinstance(world.session(now=100.0, deadline=130.0, strategy=strategy).next(100.0), Send)


@pytest.mark.parametrize("strategy", ["fastest", "", "SINGLE", 1, None])
def test_there_is_no_other_strategy(strategy: object) -> None:
    with pytest.raises(ConfigError, match="must be one of 'single', 'round_robin', 'weighted_random'"):
        check_strategy(strategy)
    if strategy is not None:
        with pytest.raises(ConfigError, match="strategy="):
            ReachConfig(strategy=strategy)  # type: ignore[arg-type]
