"""Looks in at the memory registry when its next lease ends, if an event loop runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from agent_reach.ports import Clock, SystemClock

__all__ = ["Alarm"]


@dataclass(frozen=True, slots=True)
class _Set:
    loop: asyncio.AbstractEventLoop
    due: float
    handle: asyncio.Task[None] | asyncio.TimerHandle


class Alarm:
    """Calls `ring` at the time that was set, on the loop that ran when it was set. Set under its owner's lock."""

    def __init__(self, clock: Clock, ring: Callable[[], None]) -> None:
        self._clock = clock
        self._ring = ring
        self._set: _Set | None = None

    def set(self, due: float | None) -> None:
        """Ring at `due` (seconds of the clock), or not at all. Without a running loop this does nothing."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return
        held = self._set
        if due is None:
            if held is not None and held.loop is loop:
                held.handle.cancel()
                self._set = None
            return
        # An earlier alarm sets the next one when it rings, so a renewal costs nothing here.
        if held is not None and not held.loop.is_closed() and held.due <= due:
            return
        delay = max(0.0, due - self._clock.now())
        handle: asyncio.Task[None] | asyncio.TimerHandle
        if isinstance(self._clock, SystemClock):
            handle = loop.call_later(delay, self._rang)
        else:
            handle = loop.create_task(self._rings_after(delay))
        self._set = _Set(loop, due, handle)

    async def _rings_after(self, delay: float) -> None:
        await self._clock.sleep(delay)
        self._rang()

    def _rang(self) -> None:
        self._set = None
        self._ring()
