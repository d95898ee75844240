"""Fresh, stale, expired, and when to refresh next."""

from __future__ import annotations

import random

from agent_reach.config import RegistryConfig
from agent_reach.registry.freshness import Freshness

CONFIG = RegistryConfig(refresh_s=15.0, refresh_jitter_s=5.0, stale_grace_s=100.0)


def proved(seed: int = 1, *, confirm_at: float | None = None) -> Freshness:
    freshness = Freshness(CONFIG, random.Random(seed))
    freshness.prove(0.0, confirm_at)
    return freshness


def test_what_nothing_proves_grows_stale_then_expires_and_a_proof_makes_it_fresh_again() -> None:
    freshness = Freshness(CONFIG, random.Random(1))
    assert freshness.status == "starting"
    freshness.prove(0.0, None)
    assert (freshness.status, freshness.proof_at) == ("fresh", 0.0)
    due = freshness.next_at()
    assert 15.0 <= due <= 20.0
    freshness.refresh_at = due + 7.0
    freshness.age(due - 0.01)
    assert freshness.status == "fresh"
    assert freshness.next_at() == due, "a list that comes later doesn't keep it fresh"
    freshness.age(due)
    assert (freshness.status, freshness.stale_since) == ("stale", due)
    freshness.refresh_at = due + 1000.0
    assert freshness.next_at() == due + 100.0
    freshness.age(due + 100.0)
    assert freshness.status == "expired"
    assert freshness.next_at() == due + 1000.0
    freshness.prove(200.0, None)
    assert freshness.status == "fresh"


def test_missing_agents_leave_it_stale_until_a_list_that_each_client_makes_at_its_own_time() -> None:
    lists = [proved(seed, confirm_at=10.0).refresh_at for seed in range(100)]
    assert proved(confirm_at=10.0).status == "stale"
    assert all(10.0 <= at <= 11.0 for at in lists)
    assert max(lists) - min(lists) > 0.9
    assert proved(confirm_at=60.0).refresh_at <= 20.0, "the refresh isn't put off"


def test_what_the_watch_says_keeps_it_fresh_and_puts_no_refresh_off() -> None:
    freshness = proved()
    due = freshness.refresh_at
    freshness.hear(due - 1.0, None)
    assert (freshness.refresh_at, freshness.proof_at) == (due, due - 1.0)
    freshness.age(due + 10.0)
    assert freshness.status == "fresh"
    freshness.age(due + 30.0)
    assert freshness.status == "stale"
    freshness.hear(due + 31.0, None)
    assert freshness.status == "fresh"


def test_clients_decide_at_their_own_times_also_if_much_is_said_meanwhile() -> None:
    lists = []
    for seed in range(100):
        freshness = proved(seed, confirm_at=10.0)
        for _ in range(500):
            freshness.hear(1.0, 10.0)
        lists.append(freshness.refresh_at)
    assert max(lists) - min(lists) > 0.9


def test_it_stays_stale_since_the_first_doubt() -> None:
    freshness = proved(confirm_at=10.0)
    freshness.prove(5.0, 10.0)
    assert freshness.stale_since == 0.0


def test_clients_that_begin_together_part_ways_and_none_lists_later_for_it() -> None:
    lists = []
    for seed in range(100):
        freshness = proved(seed)
        due = freshness.refresh_at
        freshness.part_ways(0.0)
        assert freshness.refresh_at <= due
        lists.append(freshness.refresh_at)
    assert all(5.0 <= at <= 20.0 for at in lists)
    assert max(lists) - min(lists) > 10.0


def test_what_is_proved_again_and_again_does_not_expire_though_agents_are_missing() -> None:
    freshness = proved(confirm_at=10.0)
    for now in range(1, 1000):
        freshness.hear(float(now), 10.0)
        freshness.age(float(now))
        assert freshness.status == "stale"
    freshness.age(999.0 + 100.0)
    assert freshness.status == "expired"
