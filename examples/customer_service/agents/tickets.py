"""The ticket agent: hands a customer's trouble to the people who can help."""

from __future__ import annotations

import asyncio
import itertools
import secrets

from pydantic import BaseModel

from agent_reach import capability, register_agent
from examples.customer_service.text import words

# A queue takes a message if it has one of its words, compared without endings. The first that fits takes it.
_QUEUES = {
    "fraud": "stolen stole lost theft compromised fraud hacked swallowed someone",
    "cards": "card pin contactless atm machine virtual chip passcode phone",
    "payments": "transfer payment refund charged charge fee top topup rate exchange money",
}
_URGENT = "urgent urgently immediately stolen stole lost swallowed compromised fraud hacked twice asap now"


class Ticket(BaseModel):
    """An opened ticket: its number, the team that works on it, and how soon (`urgent` or `normal`)."""

    number: str
    queue: str
    urgency: str


@register_agent(name="tickets")
class TicketDesk:
    """Numbers its tickets itself, in a series of its own, so that two desks never give the same number."""

    def __init__(self, write_s: float = 0.15) -> None:
        self._series = secrets.token_hex(3).upper()
        self._next = itertools.count(1)
        self._write_s = write_s

    # Opening a ticket twice would be wrong, so this is not idempotent: a call whose answer is lost isn't repeated.
    @capability("ticket.open.v1", timeout="write")
    async def open(self, customer_id: str, text: str) -> Ticket:
        """Open a ticket in the queue that fits a customer's message."""
        said = set(words(text))
        queue = next((name for name, known in _QUEUES.items() if said & set(words(known))), "general")
        urgency = "urgent" if said & set(words(_URGENT)) else "normal"
        # Stands for the write to a ticket system, which takes a moment.
        await asyncio.sleep(self._write_s)
        return Ticket(number=f"{self._series}-{next(self._next):04}", queue=queue, urgency=urgency)
