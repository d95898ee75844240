"""Which member of a cluster is asked, and how often while none answers."""

from __future__ import annotations

import itertools
import random

import pytest

from agent_reach.config import RegistryConfig
from agent_reach.registry.members import Members

CONFIG = RegistryConfig()


def members(*addresses: str, seed: int = 1) -> Members:
    return Members(addresses, CONFIG, random.Random(seed))


def test_one_member_is_asked_until_it_fails_and_clients_begin_at_different_ones() -> None:
    begun = set()
    for seed in range(20):
        some = members("a", "b", "c", seed=seed)
        first = some.pick(0.0)
        begun.add(first)
        assert {some.pick(float(now)) for now in range(100)} == {first}
    assert begun == {"a", "b", "c"}


@pytest.mark.parametrize("how", ["failed", "hung"])
def test_a_member_that_failed_is_passed_over_at_once_and_for_as_long_as_another_answers(how: str) -> None:
    some = members("a", "b", "c")
    first = some.pick(0.0)
    assert first is not None
    some.failed(first, 0.0) if how == "failed" else some.hung(first)
    second = some.pick(0.0)
    assert second not in (None, first)
    some.worked(second or "")
    assert {some.pick(float(now)) for now in range(1000)} == {second}


def test_when_all_failed_each_is_tried_in_turn() -> None:
    some = members("a", "b", "c")
    for address in "abc":
        some.failed(address, 0.0)
    tried, now = [], 0.0
    while len(tried) < 6:
        picked = some.pick(now)
        if picked is None:
            now += some.wait_s(now)
        else:
            tried.append(picked)
            some.failed(picked, now)
    assert sorted(tried[:3]) == ["a", "b", "c"]
    assert tried[3:] == tried[:3]


def test_an_outage_costs_about_15_dials_in_30_seconds_however_many_ask() -> None:
    for seed in range(20):
        some, now, dials = members("a", seed=seed), 0.0, []
        some.failed("a", now)
        while now < 330.0:
            # Two ask every 10 ms.
            for _ in range(2):
                if some.pick(now) is not None:
                    dials.append(now)
                    some.failed("a", now)
            now += 0.01
        assert 8 <= sum(at < 30.0 for at in dials) <= 22
        assert 100 <= len(dials) <= 11 * 20
        assert max(b - a for a, b in itertools.pairwise(dials)) <= CONFIG.backoff_max_s + 0.02


def test_while_one_attempt_is_under_way_nobody_else_dials() -> None:
    some = members("a")
    some.failed("a", 0.0)
    now = some.wait_s(0.0)
    assert some.pick(now - 0.001) is None
    assert some.pick(now) == "a"
    assert some.pick(now) is None
    assert 0.0 < some.wait_s(now) < 0.5, "soon after it ended the others know"
    some.worked("a")
    assert some.pick(now) == "a"
    assert some.wait_s(now) == 0.0


def test_an_attempt_whose_end_nobody_tells_doesnt_block_for_ever() -> None:
    some = members("a")
    some.failed("a", 0.0)
    now = some.wait_s(0.0)
    assert some.pick(now) == "a"
    assert some.pick(now + CONFIG.request_timeout_s + 0.01) == "a"


def test_a_member_that_hangs_blocks_nobody() -> None:
    """Each attempt takes a request's whole time; a keep-alive mustn't wait for a list."""
    some = members("a")
    some.hung("a")
    assert [some.pick(0.0) for _ in range(3)] == ["a", "a", "a"]


def test_a_member_that_hangs_after_it_was_refused_blocks_nobody_either() -> None:
    some = members("a")
    now = 0.0
    for _ in range(6):
        some.failed("a", now)
        now += some.wait_s(now)
        assert some.pick(now) == "a"
    some.hung("a")
    assert [some.pick(now) for _ in range(3)] == ["a", "a", "a"]


@pytest.mark.parametrize("addresses", ["a", "abc"])
def test_a_member_that_refuses_after_it_hung_is_paced_like_any_other(addresses: str) -> None:
    """A frozen etcd that is killed; or a host that lost its power, and boots."""
    some = members(*addresses)
    for address in addresses:
        some.hung(address)
    now, dials = 0.0, 0
    while now < 30.0:
        picked = some.pick(now)
        if picked is not None:
            dials += 1
            some.failed(picked, now)
        now += 0.01
    assert dials <= 25


def test_news_of_one_failure_from_several_connections_counts_once() -> None:
    one, many = members("a"), members("a")
    one.failed("a", 0.0)
    for _ in range(10):
        many.failed("a", 0.0)
    assert many.wait_s(0.0) == one.wait_s(0.0)
