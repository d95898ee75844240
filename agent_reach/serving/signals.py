"""SIGTERM and SIGINT while serving: the first asks to drain, the second hurries."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

__all__ = ["stop_signals"]


@contextlib.contextmanager
def stop_signals(stop: asyncio.Event, hurry: asyncio.Event) -> Iterator[None]:
    """Let SIGTERM and SIGINT stop, and a second one hurry; what was set before is put back.

    Agents that serve on the same loop are all told; the last to leave puts back.
    """
    loop = asyncio.get_running_loop()
    listeners = _of_loop.get(loop)
    if listeners is None:
        listeners = _of_loop[loop] = _Listeners()
        listeners.install(loop)
    listeners.asked.append((stop, hurry))
    try:
        yield
    finally:
        listeners.asked.remove((stop, hurry))
        if not listeners.asked:
            del _of_loop[loop]
            listeners.put_back(loop)


class _Listeners:
    """Who is told on one loop, and what its signals did before the first of them came."""

    def __init__(self) -> None:
        self.asked: list[tuple[asyncio.Event, asyncio.Event]] = []
        self._before: dict[signal.Signals, Any] = {}
        self._before_on_loop: dict[int, Any] = {}

    def install(self, loop: asyncio.AbstractEventLoop) -> None:
        # Handlers that the application gave this very loop; asyncio keeps them here and has no public way to ask.
        self._before_on_loop = dict(getattr(loop, "_signal_handlers", {}))
        for number in (signal.SIGTERM, signal.SIGINT):
            # Only the main thread may; elsewhere the host stops us by cancelling.
            with contextlib.suppress(ValueError, RuntimeError, NotImplementedError):
                previous = signal.getsignal(number)
                loop.add_signal_handler(number, self._tell)
                self._before[number] = previous

    def _tell(self) -> None:
        for stop, hurry in self.asked:
            if stop.is_set():
                hurry.set()
            stop.set()

    def put_back(self, loop: asyncio.AbstractEventLoop) -> None:
        for number, previous in self._before.items():
            loop.remove_signal_handler(number)
            if number in self._before_on_loop:
                handle = self._before_on_loop[number]
                loop.add_signal_handler(number, handle._callback, *handle._args)
            elif previous is not None:
                # None: set by code outside Python, which nobody here can put back.
                signal.signal(number, previous)


# Of the process, as signals are: a loop has one handler for each, and its agents don't know of each other.
_of_loop: WeakKeyDictionary[asyncio.AbstractEventLoop, _Listeners] = WeakKeyDictionary()
