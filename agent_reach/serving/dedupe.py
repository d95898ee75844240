"""One execution for several requests that carry the same explicit idempotency key."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from cachetools import TTLCache

from agent_reach.ports import Clock
from agent_reach.serving.answers import Done, Failed, Result

__all__ = ["Dedupe", "Finished", "Key", "Run"]

# Of remembered answers. At the default limit of 8 MiB a body, a thousand answers would be 8 GiB.
_MAX_BYTES = 64 * 1024 * 1024
# No answer may drive out more than this part of the others: 8 MiB, so by default every answer is remembered.
_LARGEST_SHARE = 8

# from_agent, capability, idempotency key
Key: TypeAlias = tuple[str, str, str]


class Run:
    """One execution of a handler. It is cancelled when the last request that waits for it has left.

    `executing` is False until the handler was entered: up to then nothing can have happened. `abandoned` is True
    once it was cancelled for want of anybody who waits.
    """

    __slots__ = ("abandoned", "executing", "fingerprint", "task", "waiters")

    def __init__(self, fingerprint: bytes = b"") -> None:
        self.abandoned = False
        self.executing = False
        self.fingerprint = fingerprint
        self.waiters = 0
        self.task: asyncio.Task[Result] | None = None

    def start(self, work: Coroutine[Any, Any, Result], when_done: Callable[[Run], None]) -> None:
        """Begin; `when_done` is called before anyone who waits for the task wakes."""
        self.task = asyncio.get_running_loop().create_task(work)
        self.task.add_done_callback(lambda _: when_done(self))

    def leave(self) -> None:
        """One request waits no longer."""
        self.waiters -= 1
        if self.waiters == 0 and self.task is not None and not self.task.done():
            self.abandoned = True
            self.task.cancel()


@dataclass(frozen=True, slots=True)
class Finished:
    """The remembered answer of a run that ended."""

    result: Result
    fingerprint: bytes


class Dedupe:
    """What runs, and what ended within `ttl_s` seconds: the newest `entries` of it, `max_bytes` of answers at most.

    An answer larger than an eighth of `max_bytes` isn't remembered: a repeat that comes after it runs anew.
    """

    def __init__(self, *, ttl_s: float, entries: int, clock: Clock, max_bytes: int = _MAX_BYTES) -> None:
        self._running: dict[Key, Run] = {}
        self._largest = max_bytes // _LARGEST_SHARE
        # Each entry counts as its fair part at least, so that one bound is that of the bytes and of the number.
        fair = max(1, max_bytes // entries)
        self._finished: TTLCache[Key, Finished] = TTLCache(
            maxsize=fair * entries,
            ttl=ttl_s,
            timer=clock.now,
            getsizeof=lambda finished: max(fair, _size(finished.result)),
        )

    def find(self, key: Key) -> Run | Finished | None:
        """Return what a repeat should join or be answered with."""
        return self._running.get(key) or self._finished.get(key)

    def begin(self, key: Key, run: Run) -> None:
        """Note that `run` serves `key` from now on."""
        self._running[key] = run

    def end(self, key: Key, run: Run, result: Result | None) -> None:
        """Note that `run` ended; None: it was cancelled, so a repeat runs anew.

        A success is remembered, and a failure that a second execution might make worse. A failure before the
        handler began isn't, nor that of an idempotent capability: there a repeat may well succeed.
        """
        if self._running.get(key) is run:
            del self._running[key]
        if result is None:
            return
        if isinstance(result, Failed) and (result.error.retryable or not result.error.executed):
            return
        if isinstance(result, Failed):
            # An exception would keep the handler's frames, and all they hold, for as long as it is remembered.
            result = replace(result, cause=None)
        if _size(result) <= self._largest:
            self._finished[key] = Finished(result, run.fingerprint)


def _size(result: Result) -> int:
    # A failure is a message of bounded length; its entry's fair part covers it.
    return len(result.data) if isinstance(result, Done) else 0
