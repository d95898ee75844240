"""One attempt on the wire: the envelope out, the outcome in."""

from __future__ import annotations

import email.utils
import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, assert_never

from pydantic import ValidationError

from agent_reach import codec
from agent_reach.model import PROTOCOL, ErrorInfo, ReplyEnvelope, problems_of
from agent_reach.ports import Answer, BadAnswer, DialRequest, DialResult, MaybeExecuted, NeverSent
from agent_reach.routing.outcomes import LostAnswer, Outcome, Rejected, Succeeded, Unreadable, Unsent
from agent_reach.routing.steps import Send

__all__ = ["OutgoingCall", "interpret"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OutgoingCall:
    """What stays the same over a call's attempts. `payload_json` is the payload, encoded once for all of them."""

    request_id: str
    trace_id: str
    from_agent: str
    namespace: str
    target_capability: str
    payload_json: bytes = b"{}"
    hop: int = 1
    idempotency_key: str | None = None
    context_id: str | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)

    def attempt(self, send: Send, *, connect_timeout_s: float, max_reply_bytes: int, wall: float) -> DialRequest:
        """Build the request of one attempt; `wall` is the time of day, in epoch seconds."""
        return self.request(
            send.candidate.url,
            target_agent=send.candidate.agent_id,
            timeout_s=send.timeout_s,
            connect_timeout_s=connect_timeout_s,
            max_reply_bytes=max_reply_bytes,
            wall=wall,
            number=send.number,
            retry_allowance=send.retry_allowance,
        )

    def request(
        self,
        url: str,
        *,
        target_agent: str,
        timeout_s: float,
        connect_timeout_s: float,
        max_reply_bytes: int,
        wall: float,
        number: int = 1,
        retry_allowance: int = 0,
    ) -> DialRequest:
        """Build a request to the agent at `url`; `traceparent` is W3C Trace Context, level 1."""
        fields = {
            "protocol": PROTOCOL,
            "request_id": self.request_id,
            "trace_id": self.trace_id,
            "from_agent": self.from_agent,
            "namespace": self.namespace,
            "target_capability": self.target_capability,
            "target_agent": target_agent,
            "timestamp": wall,
            "ttl_ms": _ttl_ms(timeout_s),
            "attempt": number,
            "hop": self.hop,
            "retry_allowance": retry_allowance,
            "idempotency_key": self.idempotency_key or self.request_id,
            "context_id": self.context_id,
            "metadata": self.metadata,
        }
        return DialRequest(
            url=f"{url}/invoke",
            headers={
                "content-type": "application/json",
                "traceparent": f"00-{self.trace_id}-{secrets.token_hex(8)}-01",
            },
            body=b'%b,"payload":%b}' % (codec.dumps(fields)[:-1], self.payload_json),
            timeout_s=timeout_s,
            connect_timeout_s=min(connect_timeout_s, timeout_s),
            max_reply_bytes=max_reply_bytes,
        )


def _ttl_ms(timeout_s: float) -> int:
    """What the receiver is told to take: a little less than we wait, so that its word on what ran ("it never left
    the queue") gets here before we give up. 5 % covers any network of a data centre; 100 ms any other.
    """
    return max(1, round(1000 * (timeout_s - min(0.1, 0.05 * timeout_s))))


def interpret(result: DialResult, *, request_id: str, agent_id: str, wall: float) -> Outcome:
    """Say what an attempt came to. `wall` (epoch seconds) is needed for a Retry-After that names a date."""
    match result:
        case Answer():
            return _interpret_answer(result, request_id, agent_id, wall)
        case NeverSent():
            return Unsent(result.phase, result.detail, local=result.local, timed_out=result.timed_out)
        case MaybeExecuted():
            return LostAnswer(result.detail, timed_out=result.timed_out)
        case BadAnswer():
            return Unreadable(f"HTTP {result.status}: {result.detail}", final=result.too_large)
        case _:
            assert_never(result)


def _interpret_answer(answer: Answer, request_id: str, agent_id: str, wall: float) -> Outcome:
    try:
        reply = ReplyEnvelope.model_validate(codec.loads(answer.body))
    except ValidationError as error:
        problem = "; ".join(f"{field}: {reason}" for field, reason in problems_of(error)[:3])
        return _not_reach(answer, f"the JSON isn't a reach/1 answer ({problem})", wall)
    except ValueError as error:
        return _not_reach(answer, f"not JSON ({error})", wall)
    if reply.error is not None:
        if not _meant_for_us(answer.status, reply, request_id, agent_id):
            return Unreadable(_of_another(reply))
        info = _with_retry_after(reply.error, answer, wall)
        return Rejected(answer.status, info, reply.state, reply.load, retry_allowance=reply.retry_allowance)
    if answer.status != 200 or reply.code != 0:
        return _not_reach(answer, f"code {reply.code} with HTTP {answer.status} and no error", wall)
    if reply.agent_id != agent_id or reply.response_to != request_id:
        return Unreadable(_of_another(reply))
    return Succeeded(reply)


def _meant_for_us(status: int, reply: ReplyEnvelope, request_id: str, agent_id: str) -> bool:
    """True if an error answers our request. Who can't read a request doesn't know its id; who was never meant says
    421 in its own name. Nobody else may promise that nothing ran.
    """
    if reply.response_to not in (None, request_id):
        return False
    return reply.agent_id == agent_id or (status == 421 and reply.response_to == request_id)


def _of_another(reply: ReplyEnvelope) -> str:
    return f"it answers request {reply.response_to} as {reply.agent_id}: not what was asked"


def _not_reach(answer: Answer, detail: str, wall: float) -> Outcome:
    """An answer that no reach/1 agent wrote: a proxy, another server at that address, a broken agent."""
    status = answer.status
    if 200 <= status < 300:
        return Unreadable(f"HTTP {status}: {detail}")
    if 300 <= status < 400:
        info = ErrorInfo(type="ProtocolError", message=f"HTTP {status}: redirects are not followed", retryable=True)
        return Rejected(status, info, enveloped=False)
    overloaded = status == 429
    info = ErrorInfo(
        type="Overloaded" if overloaded else f"HTTP {status}",
        message=detail,
        # A server error may be this instance's alone; a 404 means that another server has taken its address.
        retryable=status >= 500 or status in (404, 421, 429),
        executed=status >= 500,
    )
    return Rejected(status, _with_retry_after(info, answer, wall), enveloped=False)


def _with_retry_after(info: ErrorInfo, answer: Answer, wall: float) -> ErrorInfo:
    if info.retry_after_ms is not None:
        return info
    seconds = _retry_after_s(answer.headers.get("retry-after"), wall)
    return info if seconds is None else info.model_copy(update={"retry_after_ms": int(seconds * 1000)})


# A peer's word is taken for an hour at the most; longer than any call, and no float overflow.
_LONGEST_RETRY_AFTER_S = 3600.0


def _retry_after_s(value: Any, wall: float) -> float | None:
    """Seconds of a Retry-After header (RFC 9110, 10.2.3: seconds or a date), within [0, one hour]."""
    if not value:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(value).timestamp() - wall
        except (ValueError, TypeError, OverflowError):
            return None
    if not math.isfinite(seconds):
        return None
    return min(max(0.0, seconds), _LONGEST_RETRY_AFTER_S)
