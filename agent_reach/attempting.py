"""The attempts of one call that are under way: usually one, two while a second copy runs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from agent_reach.ports import Clock
from agent_reach.routing.outcomes import Cancelled, Outcome
from agent_reach.routing.session import CallSession
from agent_reach.routing.steps import Send

__all__ = ["Attempts"]


class Attempts:
    """Carries attempts out and tells the session how they ended, whatever ended them; then calls `ended`."""

    def __init__(
        self,
        session: CallSession,
        dial: Callable[[Send], Awaitable[Outcome]],
        clock: Clock,
        ended: Callable[[], None],
    ) -> None:
        self._session = session
        self._dial = dial
        self._clock = clock
        self._ended = ended
        self._running: dict[asyncio.Task[Outcome], Send] = {}

    async def begin(self, send: Send) -> None:
        """Carry an attempt out; one that may get a second copy is only begun."""
        if send.hedge_after_s is not None or self._running:
            self._running[asyncio.ensure_future(self._task(send))] = send
            return
        # A task of its own would cost as much as all decisions of the call.
        outcome: Outcome = Cancelled()
        try:
            outcome = await self._dial(send)
        finally:
            self._record(send, outcome)

    async def wait(self, seconds: float | None) -> None:
        """Wait until an attempt under way ended and was recorded, or for `seconds`."""
        waiting: set[asyncio.Future[object]] = set(self._running)  # type: ignore[arg-type]
        sleep = None if seconds is None else asyncio.ensure_future(self._clock.sleep(seconds))
        if sleep is not None:
            waiting.add(sleep)  # type: ignore[arg-type]
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if sleep is not None:
                sleep.cancel()
        for task in [task for task in self._running if task.done()]:
            send = self._running.pop(task)
            outcome: Outcome = Cancelled()
            try:
                outcome = task.result()
            finally:
                self._record(send, outcome)

    async def cancel(self) -> None:
        """End what is still under way: the call is over."""
        if not self._running:
            return
        running, self._running = self._running, {}
        for task, send in running.items():
            task.cancel()
            self._record(send, Cancelled())
        await asyncio.wait(running)
        for task in running:
            if not task.cancelled():
                # What came too late to be cancelled is of no use; a fault of the dialer must not go unheard.
                task.result()

    async def _task(self, send: Send) -> Outcome:
        return await self._dial(send)

    def _record(self, send: Send, outcome: Outcome) -> None:
        self._session.record(outcome, self._clock.now(), send)
        self._ended()
