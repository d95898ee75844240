"""What a request comes to, and how that is written on the wire."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import TypeAlias

from agent_reach import codec
from agent_reach.errors import InvalidPayload, ReachError
from agent_reach.model import ErrorInfo, LoadReport

__all__ = [
    "Done",
    "Failed",
    "Response",
    "Result",
    "clean",
    "encode",
    "handler_failed",
    "invalid_payload",
    "out_of_time",
    "refusal",
    "stopped",
]

# Enough for a sentence and its reason; some libraries put whole documents into their messages.
_LONGEST_MESSAGE = 2000


@dataclass(frozen=True, slots=True)
class Done:
    """The handler's result, already JSON: encoded once, however many repeats ask for it."""

    data: bytes


@dataclass(frozen=True, slots=True)
class Failed:
    """An error answer; `status` is the HTTP status and the `code` of the reply.

    `detail` is what our own log may say: never the caller's data, as the message may. `cause` is what the
    handler raised, for our own log too, never for the wire.
    """

    status: int
    error: ErrorInfo
    detail: str = ""
    cause: BaseException | None = None


Result: TypeAlias = Done | Failed


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
    detail: str | None = None,
) -> Failed:
    """An error that promises that nothing ran. `detail` is for our log if the message isn't fit for it."""
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
        detail=clean(message if detail is None else detail),
    )


def invalid_payload(error: InvalidPayload, declared: Container[str]) -> Failed:
    """Tell the caller every problem; our own log learns how many there are, and in which `declared` fields.

    A validator's words may quote the payload and an unknown key is part of it; neither belongs in a log.
    """
    fields = dict.fromkeys(field.partition(".")[0] for field, _ in error.problems)
    known = [field for field in fields if field in declared]
    places = f"; declared fields at fault: {', '.join(known)}" if known else ""
    return refusal(
        422,
        "InvalidPayload",
        error.message,
        problems=error.problems,
        detail=f"problems with the payload: {len(error.problems)}{places}",
    )


def handler_failed(error: BaseException, *, idempotent: bool, executed: bool = True) -> Failed:
    """Tell the caller what a handler raised: type and message, never the traceback."""
    # What a nested call failed with has been retried next to the fault; unless that hop had no retries left, and
    # then one further up may have some.
    retryable = idempotent and (not isinstance(error, ReachError) or error.starved)
    try:
        message = str(error)
    except Exception as unprintable:  # noqa: BLE001 - the boundary: __str__ is the user's code
        message = f"(its message can't be printed: {type(unprintable).__name__})"
    return Failed(
        500,
        ErrorInfo(type=type(error).__name__, message=clean(message), retryable=retryable, executed=executed),
        cause=error,
    )


def out_of_time(capability: str, ttl_s: float, *, idempotent: bool, executing: bool) -> Failed:
    """The `ttl_s` seconds that the caller gave were up before the handler ended, or before it began."""
    if not executing:
        message = f"{capability} was still in the queue when the {ttl_s:g} s that its caller gave were up"
        return refusal(504, "DeadlineExceeded", message, retryable=True)
    message = f"{capability} didn't end within the {ttl_s:g} s that its caller gave"
    error = ErrorInfo(type="DeadlineExceeded", message=message, retryable=idempotent, executed=True)
    return Failed(504, error, detail=message)


def stopped(agent_id: str, capability: str, *, idempotent: bool, executing: bool) -> Failed:
    """The agent ended before the handler did, or before it began."""
    if not executing:
        return refusal(503, "NotStarted", f"{agent_id} has stopped", retryable=True)
    message = f"{agent_id} stopped and cancelled {capability}"
    error = ErrorInfo(type="NotStarted", message=message, retryable=idempotent, executed=True)
    return Failed(503, error, detail=message)


def clean(message: str) -> str:
    """Cut a message to what an answer may carry; lone surrogates, which UTF-8 can't, become '?'."""
    text = message if len(message) <= _LONGEST_MESSAGE else message[: _LONGEST_MESSAGE - 1] + "…"
    return text.encode("utf-8", "replace").decode()


def encode(
    result: Result,
    *,
    agent_id: str,
    response_to: str | None,
    state: str,
    load: LoadReport,
    deprecated: bool = False,
    close: bool = False,
    retry_allowance: int | None = None,
) -> Response:
    """Write the reply envelope."""
    fields = {
        "code": result.status if isinstance(result, Failed) else 0,
        "response_to": response_to,
        "agent_id": agent_id,
        "deprecated": deprecated,
        "load": {"in_flight": load.in_flight, "queued": load.queued, "max_concurrency": load.max_concurrency},
        "state": state,
    }
    if retry_allowance is not None:
        fields["retry_allowance"] = retry_allowance
    if isinstance(result, Failed):
        fields["error"] = result.error.model_dump(exclude_none=True)
        return Response(result.status, codec.dumps(fields), close)
    return Response(200, b'%b,"data":%b}' % (codec.dumps(fields)[:-1], result.data), close)
