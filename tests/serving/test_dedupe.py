"""What is remembered of a run, for whom, and for how long."""

from __future__ import annotations

import asyncio

import pytest

from agent_reach.config import ServingConfig
from agent_reach.model import ErrorInfo
from agent_reach.serving.answers import Done, Failed, Result
from agent_reach.serving.dedupe import Dedupe, Finished, Key, Run
from agent_reach.testing import ManualClock

KEY: Key = ("chat-1", "a.b.v1", "k")
DONE = Done(b"1")


def make(entries: int = 10) -> tuple[Dedupe, ManualClock]:
    clock = ManualClock()
    return Dedupe(ttl_s=60.0, entries=entries, clock=clock), clock


def failed(*, executed: bool, retryable: bool) -> Failed:
    return Failed(500, ErrorInfo(type="X", message="", executed=executed, retryable=retryable))


def run_once(dedupe: Dedupe, key: Key, outcome: Result | None) -> Run:
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
def test_only_what_a_repeat_must_not_redo_is_remembered(outcome: Result | None, remembered: bool) -> None:
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


def test_the_bytes_remembered_are_bounded_too() -> None:
    dedupe = Dedupe(ttl_s=60.0, entries=1000, clock=ManualClock(), max_bytes=8000)
    keys: list[Key] = [("chat-1", "a.b.v1", str(n)) for n in range(100)]
    for key in keys:
        run_once(dedupe, key, Done(b"x" * 1000))
    assert [key for key in keys if dedupe.find(key)] == keys[-8:]


def test_an_answer_too_large_to_keep_drives_out_no_other() -> None:
    dedupe = Dedupe(ttl_s=60.0, entries=1000, clock=ManualClock(), max_bytes=8000)
    small, large = KEY, ("chat-1", "a.b.v1", "large")
    run_once(dedupe, small, DONE)
    run_once(dedupe, large, Done(b"x" * 1001))
    assert dedupe.find(small) is not None
    assert dedupe.find(large) is None


def test_by_default_an_answer_of_the_largest_size_is_remembered() -> None:
    config = ServingConfig()
    dedupe = Dedupe(ttl_s=60.0, entries=config.dedupe_entries, clock=ManualClock())
    run_once(dedupe, KEY, Done(b"x" * config.max_body_bytes))
    assert dedupe.find(KEY) is not None


def test_a_late_end_does_not_remove_a_newer_run() -> None:
    dedupe, _ = make()
    old, new = Run(), Run()
    dedupe.begin(KEY, old)
    dedupe.begin(KEY, new)
    dedupe.end(KEY, old, None)
    assert dedupe.find(KEY) is new


async def test_a_run_is_cancelled_when_the_last_has_left() -> None:
    ended: list[Run] = []

    async def work() -> Result:
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
