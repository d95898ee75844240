"""One execution for several requests that carry the same explicit idempotency key."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from cachetools import TTLCache

from agent_reach.ports import Clock
from agent_reach.serving.answers import Failed, Outcome

__all__ = ["Dedupe", "Finished", "Key", "Run"]

# from_agent, capability, idempotency key
Key: TypeAlias = tuple[str, str, str]


class Run:
    """One execution of a handler. It is cancelled when the last request that waits for it has left.

    `executing` is False until the handler was entered: up to then nothing can have happened.
    """

    __slots__ = ("executing", "fingerprint", "task", "waiters")

    def __init__(self, fingerprint: bytes = b"") -> None:
        self.executing = False
        self.fingerprint = fingerprint
        self.waiters = 0
        self.task: asyncio.Task[Outcome] | None = None

    def start(self, work: Coroutine[Any, Any, Outcome], when_done: Callable[[Run], None]) -> None:
        """Begin; `when_done` is called before anyone who waits for the task wakes."""
        self.task = asyncio.get_running_loop().create_task(work)
        self.task.add_done_callback(lambda _: when_done(self))

    def leave(self) -> None:
        """One request waits no longer."""
        self.waiters -= 1
        if self.waiters == 0 and self.task is not None and not self.task.done():
            self.task.cancel()


@dataclass(frozen=True, slots=True)
class Finished:
    """The remembered answer of a run that ended."""

    outcome: Outcome
    fingerprint: bytes


class Dedupe:
    """What runs, and what ended within `ttl_s` seconds: the newest `entries` of it."""

    def __init__(self, *, ttl_s: float, entries: int, clock: Clock) -> None:
        self._running: dict[Key, Run] = {}
        self._finished: TTLCache[Key, Finished] = TTLCache(maxsize=entries, ttl=ttl_s, timer=clock.now)

    def find(self, key: Key) -> Run | Finished | None:
        """Return what a repeat should join or be answered with."""
        return self._running.get(key) or self._finished.get(key)

    def begin(self, key: Key, run: Run) -> None:
        """Note that `run` serves `key` from now on."""
        self._running[key] = run

    def end(self, key: Key, run: Run, outcome: Outcome | None) -> None:
        """Note that `run` ended; None: it was cancelled, so a repeat runs anew.

        A success is remembered, and a failure that a second execution might make worse. A failure before the
        handler began isn't, nor that of an idempotent capability: there a repeat may well succeed.
        """
        if self._running.get(key) is run:
            del self._running[key]
        if outcome is None:
            return
        if isinstance(outcome, Failed) and (outcome.error.retryable or not outcome.error.executed):
            return
        if isinstance(outcome, Failed):
            # An exception would keep the handler's frames, and all they hold, for as long as it is remembered.
            outcome = replace(outcome, cause=None)
        self._finished[key] = Finished(outcome, run.fingerprint)
