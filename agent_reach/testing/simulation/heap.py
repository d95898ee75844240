"""Virtual time: a heap of what happens next."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from typing import Any, TypeAlias

__all__ = ["EventHeap", "Handle"]

Handle: TypeAlias = list[Any]
"""A scheduled event: [time, order, action or None once it is spent, arguments]. Only `cancel` reads it."""

# Below this many, cancelled events cost less than sweeping them out.
_FEW = 1000


class EventHeap:
    """Runs actions in order of their time; those of one moment in the order they were scheduled in.

    `now` is the virtual time, in seconds.

    >>> heap, seen = EventHeap(), []
    >>> _ = heap.after(2.0, seen.append, "second"), heap.at(1.0, seen.append, "first")
    >>> heap.run(until_s=10.0)
    >>> seen, heap.now
    (['first', 'second'], 10.0)
    """

    __slots__ = ("_cancelled", "_entries", "_order", "now")

    def __init__(self) -> None:
        self.now = 0.0
        self._entries: list[Handle] = []
        self._order = 0
        self._cancelled = 0

    def __len__(self) -> int:
        return len(self._entries) - self._cancelled

    def at(self, time_s: float, action: Callable[..., object], *args: object) -> Handle:
        """Schedule `action(*args)`. Raises ValueError for a time that is past or infinite."""
        if not self.now <= time_s < math.inf:
            raise ValueError(f"an event at {time_s} s can't be scheduled at {self.now} s")
        self._order += 1
        entry: Handle = [time_s, self._order, action, args]
        heapq.heappush(self._entries, entry)
        return entry

    def after(self, seconds: float, action: Callable[..., object], *args: object) -> Handle:
        """Schedule `action(*args)` in `seconds`."""
        return self.at(self.now + seconds, action, *args)

    def cancel(self, handle: Handle) -> None:
        """Make sure that it won't happen; harmless if it has happened."""
        if handle[2] is None:
            return
        handle[2], handle[3] = None, ()
        self._cancelled += 1
        # Most attempts' timers are cancelled long before their time: left in, they would be most of the heap.
        if self._cancelled > _FEW and self._cancelled * 2 > len(self._entries):
            self._entries[:] = [entry for entry in self._entries if entry[2] is not None]
            heapq.heapify(self._entries)
            self._cancelled = 0

    def run(self, until_s: float = math.inf) -> None:
        """Let everything up to and including `until_s` happen, and set `now` to it; infinity: all there is."""
        entries, pop = self._entries, heapq.heappop
        while entries and entries[0][0] <= until_s:
            entry = pop(entries)
            action = entry[2]
            if action is None:
                self._cancelled -= 1
                continue
            self.now = entry[0]
            entry[2] = None
            action(*entry[3])
        if until_s < math.inf:
            self.now = max(self.now, until_s)
