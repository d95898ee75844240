"""What servers answer, built once and shared: pydantic's objects are dear, and these never change."""

from __future__ import annotations

from functools import lru_cache

from agent_reach.model import ErrorInfo, LoadReport, ReplyEnvelope
from agent_reach.routing.outcomes import LostAnswer, Rejected, Succeeded, Unsent

__all__ = ["NO_ANSWER", "NO_CONNECTION", "REFUSED", "RESET", "error", "load_report", "rejected", "succeeded"]

# What the dialer reports of a connection: refused, not made in time, broken, silent.
REFUSED = Unsent("connect", "Connection refused")
NO_CONNECTION = Unsent("connect", "no connection in time", timed_out=True)
RESET = LostAnswer("connection reset")
NO_ANSWER = LostAnswer("no answer in time", timed_out=True)

# Loads repeat: a server of 8 slots and 24 places has 33 of them, times what its answers say of retries.
_KEPT = 16_384


@lru_cache(_KEPT)
def load_report(in_flight: int, queued: int, max_concurrency: int | None) -> LoadReport:
    """Return the load that an answer carries."""
    return LoadReport.model_construct(in_flight=in_flight, queued=queued, max_concurrency=max_concurrency)


@lru_cache(_KEPT)
def succeeded(agent_id: str, state: str, load: tuple[int, int, int | None], retries_left: int) -> Succeeded:
    """Return a good answer; `load` as in `load_report`."""
    reply = ReplyEnvelope.model_construct(
        code=0, agent_id=agent_id, load=load_report(*load), state=state, retry_allowance=retries_left
    )
    return Succeeded(reply)


@lru_cache(_KEPT)
def error(kind: str, *, retryable: bool, executed: bool = False, retry_after_ms: int | None = None) -> ErrorInfo:
    """Return why a request failed."""
    return ErrorInfo(
        type=kind, message="simulated", retryable=retryable, executed=executed, retry_after_ms=retry_after_ms
    )


def rejected(
    status: int, info: ErrorInfo, state: str, load: tuple[int, int, int | None], retries_left: int
) -> Rejected:
    """Return an error answer."""
    return Rejected(status, info, state, load_report(*load), retry_allowance=retries_left)
