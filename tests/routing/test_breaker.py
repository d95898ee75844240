"""The breaker's state machine, rule by rule, then against anything hypothesis can think of."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from agent_reach.config import BreakerConfig
from agent_reach.routing.breaker import Breaker, BreakerPermit, BreakerState, Verdict

RNG = random.Random(1)
CONFIG = BreakerConfig()


def yes() -> bool:
    return True


def no() -> bool:
    return False


def feed(breaker: Breaker, verdict: Verdict, now: float, times: int = 1) -> None:
    for _ in range(times):
        permit, _ = breaker.admit(now)
        breaker.record(permit, verdict, now, RNG, yes)


def opened(now: float = 0.0) -> Breaker:
    breaker = Breaker(CONFIG)
    feed(breaker, Verdict.FAILURE, now, CONFIG.consecutive_failures)
    assert breaker.state is BreakerState.OPEN
    return breaker


def test_five_failures_in_a_row_open_it_for_15_to_30_s() -> None:
    breaker = opened()
    assert 15.0 <= breaker.until <= 30.0
    assert not breaker.available(breaker.until - 0.001)
    assert breaker.available(breaker.until)


def test_four_failures_and_a_success_leave_it_closed() -> None:
    breaker = Breaker(CONFIG)
    for _ in range(3):
        feed(breaker, Verdict.SUCCESS, 0.0, 20)
        feed(breaker, Verdict.FAILURE, 0.0, 4)
        feed(breaker, Verdict.SUCCESS, 0.0)
    assert breaker.state is BreakerState.CLOSED


def test_a_success_rate_below_80_percent_of_ten_opens_it() -> None:
    breaker = Breaker(CONFIG)
    for _ in range(3):
        feed(breaker, Verdict.SUCCESS, 0.0, 2)
        feed(breaker, Verdict.FAILURE, 0.0)
    assert breaker.state is BreakerState.CLOSED
    feed(breaker, Verdict.FAILURE, 0.0)
    assert breaker.state is BreakerState.OPEN


def test_neutral_outcomes_never_open_it_and_never_heal_it() -> None:
    breaker = Breaker(CONFIG)
    feed(breaker, Verdict.FAILURE, 0.0, 4)
    feed(breaker, Verdict.NEUTRAL, 0.0, 100)
    assert breaker.state is BreakerState.CLOSED
    feed(breaker, Verdict.FAILURE, 0.0)
    assert breaker.state is BreakerState.OPEN


def test_one_probe_at_a_time_then_closed_again() -> None:
    breaker = opened()
    now = breaker.until
    probe, transition = breaker.admit(now)
    assert probe.probe
    assert transition is not None
    assert transition.after is BreakerState.HALF_OPEN
    assert not breaker.available(now)
    closing = breaker.record(probe, Verdict.SUCCESS, now, RNG, yes)
    assert closing is not None
    assert closing.after is BreakerState.CLOSED
    feed(breaker, Verdict.FAILURE, now, 4)
    assert breaker.state is BreakerState.CLOSED
    feed(breaker, Verdict.FAILURE, now)
    assert breaker.state is BreakerState.OPEN


def test_a_failed_probe_doubles_the_time_up_to_the_cap() -> None:
    breaker = opened()
    lengths = []
    for _ in range(6):
        now = breaker.until
        probe, _ = breaker.admit(now)
        breaker.record(probe, Verdict.FAILURE, now, RNG, yes)
        lengths.append(breaker.until - now)
    assert 30.0 <= lengths[0] <= 60.0
    assert 60.0 <= lengths[1] <= 120.0
    assert all(150.0 <= length <= 300.0 for length in lengths[-2:])


def test_a_cancelled_probe_gives_its_place_to_the_next_call() -> None:
    breaker = opened()
    probe, _ = breaker.admit(breaker.until)
    breaker.record(probe, Verdict.NEUTRAL, breaker.until, RNG, yes)
    assert breaker.available(breaker.until)


def test_answers_from_before_it_opened_count_for_nothing() -> None:
    breaker = Breaker(CONFIG)
    old, _ = breaker.admit(0.0)
    feed(breaker, Verdict.FAILURE, 0.0, 5)
    until = breaker.until
    assert breaker.record(old, Verdict.SUCCESS, 1.0, RNG, yes) is None
    assert (breaker.state, breaker.until) == (BreakerState.OPEN, until)


def test_a_call_sent_in_panic_that_succeeds_closes_it() -> None:
    breaker = opened()
    permit, transition = breaker.admit(1.0)
    assert (permit.probe, transition) == (False, None)
    breaker.record(permit, Verdict.SUCCESS, 1.0, RNG, yes)
    assert breaker.state is BreakerState.CLOSED


def test_where_the_cap_forbids_it_stays_closed_and_opens_as_soon_as_it_may() -> None:
    breaker = Breaker(CONFIG)
    for _ in range(20):
        permit, _ = breaker.admit(0.0)
        breaker.record(permit, Verdict.FAILURE, 0.0, RNG, no)
    assert breaker.state is BreakerState.CLOSED
    feed(breaker, Verdict.FAILURE, 0.0)
    assert breaker.state is BreakerState.OPEN


STEPS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["admit", "hurry"]), st.floats(0, 40)),
        st.tuples(st.sampled_from(list(Verdict)), st.integers(0, 5)),
    ),
    max_size=200,
)


@given(STEPS, st.randoms(use_true_random=False), st.booleans())
def test_it_is_never_stuck_whatever_happens(
    steps: list[tuple[object, float]], rng: random.Random, cap: bool
) -> None:
    """At most one probe is out; and from any state, time and good answers close it."""
    breaker, now, out = Breaker(CONFIG), 0.0, []
    for what, value in steps:
        if what == "admit":
            now += value
            if breaker.available(now):
                out.append(breaker.admit(now)[0])
        elif what == "hurry":
            now += value
            breaker.hurry(now)
        elif out:
            permit: BreakerPermit = out.pop(int(value) % len(out))
            breaker.record(permit, what, now, rng, lambda: cap)
        probes = [p for p in out if p.probe and p.generation == breaker.generation]
        assert len(probes) <= 1
    for permit in out:
        breaker.record(permit, Verdict.NEUTRAL, now, rng, yes)
    now = max(now, breaker.until)
    assert breaker.available(now)
    permit, _ = breaker.admit(now)
    breaker.record(permit, Verdict.SUCCESS, now, rng, yes)
    assert breaker.state is BreakerState.CLOSED


def test_open_times_are_jittered_between_half_and_the_whole() -> None:
    lengths = {round(opened().until, 3) for _ in range(50)}
    assert len(lengths) > 40
    assert all(15.0 <= length <= 30.0 for length in lengths)


def test_closing_forgets_the_doubling_and_the_window() -> None:
    breaker = opened()
    for verdict in (Verdict.FAILURE, Verdict.FAILURE, Verdict.SUCCESS):
        now = breaker.until
        probe, _ = breaker.admit(now)
        breaker.record(probe, verdict, now, RNG, yes)
    assert breaker.state is BreakerState.CLOSED
    assert breaker.counts(now) == (0, 0)
    feed(breaker, Verdict.FAILURE, now, 5)
    assert breaker.until - now <= 30.0


# --- looking before its time ---------------------------------------------------------------------------------


def test_it_can_be_looked_at_before_its_time_but_no_sooner_than_a_second_after_it_opened() -> None:
    breaker = opened(100.0)
    assert not breaker.hurry(100.999)
    assert not breaker.available(100.999)
    assert breaker.hurry(101.0)
    assert breaker.available(101.0)
    probe, transition = breaker.admit(101.0)
    assert probe.probe
    assert transition is not None
    assert transition.after is BreakerState.HALF_OPEN
    assert not breaker.hurry(102.0), "one probe at a time"
    breaker.record(probe, Verdict.SUCCESS, 102.0, RNG, yes)
    assert breaker.state is BreakerState.CLOSED
    assert not breaker.hurry(200.0)


def test_a_look_before_its_time_that_fails_doesnt_double_it_and_the_next_one_in_time_does() -> None:
    for _ in range(20):
        breaker, now = opened(0.0), 0.0
        for _ in range(5):
            now += 1.0
            assert breaker.hurry(now)
            probe, _ = breaker.admit(now)
            breaker.record(probe, Verdict.FAILURE, now, RNG, yes)
            assert 15.0 <= breaker.until - now <= 30.0
        now = breaker.until
        probe, _ = breaker.admit(now)
        breaker.record(probe, Verdict.FAILURE, now, RNG, yes)
        assert 30.0 <= breaker.until - now <= 60.0


def test_hurrying_one_whose_time_is_over_anyway_doesnt_put_it_off() -> None:
    breaker = opened(0.0)
    until = breaker.until
    assert breaker.hurry(until + 50.0)
    assert breaker.until == until


# --- being well ----------------------------------------------------------------------------------------------


def test_it_is_well_while_it_is_closed_and_would_not_open_if_it_could() -> None:
    breaker = Breaker(CONFIG)
    for failures in range(5):
        assert breaker.well(0.0), failures
        permit, _ = breaker.admit(0.0)
        breaker.record(permit, Verdict.FAILURE, 0.0, RNG, no)
    assert breaker.state is BreakerState.CLOSED
    assert not breaker.well(0.0), "five failures in a row, though the cap keeps it in"
    feed(breaker, Verdict.SUCCESS, 0.0)
    assert breaker.well(0.0)
    for _ in range(3):
        for verdict in (Verdict.FAILURE, Verdict.SUCCESS):
            permit, _ = breaker.admit(0.0)
            breaker.record(permit, verdict, 0.0, RNG, no)
    assert not breaker.well(0.0), "4 of 12 succeeded"
    assert breaker.well(20.0), "that is long ago"
    assert not opened().well(99.0)
