"""Where a client lives: one process, one event loop; and the end of a program that only serves."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from dataclasses import dataclass

__all__ = ["Home", "end_of_program"]

_log = logging.getLogger("agent_reach.calls")


async def end_of_program() -> None:
    """Let what still runs end within a second, then leave: asyncio would wait without bound for a handler that
    ignores its cancellation, and the process would outlive its drain.
    """
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    if not left:
        return
    _, stubborn = await asyncio.wait(left, timeout=1.0)
    if stubborn:
        names = ", ".join(sorted(task.get_name() for task in stubborn))
        _log.error("left behind, for they ignore their cancellation: %s", names)
        logging.shutdown()
        sys.stdout.flush()
        os._exit(1)


@dataclass(frozen=True, slots=True)
class Home:
    """Where a client was opened. A forked child, or a second loop, would be served knowledge that nobody renews."""

    pid: int
    loop: asyncio.AbstractEventLoop | None

    @classmethod
    def here(cls) -> Home:
        """This process and, if one runs here, this event loop."""
        return cls(os.getpid(), asyncio._get_running_loop())
