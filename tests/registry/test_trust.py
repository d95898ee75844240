"""Mass departure: what is believed, and when."""

from __future__ import annotations

from agent_reach.registry.trust import Trust

ALL = ("a", "b", "c")


def departures(trust: Trust, now: float) -> list[bool]:
    """Whether each of three that leave one after the other is believed to be gone."""
    return [trust.believes_removal(agent_id, now) for agent_id in ALL]


def after_an_outage(away_s: float, *, failed: bool = True) -> Trust:
    """A store that was heard of at 0 and again `away_s` later; `failed` if a request went wrong meanwhile."""
    trust = Trust(lease_s=15.0, confirm_s=15.0)
    trust.heard(3, 0.0)
    if failed:
        trust.store_lost(away_s / 2)
    trust.heard(3, away_s)
    assert trust.believes_list(set(ALL), ALL, away_s)
    return trust


def test_a_wait_begins_anew_when_the_store_is_lost_again() -> None:
    trust = Trust(lease_s=15.0, confirm_s=15.0)
    trust.store_lost(0.0)
    assert not trust.believes_list({"a", "b"}, (), 1.0)
    trust.store_lost(10.0)
    assert not trust.believes_list({"a", "b"}, (), 17.0)
    assert trust.confirm_at == 25.0
    assert trust.believes_list({"a", "b"}, (), 25.0)
    assert trust.confirm_at is None


def test_right_after_a_long_outage_more_than_half_is_not_believed() -> None:
    trust = after_an_outage(10.0)
    assert departures(trust, 14.9) == [True, False, False]
    assert trust.confirm_at == 29.9


def test_an_outage_that_ends_no_living_agents_lease_makes_no_departure_doubtful() -> None:
    assert departures(after_an_outage(9.9), 10.0) == [True, True, True]


def test_a_long_quiet_time_without_a_failure_is_no_outage() -> None:
    assert departures(after_an_outage(20.0, failed=False), 20.0) == [True, True, True]


def test_a_woken_store_has_ended_what_was_due_after_a_few_seconds() -> None:
    assert departures(after_an_outage(30.0), 35.0) == [True, True, True]


def test_a_lost_watch_makes_no_removal_doubtful_but_an_empty_list() -> None:
    trust = Trust(lease_s=15.0, confirm_s=15.0)
    trust.heard(3, 0.0)
    trust.watch_lost()
    trust.heard(3, 30.0)
    assert not trust.believes_list(set(ALL), (), 30.0)
    trust.seen("a")
    trust.seen("b")
    trust.seen("c")
    assert departures(trust, 31.0) == [True, True, True]


def test_an_emptied_index_has_nothing_to_protect() -> None:
    trust = after_an_outage(10.0)
    trust.forget()
    assert departures(trust, 10.0) == [True, True, True]
    trust.store_lost(11.0)
    assert not trust.believes_list(set(ALL), (), 12.0)
    trust.forget()
    assert trust.confirm_at is None
    trust.heard(0, 40.0)
    assert trust.believes_list({"a"}, (), 40.0)
    assert departures(trust, 40.0) == [True, True, True]
