"""The caller: customers' messages at a steady rate, whatever happens to the earlier ones."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterator
from typing import Any

from agent_reach import OutcomeUnknown, ReachClient, ReachError, Reply
from examples.customer_service import data
from examples.customer_service.agents.profiles import CUSTOMERS
from examples.customer_service.tally import Ended, Tally

__all__ = ["CAPABILITIES", "Traffic"]

# By agent. What each message sets off: it is understood and looked up, some lead to a ticket or a summary.
CAPABILITIES = {
    "intent": "intent.detect.v1",
    "knowledge": "knowledge.retrieve.v1",
    "profiles": "profile.read.v1",
    "summary": "conversation.summarise.v1",
    "tickets": "ticket.open.v1",
}
_TURNS = ("intent", "knowledge", "profiles", "tickets", "intent", "knowledge", "summary", "profiles")
# No call may take longer than the library's total of 30 s.
_LAST_CALLS_S = 35.0


class Traffic:
    """Calls every capability in turn through `reach`, `rate` calls a second, and counts how they end."""

    def __init__(self, reach: ReachClient, tally: Tally, rate: float) -> None:
        self._reach = reach
        self._tally = tally
        self._rate = rate
        self._running: set[asyncio.Task[None]] = set()
        self._messages = itertools.cycle(data.messages())
        self._customers = itertools.cycle(CUSTOMERS)

    async def run(self, stop: asyncio.Event) -> None:
        """Call until `stop` is set, then wait for the last answers."""
        began = time.monotonic()
        turns: Iterator[str] = itertools.cycle(_TURNS)
        for number in itertools.count(1):
            if stop.is_set():
                break
            self.start_call(next(turns))
            # By the clock, not from the last call: a late one doesn't make all others late.
            await asyncio.sleep(max(0.0, began + number / self._rate - time.monotonic()))
        await self.finish()

    async def finish(self) -> None:
        """Wait for the calls that are running."""
        if self._running:
            await asyncio.wait(self._running, timeout=_LAST_CALLS_S)

    def start_call(self, agent: str) -> None:
        """Start one call and don't wait for it."""
        self._tally.started += 1
        task = asyncio.ensure_future(self._call(CAPABILITIES[agent], self._payload(agent)))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _call(self, capability: str, payload: dict[str, Any]) -> None:
        started_at = time.monotonic()
        try:
            reply = await self._reach.call(capability, payload)
        except OutcomeUnknown as error:
            self._count(capability, "unknown", started_at, error)
        except Exception as error:  # noqa: BLE001 - whatever comes out of a call, it has failed
            self._count(capability, "failed", started_at, error)
        else:
            self._count(capability, "ok", started_at, reply)

    def _count(self, capability: str, outcome: Any, started_at: float, end: Reply[Any] | Exception) -> None:
        attempts = end.attempts if isinstance(end, Reply | ReachError) else ()
        self._tally.calls.append(
            Ended(
                capability=capability,
                outcome=outcome,
                started_at=started_at,
                ended_at=time.monotonic(),
                attempts=len(attempts),
                agent_id=end.agent_id if isinstance(end, Reply | OutcomeUnknown) else "",
                url=attempts[-1].url if attempts else "",
                error=f"{type(end).__name__}: {end}" if isinstance(end, Exception) else "",
            )
        )

    def _payload(self, agent: str) -> dict[str, Any]:
        text = next(self._messages).text
        match agent:
            case "intent":
                return {"text": text}
            case "knowledge":
                return {"question": text}
            case "profiles":
                return {"customer_id": next(self._customers)}
            case "tickets":
                return {"customer_id": next(self._customers), "text": text}
            case _:
                conversation = [text, *(message.text for message in itertools.islice(self._messages, 2))]
                return {"customer_id": next(self._customers), "messages": conversation}
