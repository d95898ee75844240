"""Calls that wait until another call of this client ends, because every instance is full."""

from __future__ import annotations

import asyncio
from collections import deque

from agent_reach.ports import Clock

__all__ = ["Places"]


class Places:
    """Queues of waiting calls, one for each capability, first come first served."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._queues: dict[str, deque[asyncio.Future[None]]] = {}

    async def wait(self, capability: str, seconds: float) -> None:
        """Return when there may be a place, or after `seconds`."""
        woken = asyncio.get_running_loop().create_future()
        queue = self._queues.setdefault(capability, deque())
        queue.append(woken)
        sleep = asyncio.ensure_future(self._clock.sleep(seconds))
        try:
            await asyncio.wait({woken, sleep}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            if woken.done():
                self.freed()
            raise
        finally:
            sleep.cancel()
            if not woken.done():
                queue.remove(woken)

    def freed(self) -> None:
        """There may be a place: the first of each queue looks. Who gets one says it again: there may be more."""
        for capability, queue in list(self._queues.items()):
            while queue:
                woken = queue.popleft()
                if not woken.done():
                    woken.set_result(None)
                    break
            if not queue:
                del self._queues[capability]
