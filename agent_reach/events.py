"""What happened, as data for observers. Never a payload, never a credential."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

__all__ = [
    "BreakerChanged",
    "CallEnded",
    "CallServed",
    "ContractClash",
    "Event",
    "OutageChanged",
    "RecordSkipped",
    "RegistrationChanged",
    "RegistryChanged",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallEnded:
    """A call of ours ended. `agent_id` is the last instance tried; `outcome` is `ok` or an error's class name."""

    request_id: str
    trace_id: str
    from_agent: str
    target_capability: str
    agent_id: str | None
    attempt: int
    elapsed_ms: float
    outcome: str
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallServed:
    """A request to us was answered. `outcome` is `ok` or the error type that went back.

    `error` is what the handler raised, for its traceback; None if nothing was raised here.
    """

    request_id: str
    trace_id: str
    from_agent: str
    target_capability: str
    agent_id: str
    attempt: int
    elapsed_ms: float
    outcome: str
    detail: str = ""
    error: BaseException | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakerChanged:
    """An instance was shut out, is probed, or is back. `retry_in_s`: seconds until it is probed, if it is open."""

    agent_id: str
    capability: str
    before: str
    after: str
    reason: str
    retry_in_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OutageChanged:
    """All calls of a capability fail, whichever instance they go to (`down`: calls wait for one to succeed), one
    has succeeded again (`recovering`), or enough have (`up`).
    """

    capability: str
    status: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistryChanged:
    """The view of the registry changed: `connected`, `lost`, `stale` (served on), `expired` (grace is over)."""

    address: str
    status: str
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistrationChanged:
    """Our own entry: `registered`, `lost`, `waiting`, `refused`, `draining`, `withdrawn`."""

    agent_id: str
    status: str
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordSkipped:
    """A registry record can't be read; its instance isn't routable, the others are."""

    agent_id: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ContractClash:
    """Two live instances offer a capability with different schemas."""

    capability: str
    agent_id: str
    other_agent_id: str
    detail: str = ""


Event: TypeAlias = (
    CallEnded
    | CallServed
    | BreakerChanged
    | OutageChanged
    | RegistryChanged
    | RegistrationChanged
    | RecordSkipped
    | ContractClash
)
