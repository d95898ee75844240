"""A clock that a test turns by hand."""

from __future__ import annotations

import asyncio
import heapq
import itertools

__all__ = ["ManualClock"]


class ManualClock:
    """Implements the `Clock` port. Time stands still until `advance` turns it.

    >>> clock = ManualClock()
    >>> clock.now()
    0.0
    """

    # How often the loop runs between two alarms: enough for chains of callbacks, tasks and queues to settle.
    _SETTLE_ROUNDS = 50

    def __init__(self, start: float = 0.0, *, wall_offset_s: float = 1_700_000_000.0) -> None:
        self._now = start
        self._wall_offset_s = wall_offset_s
        self._order = itertools.count()
        self._alarms: list[tuple[float, int, asyncio.Future[None]]] = []

    def now(self) -> float:
        """Seconds since the clock was made, or since its `start`."""
        return self._now

    def wall(self) -> float:
        """A made-up time of day that moves with the clock."""
        return self._wall_offset_s + self._now

    async def sleep(self, seconds: float) -> None:
        """Return once the clock was turned `seconds` further."""
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        alarm = asyncio.get_running_loop().create_future()
        heapq.heappush(self._alarms, (self._now + seconds, next(self._order), alarm))
        await alarm

    async def advance(self, seconds: float) -> None:
        """Turn the clock: every sleeper due wakes in order, and what it starts gets its turn too."""
        until = self._now + seconds
        await self.settle()
        while self._alarms and self._alarms[0][0] <= until:
            due, _, alarm = heapq.heappop(self._alarms)
            if alarm.done():
                continue
            self._now = due
            alarm.set_result(None)
            await self.settle()
        self._now = until
        await self.settle()

    async def settle(self) -> None:
        """Let every task that can run do so; time stands still."""
        for _ in range(self._SETTLE_ROUNDS):
            await asyncio.sleep(0)
