"""Calls that wait for a place: first come first served, none forgotten."""

from __future__ import annotations

import asyncio

import pytest

from agent_reach.places import Places
from agent_reach.testing import ManualClock


async def test_each_place_wakes_the_one_who_has_waited_longest() -> None:
    clock, order = ManualClock(), []
    places = Places(clock)

    async def wait(name: str) -> None:
        await places.wait("a.b.v1", 100)
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
    first, second = (asyncio.ensure_future(places.wait("a.b.v1", 100)) for _ in range(2))
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
    waiting = [asyncio.ensure_future(places.wait(name, 1.0)) for name in ("a.b.v1", "c.d.v1")]
    await clock.advance(1.0)
    await asyncio.gather(*waiting)
    places.freed()
    assert places._queues == {}
