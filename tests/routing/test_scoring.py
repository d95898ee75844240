"""What makes an instance dear or cheap: calls that hang, and the parts of a weighted score."""

from __future__ import annotations

from collections import Counter

import pytest

from agent_reach.config import ReachConfig, ScoreWeights, ScoringConfig
from agent_reach.model import LoadReport
from agent_reach.routing.instance import Candidate, Learnt
from agent_reach.routing.scoring import Score
from agent_reach.routing.selection import pick
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
    scores = world.scorer.scores(candidates(world), now)
    (told,) = [s for c, s in zip(candidates(world), scores, strict=True) if c.agent_id == agent_id]
    return told


# --- calls in flight -----------------------------------------------------------------------------------------


def test_a_call_that_hangs_makes_its_instance_dearer_before_it_ends() -> None:
    world = World(agent("hangs"), agent("well"))
    for candidate in candidates(world):
        candidate.latency.observe(0.1, 100.0)
    hangs, _ = candidates(world)
    hangs.learnt.began.append(100.0)
    assert score(world, "hangs", 100.05).latency_s == pytest.approx(0.1, rel=0.01)
    late = score(world, "hangs", 107.0)
    assert late.latency_s == pytest.approx(7.0)
    assert late.waiting
    assert "latency 7000.0 ms (calls in flight so far)" in str(late)
    assert picked(world, 100, now=107.0) == {"well": 100}
    # Once it ended, what is known of the instance are answers again.
    hangs.learnt.began.remove(100.0)
    assert not score(world, "hangs", 107.0).waiting
    assert score(world, "hangs", 107.0).latency_s < 0.1


def test_one_long_call_is_no_news_and_most_of_them_hanging_is() -> None:
    learnt = Learnt(ReachConfig())
    assert learnt.age_s(50.0) == 0.0
    learnt.began += [10.0]
    assert learnt.age_s(20.0) == 10.0, "of one call, that one"
    learnt.began += [19.0, 19.5]
    assert learnt.age_s(20.0) == 1.0
    learnt.began[1:] = [11.0, 19.5]
    assert learnt.age_s(20.0) == 9.0
    learnt.began[:] = [10.0, 19.0]
    assert learnt.age_s(20.0) == 1.0, "half of them is not most of them"


def test_what_instances_say_of_their_load_is_shown_and_not_scored() -> None:
    """It is of the past, and callers that believe it rush to the same instance together (docs/routing.md)."""
    world = World(agent("a"))
    before = score(world, "a", 100.0)
    session = world.session(now=100.0, deadline=130.0)
    session.next(100.0)
    session.record(ok("a", load=LoadReport(in_flight=90, queued=9)), 100.0 + before.latency_s)
    assert candidates(world)[0].learnt.load == LoadReport(in_flight=90, queued=9)
    assert score(world, "a", 100.0 + before.latency_s).cost == pytest.approx(before.cost)


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
    slow.learnt.began.append(96.0)
    assert parts(world, "slow")["latency"] == pytest.approx(0.1 / 4), "a call that hangs counts before it ends"


def test_the_load_part_is_the_share_of_places_left() -> None:
    world = weighted(agent("ten", max_concurrency=10), agent("any"), load=1)
    ten, any_ = candidates(world)
    assert parts(world, "ten")["load"] == 1.0
    ten.instance.in_flight = any_.instance.in_flight = 4
    assert parts(world, "ten")["load"] == pytest.approx(0.6)
    assert parts(world, "any")["load"] == pytest.approx(0.96), "without a limit of its own: of 100"
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
@pytest.mark.parametrize("count", [2, 3, 7])
@pytest.mark.parametrize("shares", [None, ScoreWeights.BALANCED], ids=["ewma", "weighted"])
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
