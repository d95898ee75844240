"""What makes an instance dear or cheap: calls in flight, places, the parts of a weighted score."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_reach.config import ReachConfig, ScoreWeights, ScoringConfig
from agent_reach.model import LoadReport
from agent_reach.routing.explain import explain
from agent_reach.routing.instance import Candidate, Learnt
from agent_reach.routing.scoring import Score
from agent_reach.routing.selection import pick
from agent_reach.routing.session import CallSession
from agent_reach.routing.steps import Send
from tests.routing.world import CAPABILITY, World, agent, ok


def anyone(_candidate: Candidate) -> bool:
    return True


def candidates(world: World) -> tuple[Candidate, ...]:
    return world.index.lookup(CAPABILITY).candidates


def picked(world: World, times: int, now: float = 100.0, choices: int = 2) -> Counter[str]:
    """How often each was picked out of all."""
    picks = [pick(candidates(world), anyone, world.scorer, now, world.rng, choices) for _ in range(times)]
    return Counter(candidate.agent_id for candidate in picks if candidate is not None)


def score(world: World, agent_id: str, now: float) -> Score:
    """The score among all that there are."""
    (candidate,) = [c for c in candidates(world) if c.agent_id == agent_id]
    return world.scorer.scores(candidates(world), now)[candidates(world).index(candidate)]


# --- calls in flight -----------------------------------------------------------------------------------------


def test_a_call_that_hangs_makes_its_instance_dearer_before_it_ends() -> None:
    world = World(agent("hangs"), agent("well"))
    for candidate in candidates(world):
        candidate.latency.observe(0.1, 100.0)
    hangs, _ = candidates(world)
    hangs.learnt.began = [100.0]
    assert score(world, "hangs", 100.05).latency_s == pytest.approx(0.1, rel=0.01)
    late = score(world, "hangs", 107.0)
    assert late.latency_s == pytest.approx(7.0)
    assert late.waiting
    assert "latency 7000.0 ms (calls in flight so far)" in str(late)
    assert picked(world, 100, now=107.0) == {"well": 100}
    # Once it ended, what is known of the instance are answers again.
    hangs.learnt.began = []
    assert not score(world, "hangs", 107.0).waiting
    assert score(world, "hangs", 107.0).latency_s < 0.1


@pytest.mark.parametrize(
    ("began", "age_s"),
    [
        ([], 0.0),
        ([10.0], 90.0),
        # Half of them: the other half may be as quick as ever.
        ([10.0, 99.0], 1.0),
        ([10.0, 20.0, 99.0], 80.0),
        # One long call among several is no news, however long it takes.
        ([0.0, 98.0, 99.0, 99.5], 1.0),
        ([10.0, 20.0, 30.0, 99.0], 70.0),
    ],
    ids=str,
)
def test_the_age_of_calls_in_flight_is_what_more_than_half_of_them_have_reached(
    began: list[float], age_s: float
) -> None:
    learnt = Learnt(ReachConfig())
    learnt.began = began
    assert (learnt.in_flight, learnt.age_s(100.0)) == (len(began), age_s)


@pytest.mark.parametrize("hanging", range(6))
def test_an_instance_looks_slow_once_most_of_its_calls_hang_and_not_for_the_sake_of_a_few(hanging: int) -> None:
    world = World(agent("a"))
    (candidate,) = candidates(world)
    candidate.latency.observe(0.1, 100.0)
    candidate.learnt.began = sorted([40.0] * hanging + [99.95] * (5 - hanging))
    told = score(world, "a", 100.0)
    assert told.waiting is (hanging >= 3)
    assert told.latency_s == pytest.approx(60.0 if hanging >= 3 else 0.1)


@given(st.lists(st.tuples(st.floats(0, 100), st.booleans()), max_size=25), st.randoms(use_true_random=False))
def test_of_calls_in_flight_that_begin_and_end_in_any_order_the_count_and_the_age_are_exact(
    steps: list[tuple[float, bool]], rng: random.Random
) -> None:
    world, now, open_calls = World(agent("a", max_concurrency=100)), 0.0, list[tuple[CallSession, Send, float]]()
    (candidate,) = candidates(world)
    for seconds, begins in steps:
        now += seconds
        if begins:
            session = world.session(now=now, deadline=now + 1e6)
            step = session.next(now)
            assert isinstance(step, Send)
            open_calls.append((session, step, now))
        elif open_calls:
            session, step, _ = open_calls.pop(rng.randrange(len(open_calls)))
            session.record(ok("a"), now, step)
        ages = sorted(now - at for _, _, at in open_calls)
        assert candidate.learnt.in_flight == candidate.instance.in_flight == len(ages)
        reached = sum(age >= candidate.learnt.age_s(now) for age in ages)
        assert reached * 2 > len(ages) or not ages
        assert candidate.learnt.age_s(now) in (ages or [0.0])


# --- calls in flight, slots and what it says of its load -----------------------------------------------------


@pytest.mark.parametrize(("slots", "in_flight", "cost"), [(4, 4, 0.3), (None, 4, 0.2), (1, 3, 0.4), (400, 40, 0.3)])
def test_a_call_in_flight_costs_the_less_the_more_an_instance_runs_at_a_time(
    slots: int | None, in_flight: int, cost: float
) -> None:
    """Who announces nothing is taken for one that runs as many as the settings say."""
    world = World(agent("a", max_concurrency=slots), config=ReachConfig(scoring=ScoringConfig(assumed_slots=16)))
    (candidate,) = candidates(world)
    candidate.latency.observe(0.1, 100.0)
    candidate.instance.in_flight = in_flight
    told = score(world, "a", 100.0)
    assert told.cost == pytest.approx(cost)
    assert f"(1 + {in_flight} in flight / sqrt({slots or 16} slots))" in str(told)


def test_the_slots_of_a_capability_come_before_those_of_its_agent() -> None:
    world = World(agent("a", slots=4, max_concurrency=100))
    assert score(world, "a", 100.0).slots == 4


def test_of_two_alike_the_one_that_runs_more_at_a_time_bears_more_but_not_in_proportion() -> None:
    """100 slots against 4: 10 calls cost there what 2 cost here, so 5 times as many, and not 25."""
    world = World(agent("large", max_concurrency=100), agent("small", max_concurrency=4))
    for candidate in candidates(world):
        candidate.latency.observe(0.1, 100.0)
    for _ in range(12):
        chosen = pick(candidates(world), anyone, world.scorer, 100.0, world.rng, 8)
        assert chosen is not None
        chosen.instance.in_flight += 1
    assert world.index.instances["small"].in_flight == pytest.approx(2, abs=1)


def test_what_it_says_of_its_load_is_shown_and_costs_nothing() -> None:
    """It is old when it arrives, and all callers would shun the same instance at once."""
    world = World(agent("a"), agent("b"))
    session = world.session(pinned="a")
    step = session.next(0.0)
    assert isinstance(step, Send)
    session.record(ok("a", load=LoadReport(in_flight=50, queued=9)), 0.1)
    before = score(world, "a", 0.1)
    candidate = candidates(world)[0]
    assert candidate.learnt.load == LoadReport(in_flight=50, queued=9)
    (view,) = [v for v in explain(CAPABILITY, world.router, now=0.1, stale=False, age_s=0.0).candidates if v.load]
    assert "says 50 running, 9 queued" in str(view)
    candidate.learnt.load = None
    assert score(world, "a", 0.1) == before


# --- the weighted score --------------------------------------------------------------------------------------


def weighted(*infos: object, zone: str | None = None, **shares: float) -> World:
    config = ReachConfig(scoring=ScoringConfig(weights=ScoreWeights(**shares)))
    return World(*infos, config=config, zone=zone)  # type: ignore[arg-type]


def parts(world: World, agent_id: str, now: float = 100.0) -> dict[str, float]:
    return {name: value for name, value, _ in score(world, agent_id, now).parts}


def test_the_success_part_follows_the_last_fifty_calls_and_is_forgiven_within_the_hour() -> None:
    world = weighted(agent("a"), success=1)
    (candidate,) = candidates(world)
    assert parts(world, "a") == {"success": 1.0}
    for _ in range(50):
        candidate.learnt.success.observe(False, 100.0)
    assert parts(world, "a")["success"] < 0.2
    for _ in range(50):
        candidate.learnt.success.observe(True, 100.0)
    assert 0.8 < parts(world, "a")["success"] < 0.95
    assert parts(world, "a", 100.0 + 3600)["success"] > 0.99


def test_the_latency_part_is_the_fastest_rivals_over_its_own() -> None:
    world = weighted(agent("fast"), agent("slow"), agent("new"), latency=1)
    fast, slow, _ = candidates(world)
    fast.latency.observe(0.1, 100.0)
    slow.latency.observe(0.4, 100.0)
    assert parts(world, "fast")["latency"] == 1.0
    assert parts(world, "slow")["latency"] == pytest.approx(0.25)
    assert parts(world, "new")["latency"] == 1.0, "an instance without history is taken for the fastest"
    slow.learnt.began = [96.0]
    assert parts(world, "slow")["latency"] == pytest.approx(0.1 / 4), "a call that hangs counts before it ends"


def test_the_load_part_is_the_share_of_places_left() -> None:
    world = weighted(agent("ten", max_concurrency=10), agent("any"), load=1)
    ten, any_ = candidates(world)
    assert parts(world, "ten")["load"] == 1.0
    ten.instance.in_flight = any_.instance.in_flight = 4
    assert parts(world, "ten")["load"] == pytest.approx(0.6)
    assert parts(world, "any")["load"] == pytest.approx(0.96), "without a limit of its own: of 100"
    ten.learnt.load = LoadReport(in_flight=10)
    assert parts(world, "ten")["load"] == pytest.approx(0.6), "what it says of its load is only shown"
    ten.instance.in_flight = 50
    assert parts(world, "ten")["load"] == 0.0


def test_the_locality_part_is_one_here_half_in_the_region_and_nothing_elsewhere() -> None:
    infos = [agent("here", zone="eu/a"), agent("near", zone="eu/b"), agent("far", zone="us/a"), agent("lost")]
    world = weighted(*infos, zone="eu/a", locality=1)
    assert [parts(world, name)["locality"] for name in ("here", "near", "far", "lost")] == [1.0, 0.5, 0.0, 0.0]


def test_the_weight_part_is_relative_to_the_heaviest() -> None:
    world = weighted(agent("heavy", weight=4.0), agent("light", weight=1.0), weight=1)
    assert parts(world, "heavy")["weight"] == 1.0
    assert parts(world, "light")["weight"] == pytest.approx(0.25)


def test_a_weighted_cost_is_what_is_missing_and_prints_its_parts() -> None:
    world = weighted(agent("heavy", weight=2.0), agent("light", weight=1.0), load=0.6, weight=0.4)
    light = candidates(world)[1]
    light.instance.in_flight = 50
    told = score(world, "light", 100.0)
    assert told.cost == pytest.approx(0.6 * 0.5 + 0.4 * 0.5)
    assert str(told) == "cost 0.5000 = missing to load 0.50 x 0.6 + weight 0.50 x 0.4"
    assert world.scorer.costs(candidates(world), 100.0)[1] == told.cost
    assert str(score(world, "light", 1.0)).endswith(", warming up (10%)")


@pytest.mark.parametrize(
    ("preset", "shares"),
    [
        (ScoreWeights.BALANCED, {"success": 0.4, "load": 0.3, "locality": 0.2, "weight": 0.1}),
        (ScoreWeights.AGENT, {"success": 0.5, "latency": 0.3, "load": 0.2}),
    ],
)
def test_the_presets_weigh_as_they_say(preset: ScoreWeights, shares: dict[str, float]) -> None:
    world = World(agent("a"), agent("b"), config=ReachConfig(scoring=ScoringConfig(weights=preset)))
    told = score(world, "a", 100.0)
    assert {name: share for name, _, share in told.parts} == shares


def test_an_agent_that_fails_loses_its_calls_under_the_agent_preset() -> None:
    world = World(
        agent("bad"), agent("well"), config=ReachConfig(scoring=ScoringConfig(weights=ScoreWeights.AGENT))
    )
    bad, well = candidates(world)
    for candidate in (bad, well):
        candidate.latency.observe(0.1, 100.0)
    for _ in range(10):
        bad.learnt.success.observe(False, 100.0)
    assert picked(world, 100) == {"well": 100}


# --- ties ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("choices", [2, 3, 4])
@pytest.mark.parametrize("count", [2, 3, 4, 7])
@pytest.mark.parametrize("shares", [None, ScoreWeights.BALANCED], ids=["expected time", "weighted"])
def test_equals_are_chosen_equally_often_in_whatever_order_they_are_listed(
    count: int, choices: int, shares: ScoreWeights | None
) -> None:
    config = ReachConfig(scoring=ScoringConfig(weights=shares, choices=choices))
    world = World(*(agent(f"a{n}") for n in range(count)), config=config)
    chosen = picked(world, 2000, choices=choices)
    assert all(0.8 < chosen[f"a{n}"] / 2000 * count < 1.2 for n in range(count)), chosen


@pytest.mark.parametrize("dear", [0, 1, 2])
def test_equals_are_chosen_equally_often_with_a_dearer_one_between_them(dear: int) -> None:
    world = World(*(agent(f"a{n}") for n in range(3)))
    for number, candidate in enumerate(candidates(world)):
        candidate.latency.observe(1.0 if number == dear else 0.1, 100.0)
    chosen = picked(world, 2000, choices=3)
    assert len(chosen) == 2
    assert all(0.45 < times / 2000 < 0.55 for times in chosen.values()), chosen
