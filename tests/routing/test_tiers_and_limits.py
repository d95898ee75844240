"""How many calls are in flight: of one timeout tier, and to one instance as learnt from how it answers."""

from __future__ import annotations

import pytest

from agent_reach.config import BulkheadConfig, LimitConfig, ReachConfig
from agent_reach.errors import Overloaded
from agent_reach.model import AgentInfo
from agent_reach.routing.explain import explain
from agent_reach.routing.limits import GradientLimit
from agent_reach.routing.outcomes import Cancelled, LostAnswer, Outcome, Unsent
from agent_reach.routing.session import CallSession
from agent_reach.routing.steps import Raise, Send, Wait
from tests.routing.world import CAPABILITY, World, agent, ok, rejected

SLOW, FAST = "report.write.v1", "lookup.find.v1"


def sent(session: CallSession, now: float = 0.0) -> Send:
    step = session.next(now)
    assert isinstance(step, Send), step
    return step


# --- tiers ---------------------------------------------------------------------------------------------------


def two_tiers(per_tier: int = 2) -> World:
    return World(
        agent("slow", [SLOW], timeout="long"),
        agent("fast", [FAST], timeout="light"),
        config=ReachConfig(bulkheads=BulkheadConfig(per_tier=per_tier)),
    )


def slow_call(world: World) -> CallSession:
    return world.session(capability=SLOW, tier="long", deadline=60.0)


def fast_call(world: World) -> CallSession:
    return world.session(capability=FAST, tier="light")


def test_a_tier_full_of_slow_calls_holds_no_fast_one_up() -> None:
    world = two_tiers()
    for _ in range(2):
        sent(slow_call(world))
    assert isinstance(slow_call(world).next(0.0), Wait)
    for _ in range(20):
        session = fast_call(world)
        sent(session)
        session.record(ok("fast"), 0.01)
    assert world.router.in_flight == {"long": 2}


def test_a_call_of_a_full_tier_waits_for_a_place_and_gets_it() -> None:
    world = two_tiers()
    held = [slow_call(world) for _ in range(2)]
    for session in held:
        sent(session)
    waiting = slow_call(world)
    step = waiting.next(0.0)
    assert isinstance(step, Wait)
    assert step.until_place
    assert step.seconds == pytest.approx(1.0)
    held[0].record(ok("slow"), 0.4)
    sent(waiting, 0.4)
    assert world.router.in_flight == {"long": 2}


def test_a_call_that_gets_no_place_is_told_which_tier_is_full_and_which_setting_says_so() -> None:
    world = two_tiers()
    for _ in range(2):
        sent(slow_call(world))
    session = slow_call(world)
    assert isinstance(session.next(0.0), Wait)
    end = session.next(1.0)
    assert isinstance(end, Raise)
    assert isinstance(end.error, Overloaded)
    for words in ("2 calls of tier 'long' in flight", "BulkheadConfig.per_tier", "Nothing was executed"):
        assert words in str(end.error)
    assert session.attempts == ()


def test_a_retry_needs_a_place_in_its_tier_too() -> None:
    world = two_tiers(per_tier=1)
    first, second = slow_call(world), slow_call(world)
    first.record(LostAnswer("reset"), 0.1, sent(first))
    sent(second, 0.2)
    step = first.next(5.0)
    assert isinstance(step, Wait)
    second.record(ok("slow"), 5.1)
    sent(first, 5.1)


@pytest.mark.parametrize(
    "outcome",
    [ok("slow"), LostAnswer("reset"), Unsent("connect", "refused"), rejected(500), Cancelled()],
    ids=lambda outcome: type(outcome).__name__,
)
def test_however_calls_end_their_tier_counts_nothing_in_the_end(outcome: Outcome) -> None:
    world = two_tiers(per_tier=100)
    sessions = [slow_call(world) for _ in range(20)]
    for session in sessions:
        sent(session)
    assert world.router.in_flight == {"long": 20}
    for session in sessions:
        session.record(outcome, 1.0)
    assert world.router.in_flight == {}
    assert world.in_flight() == 0


# --- the learnt limit ----------------------------------------------------------------------------------------

CONFIG = LimitConfig(initial=20, least=4, most=200)


def fed(latency_s: float, times: int, limit: GradientLimit | None = None, load: float = 1.0) -> GradientLimit:
    """A limit that saw so many calls of this latency, with that share of its places in use."""
    limit = limit or GradientLimit(CONFIG)
    for _ in range(times):
        limit.observe(latency_s, int(limit.value * load))
    return limit


def test_it_grows_while_latency_is_steady_and_its_places_are_used_up_to_the_most() -> None:
    limit = fed(0.1, 20)
    assert 20 < limit.value <= 40
    assert fed(0.1, 1000, limit).value == 200


def test_it_does_not_grow_while_less_than_half_of_it_is_in_use() -> None:
    assert fed(0.1, 1000, load=0.45).value == 20
    assert fed(0.1, 50, load=0.55).value > 20


def test_it_shrinks_when_answers_take_longer_than_they_used_to() -> None:
    limit = fed(0.1, 200)
    before = limit.value
    assert fed(0.5, 20, limit).value < before / 2


def test_half_as_long_again_is_borne() -> None:
    limit = fed(0.1, 50)
    before = limit.value
    assert fed(0.14, 20, limit).value >= before


def test_it_shrinks_with_each_refusal_and_never_below_the_least() -> None:
    limit = fed(0.1, 200)
    before = limit.value
    limit.observe(0.0, 10, dropped=True)
    assert limit.value == pytest.approx(before * 0.9, abs=1)
    for _ in range(200):
        limit.observe(0.0, 10, dropped=True)
    assert limit.value == 4
    assert fed(0.1, 100, limit).value > 4, "and it grows again"


def test_after_an_overload_the_average_comes_down_sooner_than_it_went_up() -> None:
    """Long answers became its habit; when they are short again, it must not take 600 calls to notice a new rise."""
    limit = fed(2.0, 2000)
    fed(0.1, 100, limit)
    before = limit.value
    assert fed(1.0, 20, limit).value < before


def adaptive(*infos: AgentInfo, **limit: int) -> World:
    config = ReachConfig(bulkheads=BulkheadConfig(adaptive=LimitConfig(**limit)))
    return World(*infos, config=config)


def test_an_instance_at_its_learnt_limit_is_full() -> None:
    world = adaptive(agent("a"), initial=4, least=2)
    held = [world.session() for _ in range(4)]
    for session in held:
        sent(session)
    step = world.session().next(0.0)
    assert isinstance(step, Wait)
    assert step.until_place
    told = explain(CAPABILITY, world.router, now=0.0, stale=False, age_s=0.0)
    assert [gone.agent_id for gone in told.excluded] == ["a"]
    held[0].record(ok("a"), 0.1)
    sent(world.session(), 0.1)


def test_refusals_and_timeouts_of_calls_lower_it_and_other_failures_and_cancelled_calls_do_not() -> None:
    overloaded = rejected(503, "Overloaded", executed=False, state="overloaded")
    for outcome, lowers in (
        (overloaded, True),
        (LostAnswer("no answer", timed_out=True), True),
        (LostAnswer("reset"), False),
        (rejected(500), False),
        (Cancelled(), False),
    ):
        world = adaptive(agent("a"), initial=20)
        (candidate,) = world.index.lookup(CAPABILITY).candidates
        assert candidate.learnt.limit is not None
        session = world.session()
        session.record(outcome, 5.0, sent(session))
        assert (candidate.learnt.limit.value < 20) is lowers, outcome


def test_answers_raise_it_as_far_as_it_is_used() -> None:
    world = adaptive(agent("a"), initial=4, least=2)
    (candidate,) = world.index.lookup(CAPABILITY).candidates
    assert candidate.learnt.limit is not None
    now = 0.0
    for _ in range(20):
        sessions = []
        while isinstance((session := world.session(now=now, deadline=now + 30)).next(now), Send):
            sessions.append(session)
        assert len(sessions) == min(candidate.learnt.limit.value, 100)
        now += 0.1
        for session in sessions:
            session.record(ok("a"), now)
    assert candidate.learnt.limit.value > 20


def test_who_announces_what_it_bears_is_believed() -> None:
    world = adaptive(agent("a", max_concurrency=30), initial=4, least=2)
    for _ in range(30):
        sent(world.session())
    assert isinstance(world.session().next(0.0), Wait)
