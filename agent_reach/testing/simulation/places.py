"""Calls that wait until another call of their client ends: `agent_reach.places`, in virtual time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TypeAlias

from agent_reach.testing.simulation.heap import EventHeap, Handle

__all__ = ["Places", "Waiter"]

Resume: TypeAlias = Callable[[bool], object]


class Waiter:
    """One that waits: `resume(True)` when there may be a place, `resume(False)` when its time is up."""

    __slots__ = ("key", "left", "resume", "timer", "woken")

    def __init__(self, key: str, resume: Resume) -> None:
        self.key = key
        self.resume = resume
        self.timer: Handle | None = None
        self.woken = False
        self.left = False


class Places:
    """Queues of waiting calls by capability, first come first served."""

    __slots__ = ("_heap", "_looking", "_queues")

    def __init__(self, heap: EventHeap) -> None:
        self._heap = heap
        self._queues: dict[str, deque[Waiter]] = {}
        # Woken and not yet at it: until they have looked, the place is theirs.
        self._looking: dict[str, int] = {}

    def __len__(self) -> int:
        return sum(map(len, self._queues.values())) + sum(self._looking.values())

    def crowded(self, key: str) -> bool:
        """True if others wait already, or are about to take what came free."""
        return key in self._queues or key in self._looking

    def wait(self, key: str, resume: Resume, seconds: float, *, again: bool = False) -> Waiter:
        """Queue up; `again`: it looked in vain, and keeps its rank at the head."""
        waiter = Waiter(key, resume)
        queue = self._queues.setdefault(key, deque())
        if again:
            queue.appendleft(waiter)
        else:
            queue.append(waiter)
        waiter.timer = self._heap.after(seconds, self._give_up, waiter)
        return waiter

    def freed(self) -> None:
        """There may be a place: the first of each queue looks."""
        for key in list(self._queues) if self._queues else ():
            queue = self._queues[key]
            waiter = queue.popleft()
            if not queue:
                del self._queues[key]
            waiter.woken = True
            self._looking[key] = self._looking.get(key, 0) + 1
            assert waiter.timer is not None
            self._heap.cancel(waiter.timer)
            # Whoever freed it goes on first, as its task does in a loop.
            self._heap.after(0.0, self._look, waiter)

    def leave(self, waiter: Waiter) -> None:
        """Give up waiting, without `resume`; a place that it was woken for is the next one's."""
        waiter.left = True
        if not waiter.woken:
            self._drop(waiter)

    def _look(self, waiter: Waiter) -> None:
        left = self._looking[waiter.key] - 1
        if left:
            self._looking[waiter.key] = left
        else:
            del self._looking[waiter.key]
        if waiter.left:
            self.freed()
        else:
            waiter.resume(True)

    def _give_up(self, waiter: Waiter) -> None:
        self._drop(waiter)
        waiter.resume(False)

    def _drop(self, waiter: Waiter) -> None:
        queue = self._queues[waiter.key]
        queue.remove(waiter)
        if not queue:
            del self._queues[waiter.key]
        assert waiter.timer is not None
        self._heap.cancel(waiter.timer)
