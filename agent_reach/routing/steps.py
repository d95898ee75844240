"""What a call session is asked for, and what it answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from agent_reach.config import RetryConfig
from agent_reach.context import RetryAllowance
from agent_reach.errors import Attempt, ReachError
from agent_reach.model import ReplyEnvelope
from agent_reach.routing.instance import Candidate

__all__ = ["CallPlan", "Raise", "Return", "Send", "Step", "Wait"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallPlan:
    """What was asked for. `started` and `deadline` are on the caller's monotonic clock, in seconds.

    `explicit_timeout`: the caller named a total, so the last attempt may use all that is left of it.
    `pinned`: only this instance. `preferred`: these first, in order, while they are usable.
    """

    capability: str
    request_id: str
    started: float
    deadline: float
    retry: RetryConfig
    allowance: RetryAllowance
    explicit_timeout: bool = False
    pinned: str | None = None
    preferred: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Send:
    """Send attempt `number` (1-based) to `candidate` and give it `timeout_s` seconds."""

    candidate: Candidate
    number: int
    timeout_s: float
    retry_allowance: int


@dataclass(frozen=True, slots=True)
class Wait:
    """Ask again in `seconds`."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Return:
    """The call succeeded."""

    reply: ReplyEnvelope
    attempts: tuple[Attempt, ...]


@dataclass(frozen=True, slots=True)
class Raise:
    """The call failed."""

    error: ReachError


Step: TypeAlias = Send | Wait | Return | Raise
