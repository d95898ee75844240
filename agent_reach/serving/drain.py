"""Leaving without losing a call (DESIGN section 6)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Protocol

from agent_reach.config import ServingConfig
from agent_reach.ports import Clock

__all__ = ["Drainable", "drain"]

_log = logging.getLogger("agent_reach.serving")

# Kept back from the total for closing: half for cancelled handlers to clean up, the rest for open answers to reach
# their callers. Two seconds are plenty for both; of a short drain a quarter, or nothing would be left to wait with.
_CLOSING_S = 2.0
_CLOSING_SHARE = 0.25
# For what was cancelled to end; a withdrawal that ignores it is left behind.
_CLEANUP_S = 0.5


class Drainable(Protocol):
    """The part of an app that draining needs."""

    def begin_drain(self) -> None:
        """Say `draining` from now on."""
        ...

    async def wait_idle(self, timeout_s: float) -> bool:
        """Wait until nothing is in flight; False after `timeout_s` seconds."""
        ...

    async def stop(self, cleanup_s: float) -> None:
        """Cancel the rest, within `cleanup_s` seconds."""
        ...


async def drain(
    *,
    app: Drainable,
    withdraw: Callable[[], Awaitable[None]],
    stop_server: Callable[[float], Awaitable[None]],
    clock: Clock,
    config: ServingConfig,
    hurry: asyncio.Event,
) -> None:
    """Say so, withdraw, keep accepting for `linger_s`, let running calls end, close.

    All of it takes `drain_s` seconds, if `stop_server` keeps to the time it is given; a linger that doesn't fit in
    is cut. `hurry` ends every wait at once. A withdrawal that fails or hangs never stops the drain; one with a
    bound of its own (`Registration.withdraw`: 1.5 s) leaves time to linger.
    """
    closing_s = min(_CLOSING_S, _CLOSING_SHARE * config.drain_s)
    end = clock.now() + config.drain_s
    closing = end - closing_s
    app.begin_drain()
    await _unless(hurry, _withdraw(withdraw), clock, closing - clock.now())
    # Callers learn of the withdrawal within about a second; until then a closed port would meet them.
    await _unless(hurry, clock.sleep(config.linger_s), clock, closing - clock.now())
    await _unless(hurry, app.wait_idle(max(0.0, closing - clock.now())), clock, closing - clock.now())
    await app.stop(closing_s / 2)
    await stop_server(0.0 if hurry.is_set() else min(_CLOSING_S, max(0.0, end - clock.now())))


async def _withdraw(withdraw: Callable[[], Awaitable[None]]) -> None:
    try:
        await withdraw()
    except Exception:  # noqa: BLE001 - whatever it is, the way out stays open
        _log.exception("withdrawing from the registry failed; the entry ends with its lease")


async def _unless(hurry: asyncio.Event, work: Coroutine[Any, Any, object], clock: Clock, most_s: float) -> None:
    """Run `work` until it is done, `most_s` seconds have passed or `hurry` is set."""
    task = asyncio.ensure_future(work)
    timer = asyncio.ensure_future(clock.sleep(max(0.0, most_s)))
    hurried = asyncio.ensure_future(hurry.wait())
    waiting = (task, timer, hurried)
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if task.done() and not task.cancelled():
            task.result()
    finally:
        for one in waiting:
            one.cancel()
        await asyncio.wait(waiting, timeout=_CLEANUP_S)
