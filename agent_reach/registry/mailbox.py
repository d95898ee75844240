"""The mail of one watch of the memory registry."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from agent_reach.ports import WatchMessage

__all__ = ["Mailbox", "MailboxWatch"]

_log = logging.getLogger(__name__)


class Mailbox:
    """One watch on a namespace. Messages are delivered one by one, in the order they were put in.

    `put` and `flush` are apart so that nobody delivers under a lock of the registry: a callback may use it.
    """

    def __init__(self, namespace: str, from_revision: int, deliver: Callable[[WatchMessage], None]) -> None:
        self.namespace = namespace
        self.from_revision = from_revision
        self._deliver = deliver
        self._mail: deque[WatchMessage] = deque()
        self._idle = threading.Condition()
        self._thread: int | None = None
        self._cancelled = False

    def put(self, message: WatchMessage) -> None:
        """Add a message; it goes out at the next `flush`."""
        self._mail.append(message)

    def flush(self) -> None:
        """Deliver what waits, unless another thread (or an outer frame of this one) is doing so already."""
        while True:
            with self._idle:
                if self._cancelled or self._thread is not None or not self._mail:
                    return
                message = self._mail.popleft()
                self._thread = threading.get_ident()
            try:
                self._deliver(message)
            except Exception:  # noqa: BLE001 - foreign code: its bug must not fail the write of somebody else
                _log.exception("a watch callback failed")
            finally:
                with self._idle:
                    self._thread = None
                    self._idle.notify_all()

    def cancel(self) -> None:
        """No delivery begins after this; one that runs in another thread is waited for."""
        with self._idle:
            self._cancelled = True
            while self._thread not in (None, threading.get_ident()):
                self._idle.wait()


@dataclass(frozen=True, slots=True)
class MailboxWatch:
    """What a watcher is given: its mailbox, and what the registry does with it."""

    mailbox: Mailbox
    send_progress: Callable[[Mailbox], None]
    forget: Callable[[Mailbox], None]

    def ask_progress(self) -> None:
        """Have the registry say how far it has come."""
        self.send_progress(self.mailbox)

    def cancel(self) -> None:
        """Deliver nothing more."""
        self.mailbox.cancel()
        self.forget(self.mailbox)
