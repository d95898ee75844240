"""What a request comes to, and how that is written on the wire."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from agent_reach import codec
from agent_reach.errors import OutcomeUnknown
from agent_reach.model import ErrorInfo, LoadReport

__all__ = [
    "Failed",
    "Outcome",
    "Response",
    "Succeeded",
    "clean",
    "encode",
    "handler_failed",
    "out_of_time",
    "refusal",
    "stopped",
]

# Enough for a sentence and its reason; some libraries put whole documents into their messages.
_LONGEST_MESSAGE = 2000


@dataclass(frozen=True, slots=True)
class Succeeded:
    """The handler's result, already JSON: encoded once, however many repeats ask for it."""

    data: bytes


@dataclass(frozen=True, slots=True)
class Failed:
    """An error answer; `status` is the HTTP status and the `code` of the reply.

    `cause` is what the handler raised: for our own log, never for the wire.
    """

    status: int
    error: ErrorInfo
    cause: BaseException | None = None


Outcome: TypeAlias = Succeeded | Failed


@dataclass(frozen=True, slots=True)
class Response:
    """An HTTP answer. `close`: the connection can't be used again."""

    status: int
    body: bytes
    close: bool = False
    allow: str | None = None


def refusal(
    status: int,
    kind: str,
    message: str,
    *,
    retryable: bool = False,
    retry_after_ms: int | None = None,
    problems: tuple[tuple[str, str], ...] = (),
) -> Failed:
    """An error that promises that nothing ran."""
    return Failed(
        status,
        ErrorInfo(
            type=kind,
            message=clean(message),
            retryable=retryable,
            executed=False,
            retry_after_ms=retry_after_ms,
            problems=problems,
        ),
    )


def handler_failed(error: BaseException, *, idempotent: bool, executed: bool = True) -> Failed:
    """Tell the caller what a handler raised: type and message, never the traceback."""
    # A nested call whose outcome is unknown may have done its work: repeating this one would repeat that.
    retryable = idempotent and not isinstance(error, OutcomeUnknown)
    try:
        message = str(error)
    except Exception as unprintable:  # noqa: BLE001 - the boundary: __str__ is the user's code
        message = f"(its message can't be printed: {type(unprintable).__name__})"
    return Failed(
        500,
        ErrorInfo(type=type(error).__name__, message=clean(message), retryable=retryable, executed=executed),
        cause=error,
    )


def out_of_time(capability: str, *, idempotent: bool, executing: bool) -> Failed:
    """The caller's time was up before the handler ended, or before it began."""
    if not executing:
        return refusal(504, "DeadlineExceeded", "the caller's time was up in the queue", retryable=True)
    message = f"{capability} didn't end within the caller's time"
    error = ErrorInfo(type="DeadlineExceeded", message=message, retryable=idempotent, executed=True)
    return Failed(504, error)


def stopped(agent_id: str, capability: str, *, idempotent: bool, executing: bool) -> Failed:
    """The agent ended before the handler did, or before it began."""
    if not executing:
        return refusal(503, "NotStarted", f"{agent_id} has stopped", retryable=True)
    message = f"{agent_id} stopped and cancelled {capability}"
    error = ErrorInfo(type="NotStarted", message=message, retryable=idempotent, executed=True)
    return Failed(503, error)


def clean(message: str) -> str:
    """Cut a message to what an answer may carry; lone surrogates, which UTF-8 can't, become '?'."""
    text = message if len(message) <= _LONGEST_MESSAGE else message[: _LONGEST_MESSAGE - 1] + "…"
    return text.encode("utf-8", "replace").decode()


def encode(
    outcome: Outcome,
    *,
    agent_id: str,
    response_to: str | None,
    state: str,
    load: LoadReport,
    deprecated: bool = False,
    close: bool = False,
) -> Response:
    """Write the reply envelope."""
    fields = {
        "code": outcome.status if isinstance(outcome, Failed) else 0,
        "response_to": response_to,
        "agent_id": agent_id,
        "deprecated": deprecated,
        "load": {"in_flight": load.in_flight, "queued": load.queued, "max_concurrency": load.max_concurrency},
        "state": state,
    }
    if isinstance(outcome, Failed):
        fields["error"] = outcome.error.model_dump(exclude_none=True)
        return Response(outcome.status, codec.dumps(fields), close)
    return Response(200, b'%b,"data":%b}' % (codec.dumps(fields)[:-1], outcome.data), close)
