"""What is remembered of a run, for whom, and for how long."""

from __future__ import annotations

import asyncio

import pytest

from agent_reach.model import ErrorInfo
from agent_reach.serving.answers import Failed, Outcome, Succeeded
from agent_reach.serving.dedupe import Dedupe, Finished, Key, Run
from agent_reach.testing import ManualClock

KEY: Key = ("chat-1", "a.b.v1", "k")
DONE = Succeeded(b"1")


def make(entries: int = 10) -> tuple[Dedupe, ManualClock]:
    clock = ManualClock()
    return Dedupe(ttl_s=60.0, entries=entries, clock=clock), clock


def failed(*, executed: bool, retryable: bool) -> Failed:
    return Failed(500, ErrorInfo(type="X", message="", executed=executed, retryable=retryable))


def run_once(dedupe: Dedupe, key: Key, outcome: Outcome | None) -> Run:
    run = Run()
    dedupe.begin(key, run)
    assert dedupe.find(key) is run
    dedupe.end(key, run, outcome)
    return run


@pytest.mark.parametrize(
    ("outcome", "remembered"),
    [
        (DONE, True),
        (failed(executed=True, retryable=False), True),
        (failed(executed=True, retryable=True), False),
        (failed(executed=False, retryable=True), False),
        (failed(executed=False, retryable=False), False),
        (None, False),
    ],
)
def test_only_what_a_repeat_must_not_redo_is_remembered(outcome: Outcome | None, remembered: bool) -> None:
    dedupe, _ = make()
    run_once(dedupe, KEY, outcome)
    found = dedupe.find(KEY)
    assert found == (Finished(outcome, b"") if remembered and outcome is not None else None)


async def test_memory_ends_with_time() -> None:
    dedupe, clock = make()
    run_once(dedupe, KEY, DONE)
    await clock.advance(59)
    assert dedupe.find(KEY) is not None
    await clock.advance(2)
    assert dedupe.find(KEY) is None


def test_memory_is_bounded() -> None:
    dedupe, _ = make(entries=3)
    for n in range(10):
        run_once(dedupe, ("chat-1", "a.b.v1", str(n)), DONE)
    known = [n for n in range(10) if dedupe.find(("chat-1", "a.b.v1", str(n)))]
    assert known == [7, 8, 9]


def test_a_late_end_does_not_remove_a_newer_run() -> None:
    dedupe, _ = make()
    old, new = Run(), Run()
    dedupe.begin(KEY, old)
    dedupe.begin(KEY, new)
    dedupe.end(KEY, old, None)
    assert dedupe.find(KEY) is new


async def test_a_run_is_cancelled_when_the_last_has_left() -> None:
    ended: list[Run] = []

    async def work() -> Outcome:
        await asyncio.Event().wait()
        return DONE

    run = Run()
    run.start(work(), ended.append)
    run.waiters = 2
    run.leave()
    await asyncio.sleep(0)
    assert run.task is not None
    assert not run.task.cancelling()
    run.leave()
    with pytest.raises(asyncio.CancelledError):
        await run.task
    assert ended == [run]
