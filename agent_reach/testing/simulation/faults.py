"""What can be wrong with a server, from when until when.

All are data: `Simulation.inject` hands them to servers. `share` is the part of the requests that it hits; several
faults of one server are tried in the order they were injected in, and the first that hits decides.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeAlias

__all__ = [
    "BlackHole",
    "Busy",
    "DropAfterExecuting",
    "FailFast",
    "FailSlow",
    "Fault",
    "Hang",
    "Pauses",
    "Refuse",
    "SharedDownstream",
    "Slow",
    "WarmUp",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Interval:
    from_s: float = 0.0
    until_s: float = math.inf


@dataclass(frozen=True, slots=True)
class Refuse(_Interval):
    """The port is closed: connecting fails after one round trip, and nothing is sent. What runs goes on."""


@dataclass(frozen=True, slots=True)
class BlackHole(_Interval):
    """Connecting hangs until the client's connect timeout, and nothing is sent. What runs goes on."""


@dataclass(frozen=True, slots=True)
class Hang(_Interval):
    """Requests are taken, never run and never answered; no slot is taken."""

    share: float = 1.0


@dataclass(frozen=True, slots=True)
class FailFast(_Interval):
    """500 after `after_s` seconds, without a slot: the handler failed at once. It counts as executed."""

    share: float = 1.0
    after_s: float = 0.001


@dataclass(frozen=True, slots=True)
class FailSlow(_Interval):
    """500 after the usual time in a slot."""

    share: float = 1.0


@dataclass(frozen=True, slots=True)
class Busy(_Interval):
    """429, nothing executed, come back in `retry_after_s` seconds (None: it doesn't say)."""

    share: float = 1.0
    retry_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class DropAfterExecuting(_Interval):
    """It runs as usual, but the connection is reset instead of an answer."""

    share: float = 1.0


@dataclass(frozen=True, slots=True)
class Slow(_Interval):
    """Work that starts in the interval takes `factor` times as long."""

    factor: float


@dataclass(frozen=True, slots=True)
class Pauses(_Interval):
    """Every `every_s` seconds, from `from_s` on, everything stands still for `for_s` (a collector, a blocked loop).

    Inject it before the time it covers: work that has started keeps the end that was worked out for it.
    """

    every_s: float
    for_s: float

    def __post_init__(self) -> None:
        if not 0 < self.for_s < self.every_s:
            raise ValueError(f"for_s must be above 0 and below every_s, not {self.for_s} of {self.every_s}")


@dataclass(frozen=True, slots=True)
class WarmUp(_Interval):
    """After each start, service times fall from `factor` times the usual to the usual within `for_s` seconds."""

    for_s: float
    factor: float


@dataclass(frozen=True, slots=True)
class SharedDownstream(_Interval):
    """What several servers depend on fails: who `uses` it answers 500 after `after_s` (None: its usual time)."""

    name: str
    share: float = 1.0
    after_s: float | None = 0.001


Fault: TypeAlias = (
    Refuse
    | BlackHole
    | Hang
    | FailFast
    | FailSlow
    | Busy
    | DropAfterExecuting
    | Slow
    | Pauses
    | WarmUp
    | SharedDownstream
)
