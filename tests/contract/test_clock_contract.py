"""What every clock promises, on the machine's and on the one that tests turn."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import pytest

from agent_reach.ports import Clock, SystemClock
from agent_reach.testing import ManualClock


def _real() -> tuple[Clock, Callable[[float], Awaitable[None]]]:
    async def pass_time(seconds: float) -> None:
        await asyncio.sleep(seconds * 1.5 + 0.02)

    return SystemClock(), pass_time


def _manual() -> tuple[Clock, Callable[[float], Awaitable[None]]]:
    clock = ManualClock()
    return clock, clock.advance


@pytest.fixture(params=[_real, _manual], ids=["system", "manual"])
def turned(request: pytest.FixtureRequest) -> tuple[Clock, Callable[[float], Awaitable[None]]]:
    return request.param()


async def test_sleepers_wake_in_order_once_their_time_has_come(
    turned: tuple[Clock, Callable[[float], Awaitable[None]]],
) -> None:
    clock, pass_time = turned
    began, woken = clock.now(), []

    async def sleep(seconds: float) -> None:
        await clock.sleep(seconds)
        woken.append((seconds, clock.now() - began >= seconds - 0.001))

    tasks = [asyncio.ensure_future(sleep(seconds)) for seconds in (0.06, 0.02, 0.04)]
    await pass_time(0.06)
    await asyncio.gather(*tasks)
    assert woken == [(0.02, True), (0.04, True), (0.06, True)]


async def test_a_sleep_of_nothing_returns_and_a_cancelled_one_leaves_no_trace(
    turned: tuple[Clock, Callable[[float], Awaitable[None]]],
) -> None:
    clock, pass_time = turned
    await clock.sleep(0)
    await clock.sleep(-1)
    task = asyncio.ensure_future(clock.sleep(0.01))
    await asyncio.sleep(0)
    task.cancel()
    await pass_time(0.02)
    assert task.cancelled()


def test_the_system_clock_is_monotonic_and_knows_the_time_of_day() -> None:
    clock = SystemClock()
    assert clock.now() <= clock.now()
    assert abs(clock.wall() - time.time()) < 60
