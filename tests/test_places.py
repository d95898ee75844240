"""Calls that wait for a place: first come first served, none forgotten."""

from __future__ import annotations

import asyncio

import pytest

from agent_reach.places import Places
from agent_reach.testing import ManualClock

KEY = ("a.b.v1", None)


async def test_each_place_wakes_the_one_who_has_waited_longest() -> None:
    clock, order = ManualClock(), []
    places = Places(clock)

    async def wait(name: str) -> None:
        await places.wait(("a.b.v1", None), 100)
        order.append(name)

    tasks = [asyncio.ensure_future(wait(name)) for name in "abc"]
    await clock.settle()
    places.freed()
    await clock.settle()
    assert order == ["a"]
    places.freed()
    places.freed()
    await clock.settle()
    assert order == ["a", "b", "c"]
    places.freed()
    await asyncio.gather(*tasks)


async def test_a_waiter_that_is_cancelled_as_it_is_woken_passes_the_place_on() -> None:
    clock = ManualClock()
    places = Places(clock)
    first, second = (asyncio.ensure_future(places.wait(("a.b.v1", None), 100)) for _ in range(2))
    await clock.settle()
    places.freed()
    first.cancel()
    await clock.settle()
    assert second.done()
    with pytest.raises(asyncio.CancelledError):
        await first


async def test_waiting_ends_with_its_time_and_leaves_nothing_behind() -> None:
    clock = ManualClock()
    places = Places(clock)
    waiting = [asyncio.ensure_future(places.wait(name, 1.0)) for name in (("a.b.v1", None), ("c.d.v1", None))]
    await clock.advance(1.0)
    await asyncio.gather(*waiting)
    places.freed()
    assert (places._queues, places._looking) == ({}, {})


async def test_who_looked_in_vain_keeps_its_rank() -> None:
    clock, order = ManualClock(), []
    places = Places(clock)

    async def wait(name: str, vain: int) -> None:
        woken = await places.wait(KEY, 100)
        for _ in range(vain):
            woken = await places.wait(KEY, 100, again=woken)
        order.append(name)

    tasks = [asyncio.ensure_future(wait("first", 2)), asyncio.ensure_future(wait("second", 0))]
    for _ in range(4):
        await clock.settle()
        places.freed()
    await asyncio.gather(*tasks)
    assert order == ["first", "second"]


async def test_a_newcomer_sees_that_others_wait_until_they_have_looked() -> None:
    clock = ManualClock()
    places = Places(clock)
    assert not places.crowded(KEY)
    waiting = asyncio.ensure_future(places.wait(KEY, 100))
    await clock.settle()
    assert places.crowded(KEY)
    places.freed()
    # Woken, but not at it yet: whoever comes in this very turn must not be faster.
    assert places.crowded(KEY)
    await waiting
    assert not places.crowded(KEY)


async def test_those_who_wait_for_one_instance_hold_up_nobody_else() -> None:
    clock = ManualClock()
    places = Places(clock)
    pinned = asyncio.ensure_future(places.wait(("a.b.v1", "kb-1"), 100))
    free = asyncio.ensure_future(places.wait(KEY, 100))
    await clock.settle()
    places.freed()
    assert await free
    assert await pinned
