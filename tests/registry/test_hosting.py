"""Pauses between attempts, and the error of a wait that ran out."""

from __future__ import annotations

import random

import pytest

from agent_reach.config import RegistryConfig
from agent_reach.errors import RegistryUnavailable, Unauthorized
from agent_reach.registry.hosting import Backoff, unavailable


@pytest.mark.parametrize(
    ("last", "message"),
    [
        (None, "no list came within 5 s; the registry is etcd://x:1"),
        (RegistryUnavailable("no route"), "no list came within 5 s; the registry is etcd://x:1: no route"),
        (
            RegistryUnavailable("the registry etcd://x:1 can't be used (no route)"),
            "no list came within 5 s: the registry etcd://x:1 can't be used (no route)",
        ),
    ],
)
def test_the_address_is_named_once(last: RegistryUnavailable | None, message: str) -> None:
    error = unavailable("etcd://x:1", 5.0, "no list came", last)
    assert error.message == message
    assert error.endpoints == ("etcd://x:1",)


def test_pauses_grow_to_the_cap_are_spread_and_begin_anew_once_it_works() -> None:
    backoff = Backoff(RegistryConfig(), random.Random(1))
    delays = [backoff.next() for _ in range(100)]
    assert all(0.1 <= delay <= 2.5 for delay in delays)
    assert delays[0] <= 0.2
    assert max(delays) > 2.3
    assert min(delays[10:]) < 0.3, "full jitter above the base"
    backoff.reset()
    assert backoff.next() <= 0.2


def test_whoever_is_refused_asks_more_and_more_seldom() -> None:
    """A wrong password mends itself only by hand, and each login costs etcd a slow hash."""
    backoff = Backoff(RegistryConfig(), random.Random(1))
    delays = [backoff.after(Unauthorized("wrong password")) for _ in range(100)]
    assert sum(delays[10:]) / 90 > 10.0
    assert max(delays) <= 30.0


def test_a_registry_that_says_when_to_ask_again_is_asked_then() -> None:
    backoff = Backoff(RegistryConfig(), random.Random(1))
    assert backoff.after(RegistryUnavailable("down", retry_after_s=7.5)) == 7.5
    assert backoff.after(RegistryUnavailable("slow")) <= 2.5
    assert backoff.after(RegistryUnavailable("nothing stands in the way", retry_after_s=0.0)) >= 0.1
