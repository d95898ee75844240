"""What all calls of a capability may spend on retries together."""

from __future__ import annotations

import pytest

from agent_reach.config import BreakerConfig, EjectionConfig, ReachConfig, RetryConfig
from agent_reach.errors import NoHealthyAgent, RemoteError
from agent_reach.routing.budget import RetryAllowance, RetryBudget
from agent_reach.routing.outcomes import LostAnswer, Outcome, Unsent
from agent_reach.routing.session import CallSession
from agent_reach.routing.steps import Raise, Return, Send, Wait
from tests.routing.world import CAPABILITY, World, agent, ok, rejected

REFUSED = Unsent("connect", "connection refused")
RESET = LostAnswer("connection reset")
DRAINING = rejected(503, "Draining", executed=False, state="draining")
# Neither breakers nor pauses, and nobody waits for an outage to end: what is left are the rules of the budget.
NO_BREAKER = BreakerConfig(consecutive_failures=10**6, min_calls=10**6)


def world_of(count: int = 3, **retry: float) -> World:
    config = ReachConfig(
        retry=RetryConfig(base_s=0.0, patience_s=0.0, **retry),  # type: ignore[arg-type]
        breaker=NO_BREAKER,
        ejection=EjectionConfig(max_share=0.0),
    )
    return World(*(agent(f"a{n}") for n in range(count)), config=config)


def play(session: CallSession, outcomes: list[Outcome] | Outcome, now: float) -> tuple[Return | Raise, int]:
    """Drive a call to its end; the last outcome is repeated. Returns the end and how many attempts it took."""
    script = outcomes if isinstance(outcomes, list) else [outcomes]
    tried = 0
    while True:
        step = session.next(now)
        match step:
            case Send():
                session.record(script[min(tried, len(script) - 1)], now)
                tried += 1
            case Wait(seconds):
                now += seconds
            case Return() | Raise():
                return step, tried


@pytest.mark.parametrize("calls", [1000, 200])
def test_when_everything_fails_the_load_grows_by_a_fifth_and_not_threefold(calls: int) -> None:
    """1,000 calls within one window: at most 1.2 times the calls, plus the least of a window."""
    world = world_of()
    attempts = sum(play(world.session(now=n * 0.001), RESET, n * 0.001)[1] for n in range(calls))
    assert calls * 1.15 <= attempts <= calls * 1.2 + 3


def test_over_many_windows_it_stays_a_fifth() -> None:
    world = world_of()
    attempts = sum(play(world.session(now=n * 0.1, deadline=n * 0.1 + 30), RESET, n * 0.1)[1] for n in range(1000))
    assert 1000 * 1.1 <= attempts <= 1000 * 1.2 + 3 * 10


def test_single_failures_are_repeated_whatever_else_goes_on() -> None:
    """One failure in ten calls: a fifth is enough to repeat each of them."""
    world = world_of()
    for number in range(500):
        script: list[Outcome] = [RESET, ok("a0")] if number % 10 == 0 else [ok("a0")]
        end, _ = play(world.session(now=number * 0.01, deadline=99.0), script, number * 0.01)
        assert isinstance(end, Return), number


def test_the_first_call_in_a_long_time_may_be_repeated_twice() -> None:
    world = world_of()
    for now in (0.0, 100.0, 200.0):
        end, attempts = play(world.session(now=now, deadline=now + 30, allowance=RetryAllowance(5)), RESET, now)
        assert isinstance(end, Raise)
        assert attempts == 3


def test_the_window_forgets() -> None:
    world = world_of()
    while play(world.session(allowance=RetryAllowance(9)), RESET, 0.0)[1] > 1:
        pass
    assert play(world.session(now=8.9, deadline=30.0), RESET, 8.9)[1] == 1
    assert play(world.session(now=11.1, deadline=40.0, allowance=RetryAllowance(9)), RESET, 11.1)[1] == 3


def test_the_error_says_why_it_was_not_repeated() -> None:
    world = world_of(budget_ratio=0.0, budget_least=0)
    for outcome, expected in ((RESET, NoHealthyAgent), (rejected(503), RemoteError)):
        end, attempts = play(world.session(), outcome, 0.0)
        assert isinstance(end, Raise)
        assert isinstance(end.error, expected)
        assert attempts == 1
        assert str(end.error).endswith("(not repeated: too many calls of this capability fail)")
    end, _ = play(world_of().session(retry=RetryConfig(max_attempts=1)), RESET, 0.0)
    assert isinstance(end, Raise)
    assert "not repeated: too many" not in str(end.error), "that one had no attempt left anyway"


@pytest.mark.parametrize("outcome", [REFUSED, DRAINING], ids=["never sent", "draining"])
def test_a_move_that_costs_no_peer_anything_needs_no_leave(outcome: Outcome) -> None:
    world = world_of(4, budget_ratio=0.0, budget_least=0)
    end, attempts = play(world.session(), [outcome, outcome, outcome, ok("a0")], 0.0)
    assert isinstance(end, Return)
    assert attempts == 4


def test_such_a_move_leaves_the_budget_to_others() -> None:
    world = world_of(3, budget_ratio=0.0, budget_least=1)
    for name in ("a0", "a1"):
        end, attempts = play(world.session(preferred=(name,)), [REFUSED, ok("a2")], 0.0)
        assert isinstance(end, Return)
        assert attempts == 2
    assert play(world.session(), RESET, 0.0)[1] == 2


def test_once_all_were_tried_dialing_again_is_a_retry_like_any() -> None:
    world = world_of(2, budget_ratio=0.0, budget_least=0)
    end, attempts = play(world.session(), REFUSED, 0.0)
    assert isinstance(end, Raise)
    assert attempts == 2
    assert "not repeated" in str(end.error)


def test_each_capability_has_a_budget_of_its_own() -> None:
    config = ReachConfig(retry=RetryConfig(base_s=0.0, budget_ratio=0.0, budget_least=1), breaker=NO_BREAKER)
    world = World(*(agent(f"a{n}", ["first.thing.v1", "second.thing.v1"]) for n in range(3)), config=config)
    assert play(world.session(capability="first.thing.v1"), RESET, 0.0)[1] == 2
    assert play(world.session(capability="first.thing.v1"), RESET, 0.0)[1] == 1
    assert play(world.session(capability="second.thing.v1"), RESET, 0.0)[1] == 2


def test_a_budget_is_a_share_of_the_calls_of_its_window_or_its_least() -> None:
    budget = RetryBudget(0.2, 3, 10.0)
    assert budget.left(0.0) == 3
    for _ in range(100):
        budget.call_began(0.0)
    assert budget.left(0.0) == pytest.approx(20)
    for _ in range(20):
        budget.spend(0.5)
    assert budget.left(0.5) == pytest.approx(0)
    assert budget.left(10.5) == 3


def test_a_retry_that_succeeded_earns_two_more_for_as_long_as_the_window() -> None:
    budget = RetryBudget(0.0, 3, 10.0)
    budget.spend(0.0)
    assert budget.left(0.0) == 2
    budget.paid_off(0.5)
    assert budget.left(0.5) == 3 + 2
    assert budget.left(10.5) == 3


def share_of_successes(world: World, failing: float, calls: int = 1200) -> tuple[float, float, int]:
    """Where each attempt fails so often: (calls that succeeded, attempts a call, calls not repeated for others)."""
    succeeded = attempts = refused = 0
    for number in range(calls):
        now = number * 0.01
        script: list[Outcome] = [RESET if world.rng.random() < failing else ok("a0") for _ in range(3)]
        end, tried = play(world.session(now=now, deadline=now + 30, allowance=RetryAllowance(9)), script, now)
        attempts += tried
        succeeded += isinstance(end, Return)
        refused += isinstance(end, Raise) and "not repeated: too many" in str(end.error)
    return succeeded / calls, attempts / calls, refused


def test_while_at_least_one_retry_in_three_succeeds_they_go_on() -> None:
    succeeded, attempts, refused = share_of_successes(world_of(), failing=0.6)
    assert succeeded == pytest.approx(1 - 0.6**3, abs=0.03)
    assert attempts == pytest.approx(1 + 0.6 + 0.36, abs=0.06)
    assert refused < 10, "at the very beginning nothing is known"


def test_where_retries_hardly_ever_succeed_they_soon_are_a_fifth_and_what_the_few_earned() -> None:
    succeeded, attempts, refused = share_of_successes(world_of(), failing=0.95)
    assert attempts < 1 + 0.2 + 3 * 0.05
    assert succeeded < 0.12
    assert refused > 600


@pytest.mark.parametrize("moved", [REFUSED, DRAINING], ids=["never sent", "draining"])
def test_a_move_that_was_free_earns_nothing(moved: Outcome) -> None:
    world = world_of(2, budget_ratio=0.0)
    assert play(world.session(), [moved, ok("a0")], 0.0)[1] == 2
    assert world.router.shared(CAPABILITY).retries.left(0.0) == 3


def test_what_a_purse_lends_it_has_no_longer_until_it_comes_back() -> None:
    purse = RetryAllowance(5)
    assert (purse.lend(last=False), purse.left) == (2, 3)
    purse.give_back(2)
    assert (purse.lend(last=True), purse.left, purse.take()) == (5, 0, False)
