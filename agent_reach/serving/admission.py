"""How much of one capability runs at a time: permits, a first-in-first-out queue, and a full sign."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import deque

from agent_reach.model import LoadReport
from agent_reach.ports import Clock

__all__ = ["Admission", "Full", "Permit"]

# The newest service time counts a fifth: settles within about ten calls, and one odd call moves it little.
_NEWEST = 0.2
# Asked before anything has finished, we know nothing; half a second is a guess that no retry storm comes from.
_UNKNOWN_SERVICE_S = 0.5
# Below a network round trip nobody can keep it; past half a minute the caller had better ask another instance.
_SHORTEST_S, _LONGEST_S = 0.02, 30.0


class Full(Exception):
    """Every place is taken, in the queue too. `retry_after_ms`: when the queue of now will have been served."""

    def __init__(self, retry_after_ms: int) -> None:
        super().__init__(retry_after_ms)
        self.retry_after_ms = retry_after_ms


class Permit:
    """The right to run, until `release`; releasing twice is harmless."""

    __slots__ = ("_admission", "_began")

    def __init__(self, admission: Admission, began: float) -> None:
        self._admission: Admission | None = admission
        self._began = began

    def release(self) -> None:
        """Give the place to whoever has waited longest."""
        admission, self._admission = self._admission, None
        if admission is not None:
            admission._leave(self._began)


class Admission:
    """Admits `max_concurrency` at once (None: any number) and lets `queue` more wait in order."""

    def __init__(self, *, max_concurrency: int | None, queue: int, clock: Clock) -> None:
        self._most = max_concurrency
        self._queue = queue
        self._clock = clock
        self._running = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._service_s: float | None = None

    @property
    def load(self) -> LoadReport:
        """What runs and waits now."""
        return LoadReport(in_flight=self._running, queued=len(self._waiting), max_concurrency=self._most)

    @property
    def is_full(self) -> bool:
        """True if the next to come would be refused."""
        return not self._has_room() and len(self._waiting) >= self._queue

    async def enter(self) -> Permit:
        """Return a permit, at once or after waiting. Raises Full; cancellation gives the place up."""
        if self._has_room():
            self._running += 1
            return Permit(self, self._clock.now())
        if len(self._waiting) >= self._queue:
            raise Full(self._retry_after_ms())
        place = asyncio.get_running_loop().create_future()
        self._waiting.append(place)
        try:
            await place
        except asyncio.CancelledError:
            if place.cancelled():
                with contextlib.suppress(ValueError):  # passed over already
                    self._waiting.remove(place)
            else:
                # Handed over in the very moment of the cancellation: pass it on.
                self._hand_over()
            raise
        return Permit(self, self._clock.now())

    def _has_room(self) -> bool:
        # While anyone waits, a place that comes free is handed over and stays counted: no newcomer slips in.
        return self._most is None or self._running < self._most

    def _leave(self, began: float) -> None:
        took = self._clock.now() - began
        self._service_s = took if self._service_s is None else self._service_s + _NEWEST * (took - self._service_s)
        self._hand_over()

    def _hand_over(self) -> None:
        while self._waiting:
            place = self._waiting.popleft()
            if not place.done():  # else cancelled, and its task hasn't run yet to say so
                place.set_result(None)
                return
        self._running -= 1

    def _retry_after_ms(self) -> int:
        service_s = _UNKNOWN_SERVICE_S if self._service_s is None else self._service_s
        rounds = (len(self._waiting) + 1) / (self._most or 1)
        return math.ceil(1000 * min(max(service_s * rounds, _SHORTEST_S), _LONGEST_S))
