"""Scores and picks."""

from __future__ import annotations

from collections import Counter

import pytest

from agent_reach.config import EjectionConfig
from agent_reach.routing import ejection
from agent_reach.routing.breaker import Verdict
from agent_reach.routing.instance import Candidate
from agent_reach.routing.selection import pick
from tests.routing.world import CAPABILITY, World, agent


def anyone(_candidate: Candidate) -> bool:
    return True


def candidates(world: World) -> tuple[Candidate, ...]:
    return world.index.lookup(CAPABILITY).candidates


def picked(world: World, now: float = 100.0) -> Candidate:
    chosen = pick(candidates(world), anyone, world.scorer, now, world.rng, 8)
    assert chosen is not None
    return chosen


def share(world: World, agent_id: str, now: float = 100.0, picks: int = 2000) -> float:
    return sum(picked(world, now).agent_id == agent_id for _ in range(picks)) / picks


def test_cost_is_latency_times_calls_in_flight_over_weight() -> None:
    world = World(agent("a", weight=2.0))
    (candidate,) = candidates(world)
    candidate.latency.observe(0.4, 100.0)
    candidate.instance.in_flight = 2
    score = world.scorer.scores([candidate], 100.0)[0]
    assert score.cost == pytest.approx(0.4 * (1 + 2 / 8**0.5) / 2)
    assert str(score) == "cost 0.3414 = latency 400.0 ms x (1 + 2 in flight / sqrt(8 slots)) / weight 2"
    assert world.scorer.costs([candidate], 100.0)[0] == score.cost
    assert "warming up (10%)" in str(world.scorer.scores([candidate], 0.0)[0])


def test_a_new_instance_warms_up_over_ten_seconds() -> None:
    world = World(agent("a"))
    (candidate,) = candidates(world)
    assert world.scorer.warm(candidate, 0.0) == 0.1
    assert world.scorer.warm(candidate, 5.0) == 0.5
    assert world.scorer.warm(candidate, 10.0) == 1.0


def test_an_instance_without_history_is_taken_for_as_fast_as_its_rival() -> None:
    world = World(agent("a"), agent("b"))
    known, unknown = candidates(world)
    known.latency.observe(3.0, 100.0)
    score = world.scorer.scores((known, unknown), 100.0)[1]
    assert score.latency_s == pytest.approx(3.0)
    assert not score.known
    # What a failure was booked as is nobody's latency.
    known.latency.fail(5.0, 100.0)
    assert world.scorer.scores((known, unknown), 100.0)[1].latency_s == world.config.scoring.seed_latency_s


def test_one_that_only_ever_failed_is_not_taken_for_free_once_that_has_faded() -> None:
    world = World(agent("a"), agent("b"))
    known, failed = candidates(world)
    known.latency.observe(0.1, 200.0)
    failed.latency.fail(5.0, 0.0)
    assert world.scorer.scores((known, failed), 200.0)[1].latency_s == pytest.approx(0.1)


def test_a_newcomer_gets_a_growing_share_of_the_calls_and_not_none_until_it_is_warm() -> None:
    """Of two equal instances, one of them new: a tenth of its half, then half of it after 5 s, all after 10 s."""
    shares = {}
    for age_s in (0.0, 5.0, 10.0):
        world = World(agent("old"), agent("new"))
        for candidate in candidates(world):
            candidate.latency.observe(0.1, 100.0)
        world.index.instances["old"].warm_from = -100.0
        world.index.instances["new"].warm_from = 100.0 - age_s
        picks = 0
        for _ in range(2000):
            # Whichever was picked is busy, so the next draw would go to the other: equal instances take turns.
            chosen = picked(world, 100.0)
            picks += chosen.agent_id == "new"
            for candidate in candidates(world):
                candidate.instance.in_flight = int(candidate is chosen)
        shares[age_s] = picks / 2000
    assert 0.03 < shares[0.0] < 0.15
    assert 0.25 < shares[5.0] < 0.40
    assert 0.45 < shares[10.0] < 0.55


def test_where_all_are_new_nobody_is_held_back() -> None:
    world = World(agent("a"), agent("b"))
    for candidate in candidates(world):
        candidate.latency.observe(0.1, 0.0)
    world.index.instances["b"].in_flight = 1
    assert share(world, "a", now=0.0) == 1.0


def test_an_instance_of_double_weight_carries_double_the_load() -> None:
    world = World(agent("heavy", weight=2.0), agent("light"))
    for candidate in candidates(world):
        candidate.latency.observe(0.1, 100.0)
    for _ in range(300):
        picked(world, 100.0).instance.in_flight += 1
    assert world.index.instances["heavy"].in_flight == pytest.approx(200, abs=2)


def test_a_slow_instance_of_three_gets_nothing_while_it_is_slow() -> None:
    world = World(agent("slow"), agent("b"), agent("c"))
    for candidate, latency in zip(candidates(world), (5.0, 0.1, 0.1), strict=True):
        candidate.latency.observe(latency, 100.0)
    assert share(world, "slow") == 0.0


def test_equal_instances_share_equally() -> None:
    world = World(*(agent(f"a{n}") for n in range(4)))
    picks: Counter[str] = Counter()
    for _ in range(4000):
        chosen = picked(world, 100.0)
        picks[chosen.agent_id] += 1
        chosen.latency.observe(0.1, 100.0)
    assert all(0.15 < picks[f"a{n}"] / 4000 < 0.35 for n in range(4))


@pytest.mark.parametrize(
    ("count", "choices", "looked_at"), [(500, 2, 2), (2000, 8, 8), (9, 8, 8), (8, 8, 8), (3, 8, 3), (3, 2, 2)]
)
def test_a_pick_looks_at_so_many_candidates_or_at_all_if_there_are_no_more(
    count: int, choices: int, looked_at: int
) -> None:
    world = World(*(agent(f"a{n}") for n in range(count)))
    asked = 0

    def counting(_candidate: Candidate) -> bool:
        nonlocal asked
        asked += 1
        return True

    assert pick(candidates(world), counting, world.scorer, 0.0, world.rng, choices) is not None
    assert asked == looked_at


def test_of_eight_the_best_is_always_found_and_of_more_as_often_as_it_is_drawn() -> None:
    for count, expected in ((8, 1.0), (16, 0.5)):
        world = World(*(agent(f"a{n}") for n in range(count)))
        for number, candidate in enumerate(candidates(world)):
            candidate.latency.observe(0.1 if number == count - 1 else 0.2, 100.0)
        assert share(world, f"a{count - 1}") == pytest.approx(expected, abs=0.05)


def test_where_most_of_those_drawn_cannot_be_used_the_best_of_the_others_is_chosen() -> None:
    """Eight of twelve are drawn: whoever of the four usable ones is among them is compared, or all four."""
    world = World(*(agent(f"a{n:02}") for n in range(12)))
    usable = {"a00", "a01", "a02", "a03"}
    for candidate in candidates(world):
        candidate.latency.observe(0.2 if candidate.agent_id in usable else 0.1, 100.0)
    picks = Counter(
        chosen.agent_id
        for _ in range(400)
        if (chosen := pick(candidates(world), lambda c: c.agent_id in usable, world.scorer, 100.0, world.rng, 8))
    )
    assert set(picks) == usable
    assert sum(picks.values()) == 400


def test_the_only_usable_one_of_many_is_found() -> None:
    world = World(*(agent(f"a{n}") for n in range(200)))
    found = pick(candidates(world), lambda c: c.agent_id == "a77", world.scorer, 0.0, world.rng, 8)
    assert found is not None
    assert found.agent_id == "a77"
    assert pick(candidates(world), lambda c: False, world.scorer, 0.0, world.rng, 8) is None
    assert pick((), anyone, world.scorer, 0.0, world.rng, 8) is None


def shut_out(world: World, *agent_ids: str) -> None:
    for agent_id in agent_ids:
        breaker = world.index.instances[agent_id].breaker
        for _ in range(5):
            permit, _ = breaker.admit(0.0)
            breaker.record(permit, Verdict.FAILURE, 0.0, world.rng, lambda: True)


def test_an_instance_whose_breaker_waits_for_its_probe_wins_its_draw() -> None:
    world = World(agent("a"), agent("b"))
    for candidate in candidates(world):
        candidate.latency.observe(0.01 if candidate.agent_id == "a" else 9.0, 0.0)
    shut_out(world, "b")
    chosen = picked(world, 31.0)
    assert chosen.agent_id == "b"


@pytest.mark.parametrize(
    ("count", "already_out", "allowed"),
    [(1, 0, False), (2, 0, True), (2, 1, False), (3, 0, True), (3, 1, False), (4, 1, True), (4, 2, False)],
)
def test_at_most_half_may_be_shut_out_and_never_the_last(count: int, already_out: int, allowed: bool) -> None:
    world = World(*(agent(f"a{n}") for n in range(count)))
    shut_out(world, *(f"a{n}" for n in range(already_out)))
    last = world.index.instances[f"a{count - 1}"]
    assert ejection.may_shut_out(last, candidates(world), 1.0, world.config.ejection) is allowed


def fails_but_stays(world: World, *agent_ids: str) -> None:
    """They fail like those that are shut out, but the cap keeps them in."""
    for agent_id in agent_ids:
        breaker = world.index.instances[agent_id].breaker
        for _ in range(5):
            permit, _ = breaker.admit(0.0)
            breaker.record(permit, Verdict.FAILURE, 0.0, world.rng, lambda: False)


@pytest.mark.parametrize(
    ("out", "failing", "allowed"),
    [
        ((), ("a1",), True),
        ((), ("a1", "a2"), True),
        ((), ("a1", "a2", "a3"), False),
        (("a1",), ("a2",), True),
        (("a1",), ("a2", "a3"), False),
    ],
)
def test_an_instance_is_shut_out_only_while_another_one_is_well(
    out: tuple[str, ...], failing: tuple[str, ...], allowed: bool
) -> None:
    """Where all fail alike the fault is shared; each one less would only be more load for the rest."""
    world = World(*(agent(f"a{n}") for n in range(4)))
    shut_out(world, *out)
    fails_but_stays(world, *failing)
    mine = world.index.instances["a0"]
    assert ejection.may_shut_out(mine, candidates(world), 1.0, world.config.ejection) is allowed


def test_one_where_nothing_listens_is_not_well() -> None:
    world = World(agent("a0"), agent("a1"), agent("a2"))
    for agent_id in ("a1", "a2"):
        breaker = world.index.instances[agent_id].breaker
        permit, _ = breaker.admit(0.0)
        breaker.record(permit, Verdict.UNREACHABLE, 0.0, world.rng, lambda: True)
    config = EjectionConfig(max_share=1.0)
    assert not ejection.may_shut_out(world.index.instances["a0"], candidates(world), 1.0, config)


@pytest.mark.parametrize(("count", "out", "panic"), [(2, 1, False), (4, 2, False), (4, 3, True), (3, 2, True)])
def test_below_half_available_health_is_ignored(count: int, out: int, panic: bool) -> None:
    world = World(*(agent(f"a{n}") for n in range(count)))
    shut_out(world, *(f"a{n}" for n in range(out)))
    assert ejection.panics(candidates(world), 1.0, world.config.ejection) is panic
