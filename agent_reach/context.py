"""The call that is being served now, carried to nested calls by a context variable."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field

from agent_reach.routing.budget import RetryAllowance

__all__ = ["CallContext", "Serving", "current_call"]


@dataclass(slots=True)
class Serving:
    """Whether a call is still being served. What its handler started in the background outlives it, and then makes
    calls of its own: the caller's deadline and retries are no longer theirs.
    """

    over: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CallContext:
    """What a handler may know of the call it serves.

    `hop` is the depth in the call tree (1: called by a root), `attempt` the caller's 1-based attempt,
    `deadline` the moment the caller gives up, on the monotonic clock `now`, in seconds.
    """

    request_id: str
    trace_id: str
    from_agent: str
    capability: str
    deadline: float
    context_id: str | None = None
    attempt: int = 1
    hop: int = 1
    idempotency_key: str | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    retry_allowance: RetryAllowance = field(default_factory=lambda: RetryAllowance(0))
    serving: Serving = field(default_factory=Serving, repr=False)
    now: Callable[[], float] = field(default=time.monotonic, repr=False)

    @property
    def time_left_s(self) -> float:
        """Seconds until the caller gives up; 0.0 when that moment is past."""
        return max(0.0, self.deadline - self.now())


current_call: ContextVar[CallContext | None] = ContextVar("agent_reach_current_call", default=None)
