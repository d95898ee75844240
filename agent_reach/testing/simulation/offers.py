"""What a simulated agent offers, and how much of it runs at a time."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from agent_reach.model import CapabilityInfo
from agent_reach.testing.simulation.distributions import Distribution

if TYPE_CHECKING:
    from agent_reach.testing.simulation.exchange import Exchange

__all__ = ["Admission", "Nested", "Offer"]

Load = tuple[int, int, int | None]


@dataclass(frozen=True, slots=True)
class Nested:
    """A call that the handler makes after its own work, in `share` of its runs."""

    capability: str
    timeout_s: float | None = None
    share: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """One capability of one agent.

    `slots` run at a time (None: any number), `queue` more wait (None: 3 x slots, as agents do by default). With
    `announce_slots` False the record doesn't say how many. `timeout` is a tier or seconds. `calls` are made one
    after the other, each after the last one's success.
    """

    capability: str
    service: Distribution
    slots: int | None = 8
    queue: int | None = None
    idempotent: bool = True
    timeout: str | float = "interactive"
    announce_slots: bool = True
    calls: tuple[Nested, ...] = ()

    @property
    def info(self) -> CapabilityInfo:
        """What the registry says of it."""
        return CapabilityInfo(
            name=self.capability,
            idempotent=self.idempotent,
            timeout=self.timeout,
            max_concurrency=self.slots if self.announce_slots else None,
        )


# As agents do it (serving/admission.py): the newest service time counts a fifth, half a second is assumed at first,
# and what is asked for lies between a round trip and half a minute.
_NEWEST, _UNKNOWN_S, _SHORTEST_S, _LONGEST_S = 0.2, 0.5, 0.02, 30.0


class Admission:
    """What runs and waits of one offer. `report_delay_s`: reports tell the load of that long ago."""

    __slots__ = ("_history", "_report_delay_s", "_service_s", "most", "offer", "queue", "room", "running")

    def __init__(self, offer: Offer, report_delay_s: float) -> None:
        self.offer = offer
        self.most = math.inf if offer.slots is None else offer.slots
        self.room = 3 * (offer.slots or 0) if offer.queue is None else offer.queue
        self.running = 0
        self.queue: deque[Exchange] = deque()
        self._service_s: float | None = None
        self._report_delay_s = report_delay_s
        self._history: deque[tuple[float, Load]] = deque([(-math.inf, (0, 0, offer.slots))])

    @property
    def is_full(self) -> bool:
        """True if the next to come would be refused."""
        return self.running >= self.most and len(self.queue) >= self.room

    def changed(self, now: float) -> None:
        """Note the load for reports that come late."""
        if self._report_delay_s:
            self._history.append((now, (self.running, len(self.queue), self.offer.slots)))

    def load(self, now: float) -> Load:
        """What a report says: running, waiting, slots."""
        if not self._report_delay_s:
            return self.running, len(self.queue), self.offer.slots
        history, then = self._history, now - self._report_delay_s
        while len(history) > 1 and history[1][0] <= then:
            history.popleft()
        return history[0][1]

    def took(self, seconds: float) -> None:
        """Learn how long a run took."""
        known = self._service_s
        self._service_s = seconds if known is None else known + _NEWEST * (seconds - known)

    def retry_after_ms(self) -> int:
        """When the queue of now will have been served."""
        service_s = _UNKNOWN_S if self._service_s is None else self._service_s
        rounds = (len(self.queue) + 1) / (self.offer.slots or 1)
        return math.ceil(1000 * min(max(service_s * rounds, _SHORTEST_S), _LONGEST_S))
