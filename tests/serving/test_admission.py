"""Places to run and to wait: in order, none lost, and an honest "come back later"."""

from __future__ import annotations

import asyncio

import pytest

from agent_reach.serving.admission import Admission, Full, Permit
from agent_reach.testing import ManualClock


def make(most: int | None = 1, queue: int = 3) -> tuple[Admission, ManualClock]:
    clock = ManualClock()
    return Admission(max_concurrency=most, queue=queue, clock=clock), clock


def numbers(admission: Admission) -> tuple[int, int]:
    return admission.load.in_flight, admission.load.queued


async def test_without_a_limit_everything_runs_and_is_counted() -> None:
    admission, _ = make(None, 0)
    permits = [await admission.enter() for _ in range(50)]
    assert numbers(admission) == (50, 0)
    assert not admission.is_full
    for permit in permits:
        permit.release()
    assert numbers(admission) == (0, 0)


async def test_those_who_wait_are_served_in_order() -> None:
    admission, clock = make()
    permit = await admission.enter()
    order: list[int] = []

    async def wait(number: int) -> None:
        mine = await admission.enter()
        order.append(number)
        await clock.sleep(1)
        mine.release()

    tasks = [asyncio.ensure_future(wait(n)) for n in range(3)]
    await clock.settle()
    assert numbers(admission) == (1, 3)
    assert admission.is_full
    permit.release()
    await clock.advance(3)
    await asyncio.gather(*tasks)
    assert order == [0, 1, 2]
    assert numbers(admission) == (0, 0)


async def test_a_newcomer_does_not_overtake_at_the_hand_over() -> None:
    admission, clock = make(queue=1)
    permit = await admission.enter()
    waiting = asyncio.ensure_future(admission.enter())
    await clock.settle()
    permit.release()  # handed over, though the waiting task hasn't run yet
    newcomer = asyncio.ensure_future(admission.enter())
    await clock.settle()
    assert waiting.done()
    assert not newcomer.done()
    waiting.result().release()
    (await newcomer).release()


async def test_releasing_twice_frees_one_place() -> None:
    admission, _ = make(2)
    one, _two = await admission.enter(), await admission.enter()
    one.release()
    one.release()
    assert numbers(admission) == (1, 0)


async def test_a_cancelled_waiter_leaves_no_place_behind() -> None:
    admission, clock = make()
    permit = await admission.enter()
    waiting = asyncio.ensure_future(admission.enter())
    await clock.settle()
    waiting.cancel()
    await clock.settle()
    assert numbers(admission) == (1, 0)
    permit.release()
    assert numbers(admission) == (0, 0)


@pytest.mark.parametrize("release_first", [True, False])
async def test_a_cancellation_in_the_moment_of_the_hand_over_passes_the_place_on(release_first: bool) -> None:
    admission, clock = make()
    permit = await admission.enter()
    cancelled, next_one = asyncio.ensure_future(admission.enter()), asyncio.ensure_future(admission.enter())
    await clock.settle()
    if release_first:
        permit.release()
        cancelled.cancel()
    else:
        cancelled.cancel()
        permit.release()
    await clock.settle()
    assert cancelled.cancelled()
    assert isinstance(next_one.result(), Permit)
    assert numbers(admission) == (1, 0)
    next_one.result().release()
    assert numbers(admission) == (0, 0)


async def test_all_waiters_cancelled_at_the_hand_over_free_the_place() -> None:
    admission, clock = make()
    permit = await admission.enter()
    tasks = [asyncio.ensure_future(admission.enter()) for _ in range(3)]
    await clock.settle()
    for task in tasks:
        task.cancel()
    permit.release()
    await clock.settle()
    assert numbers(admission) == (0, 0)
    (await admission.enter()).release()


async def test_full_says_when_the_queue_of_now_will_be_through() -> None:
    admission, clock = make(2, 4)
    for _ in range(20):
        permit = await admission.enter()
        await clock.advance(3)
        permit.release()
    for _ in range(2):
        await admission.enter()
    waiting = [asyncio.ensure_future(admission.enter()) for _ in range(4)]
    await clock.settle()
    with pytest.raises(Full) as caught:
        await admission.enter()
    # 4 wait and 1 asks, 2 run at a time, 3 s each
    assert caught.value.retry_after_ms == 7500
    for task in waiting:
        task.cancel()
    await clock.settle()


@pytest.mark.parametrize(
    ("service_s", "least", "most"), [(None, 100, 1000), (0.0, 20, 20), (3600.0, 30_000, 30_000)]
)
async def test_the_hint_stays_within_reason(service_s: float | None, least: int, most: int) -> None:
    admission, clock = make(1, 0)
    if service_s is not None:
        permit = await admission.enter()
        await clock.advance(service_s)
        permit.release()
    permit = await admission.enter()
    with pytest.raises(Full) as caught:
        await admission.enter()
    assert least <= caught.value.retry_after_ms <= most
