"""SIGTERM and SIGINT while serving: the first asks to drain, the second hurries."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Iterator
from typing import Any

__all__ = ["stop_signals"]


@contextlib.contextmanager
def stop_signals(stop: asyncio.Event, hurry: asyncio.Event) -> Iterator[None]:
    """Let SIGTERM and SIGINT stop, and a second one hurry; what was set before is put back."""

    def ask() -> None:
        if stop.is_set():
            hurry.set()
        stop.set()

    loop = asyncio.get_running_loop()
    # Handlers that the application gave this very loop; asyncio keeps them here and has no public way to ask.
    of_loop = dict(getattr(loop, "_signal_handlers", {}))
    before: dict[signal.Signals, Any] = {}
    for number in (signal.SIGTERM, signal.SIGINT):
        # Only the main thread may; elsewhere the host stops us by cancelling.
        with contextlib.suppress(ValueError, RuntimeError, NotImplementedError):
            previous = signal.getsignal(number)
            loop.add_signal_handler(number, ask)
            before[number] = previous
    try:
        yield
    finally:
        for number, previous in before.items():
            loop.remove_signal_handler(number)
            if number in of_loop:
                loop.add_signal_handler(number, of_loop[number]._callback, *of_loop[number]._args)
            elif previous is not None:
                # None: set by code outside Python, which nobody here can put back.
                signal.signal(number, previous)
