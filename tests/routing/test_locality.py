"""Calls stay near while those near by can take them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from agent_reach.config import LocalityConfig, ReachConfig
from agent_reach.model import AgentInfo
from agent_reach.routing.breaker import Verdict
from agent_reach.routing.index import Upsert
from agent_reach.routing.locality import distance
from agent_reach.routing.outcomes import Unsent
from agent_reach.routing.steps import Send
from tests.routing.world import CAPABILITY, World, agent, ok

MINE = "eu/a"


def fleet(**slots: int) -> list[AgentInfo]:
    """Two instances in each of: the caller's zone, its region, elsewhere."""
    zones = {"near": MINE, "region": "eu/b", "far": "us/a"}
    return [agent(f"{name}{n}", zone=zone, slots=slots.get(name)) for name, zone in zones.items() for n in range(2)]


def world_of(*infos: AgentInfo, zone: str | None = MINE, spill: float = 2.0) -> World:
    world = World(*infos, config=ReachConfig(locality=LocalityConfig(spill=spill)), zone=zone)
    for candidate in world.index.lookup(CAPABILITY).candidates:
        candidate.latency.observe(0.125, 100.0)
    return world


def gone_to(world: World, calls: int = 200, now: float = 100.0, **plan: Any) -> Counter[str]:
    """Which distance the calls went to, one at a time."""
    went: Counter[str] = Counter()
    for _ in range(calls):
        session = world.session(now=now, deadline=now + 30, **plan)
        step = session.next(now)
        assert isinstance(step, Send), step
        went[step.candidate.agent_id.rstrip("0123456789")] += 1
        session.record(ok(step.candidate.agent_id), now + 0.125)
    return went


def load(world: World, name: str, calls: int, now: float = 100.0) -> None:
    """So many calls are in flight, to each instance at that distance."""
    for candidate in world.index.lookup(CAPABILITY).candidates:
        if candidate.agent_id.startswith(name):
            candidate.instance.in_flight = calls
            candidate.learnt.began = [now] * calls


def shut_out(world: World, *names: str) -> None:
    for name in names:
        breaker = world.index.instances[name].breaker
        for _ in range(5):
            permit, _ = breaker.admit(100.0)
            breaker.record(permit, Verdict.FAILURE, 100.0, world.rng, lambda: True)


@pytest.mark.parametrize(
    ("other", "expected"),
    [(MINE, 0), ("eu/b", 1), ("eu", 1), ("us/a", 2), ("europe/a", 2), ("a", 2), (None, 2)],
)
def test_a_zone_is_the_same_in_the_same_region_or_elsewhere(other: str | None, expected: int) -> None:
    assert distance(MINE, other) == expected


@pytest.mark.parametrize("strategy", ["single", "round_robin", "weighted_random"])
def test_calls_stay_in_the_zone_while_it_isnt_crowded(strategy: str) -> None:
    assert gone_to(world_of(*fleet()), strategy=strategy) == {"near": 200}
    busy = world_of(*fleet())
    load(busy, "near", 5)
    assert gone_to(busy, strategy=strategy) == {"near": 200}


def test_a_client_that_knows_no_zone_of_its_own_ignores_zones() -> None:
    went = gone_to(world_of(*fleet(), zone=None), calls=900)
    assert all(0.2 < went[name] / 900 < 0.5 for name in ("near", "region", "far")), went


def test_the_region_comes_before_the_rest_of_the_world() -> None:
    infos = [info for info in fleet() if not info.agent_id.startswith("near")]
    assert gone_to(world_of(*infos)) == {"region": 200}


def test_an_instance_that_names_no_zone_is_as_far_as_any() -> None:
    assert gone_to(world_of(agent("near", zone=MINE), agent("lost"))) == {"near": 200}
    assert gone_to(world_of(agent("region", zone="eu/b"), agent("lost"))) == {"region": 200}


def test_a_crowded_zone_spills_into_the_region_and_not_further() -> None:
    """Four places each, twelve calls there: one more would take over three times as long as in the region."""
    world = world_of(*fleet(near=4, region=4, far=4))
    load(world, "near", 12)
    assert gone_to(world, calls=20) == {"region": 20}


def test_a_queue_that_costs_less_than_the_way_is_waited_in() -> None:
    """Twice as long isn't enough to leave; with a spill of 1.2 it is."""
    for spill, expected in ((2.0, "near"), (1.2, "region")):
        world = world_of(*fleet(near=4, region=4), spill=spill)
        # 7 and this one: 8 on 4 places.
        load(world, "near", 7)
        session = world.session(now=100.0, deadline=130.0)
        step = session.next(100.0)
        assert isinstance(step, Send)
        assert step.candidate.agent_id.startswith(expected)


def test_a_zone_whose_calls_hang_spills_as_soon_as_it_is_crowded() -> None:
    """Nothing ended there for ten seconds: the calls in flight say how slow it is before any of them ends."""
    world = world_of(*fleet(region=8), spill=20.0)
    load(world, "near", 8, now=99.99)
    assert gone_to(world, calls=20) == {"near": 20}
    world = world_of(*fleet(region=8), spill=20.0)
    load(world, "near", 8, now=90.0)
    assert gone_to(world, calls=20) == {"region": 20}


def test_a_zone_that_is_full_spills() -> None:
    """Four places and three waiting for each; or all that an agent bears: cheap or not, one more doesn't fit."""
    world = world_of(*fleet(near=4), spill=100.0)
    load(world, "near", 16)
    assert gone_to(world) == {"region": 200}
    world = world_of(agent("near", zone=MINE, max_concurrency=4), agent("region", zone="eu/b"), spill=100.0)
    load(world, "near", 4)
    assert gone_to(world) == {"region": 200}


def test_a_zone_that_is_shut_out_spills_and_one_half_of_it_does_not() -> None:
    world = world_of(*fleet())
    shut_out(world, "near0")
    assert gone_to(world) == {"near": 200}
    shut_out(world, "near1")
    assert gone_to(world) == {"region": 200}


def test_a_zone_that_drains_spills() -> None:
    world = world_of(*fleet())
    for name in ("near0", "near1"):
        world.index.instances[name].avoid_until = 130.0
    assert gone_to(world) == {"region": 200}


def test_a_retry_goes_to_the_other_one_near_by_and_then_further() -> None:
    world = world_of(*fleet())
    session = world.session(now=100.0, deadline=130.0)
    went = []
    for _ in range(6):
        step = session.next(100.0)
        assert isinstance(step, Send)
        went.append(step.candidate.agent_id)
        session.record(Unsent("connect", "refused"), 100.0)
    assert sorted(went[:2]) == ["near0", "near1"]
    assert sorted(went[2:4]) == ["region0", "region1"]
    assert sorted(went[4:]) == ["far0", "far1"]


def test_a_pinned_call_goes_as_far_as_it_must() -> None:
    assert gone_to(world_of(*fleet()), calls=5, pinned="far0") == {"far": 5}


def test_an_instance_that_moves_is_grouped_anew() -> None:
    world = world_of(agent("old", zone=MINE), agent("new", zone="us/a"))
    assert gone_to(world, calls=5) == {"old": 5}
    world.index.apply(Upsert(agent("old", zone="us/b"), 9), 100.0)
    world.index.apply(Upsert(agent("new", zone=MINE), 10), 100.0)
    assert gone_to(world, calls=5) == {"new": 5}
