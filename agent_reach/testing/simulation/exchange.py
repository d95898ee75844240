"""One attempt, as both sides of it know it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agent_reach.routing.budget import RetryAllowance
from agent_reach.routing.steps import Send
from agent_reach.testing.simulation.conditions import Fate
from agent_reach.testing.simulation.heap import Handle

if TYPE_CHECKING:
    from agent_reach.testing.simulation.client import Call
    from agent_reach.testing.simulation.offers import Admission
    from agent_reach.testing.simulation.server import Server

__all__ = ["Exchange"]

# What a caller keeps back of an attempt's time, so that the server's word gets there first (dialing/exchange.py).
_KEPT_BACK_S, _KEPT_BACK_SHARE = 0.1, 0.05


class Exchange:
    """An attempt under way.

    The client's part: `over` once its outcome is recorded, `sent` unless the connection hangs, `timer` for its time
    and `hedge` for a second copy. The server's: it waits, then runs since `began` and until `deadline` at the
    latest; `event` comes next for it, unless a fault is its `fate`; `nested` is the call that its handler is at.
    """

    __slots__ = (
        "admission",
        "began",
        "call",
        "deadline",
        "delay_s",
        "event",
        "fate",
        "hedge",
        "in_slot",
        "key",
        "nested",
        "over",
        "purse",
        "send",
        "sent",
        "sent_at",
        "server",
        "timer",
    )

    def __init__(self, call: Call, send: Send, server: Server, key: int, delay_s: float, sent_at: float) -> None:
        self.call = call
        self.send = send
        self.server = server
        self.key = key
        self.delay_s = delay_s
        self.sent_at = sent_at
        self.over = False
        self.sent = True
        self.timer: Handle | None = None
        self.hedge: Handle | None = None
        self.admission: Admission | None = None
        # None while it waits in the queue.
        self.began: float | None = None
        self.in_slot = False
        self.deadline = 0.0
        self.event: Handle | None = None
        self.fate: Fate | None = None
        self.nested: Call | None = None
        self.purse: RetryAllowance | None = None

    def arrived(self, now: float) -> None:
        """Set the server's deadline: what the request says of its caller's time counts from when it is read."""
        timeout_s = self.send.timeout_s
        self.deadline = now + timeout_s - min(_KEPT_BACK_S, _KEPT_BACK_SHARE * timeout_s)
