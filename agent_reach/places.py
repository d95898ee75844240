"""Calls that wait until another call of this client ends, because every instance is full."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TypeAlias

from agent_reach.ports import Clock

__all__ = ["Places"]

Key: TypeAlias = tuple[str, str | None]
"""Capability and pinned instance: those who may go to the same instances."""


class Places:
    """Queues of waiting calls, first come first served."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._queues: dict[Key, deque[asyncio.Future[None]]] = {}
        # Woken and not yet at it: until they have looked, the place is theirs.
        self._looking: dict[Key, int] = {}

    def crowded(self, key: Key) -> bool:
        """True if others wait already, or are about to take what came free."""
        return bool(self._queues.get(key)) or self._looking.get(key, 0) > 0

    async def wait(self, key: Key, seconds: float, *, again: bool = False) -> bool:
        """Return True when there may be a place, False after `seconds`. `again`: it looked in vain, and keeps its
        rank at the head of the queue.
        """
        woken = asyncio.get_running_loop().create_future()
        queue = self._queues.setdefault(key, deque())
        if again:
            queue.appendleft(woken)
        else:
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
            if woken.done():
                self._looked(key)
            else:
                queue.remove(woken)
                if not queue and self._queues.get(key) is queue:
                    del self._queues[key]
        return woken.done()

    def freed(self) -> None:
        """There may be a place: the first of each queue looks. Who gets one says it again: there may be more."""
        for key, queue in list(self._queues.items()):
            woken = queue.popleft()
            woken.set_result(None)
            self._looking[key] = self._looking.get(key, 0) + 1
            if not queue:
                del self._queues[key]

    def _looked(self, key: Key) -> None:
        left = self._looking[key] - 1
        if left:
            self._looking[key] = left
        else:
            del self._looking[key]
