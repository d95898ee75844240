"""Reading a request of reach/1 and deciding whether it may run."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from pydantic import ValidationError

from agent_reach import codec
from agent_reach.context import CallContext, RetryAllowance
from agent_reach.model import PROTOCOL, Envelope, problems_of
from agent_reach.ports import Clock
from agent_reach.serving.answers import Failed, refusal
from agent_reach.serving.dedupe import Key

__all__ = ["check_envelope", "context_of", "dedupe_key", "read_envelope"]


def read_envelope(body: bytes) -> tuple[Envelope | Failed, str | None]:
    """Decode a request; the second value is the request id to answer to, where one could be read."""
    try:
        raw: Any = codec.loads(body)
    except ValueError as error:
        return refusal(400, "InvalidPayload", f"the body isn't JSON: {error}"), None
    if not isinstance(raw, dict):
        return refusal(400, "InvalidPayload", "the body must be a JSON object"), None
    request_id = raw.get("request_id")
    response_to = request_id if isinstance(request_id, str) and len(request_id) <= 128 else None
    if raw.get("protocol") != PROTOCOL:
        message = f"this agent speaks {PROTOCOL}; the field 'protocol' must say so"
        return refusal(400, "ProtocolError", message), response_to
    try:
        return Envelope.model_validate(raw), response_to
    except ValidationError as error:
        problems = problems_of(error)
        told = "; ".join(f"{field}: {reason}" for field, reason in problems)
        return refusal(400, "InvalidPayload", f"the request is wrong: {told}", problems=problems), response_to


def check_envelope(
    envelope: Envelope, *, agent_id: str, namespace: str, hop_limit: int, is_offered: bool
) -> Failed | None:
    """Return why nothing may run, or None."""
    if envelope.namespace != namespace or envelope.target_agent != agent_id:
        return refusal(
            421,
            "Misdirected",
            f"this is {agent_id} in namespace {namespace!r}; the request means "
            f"{envelope.target_agent} in {envelope.namespace!r}",
            retryable=True,
        )
    if envelope.hop > hop_limit:
        return refusal(
            400,
            "HopLimitExceeded",
            f"call {envelope.hop} of a chain, and {hop_limit} is the limit: do agents call in a circle?",
        )
    if not is_offered:
        # The caller's index is behind; another instance may well have it.
        message = f"{agent_id} doesn't offer {envelope.target_capability!r}"
        return refusal(404, "UnknownCapability", message, retryable=True)
    return None


def context_of(envelope: Envelope, capability: str, deadline: float, clock: Clock) -> CallContext:
    """What the handler may know of the call."""
    return CallContext(
        request_id=envelope.request_id,
        trace_id=envelope.trace_id,
        from_agent=envelope.from_agent,
        capability=capability,
        deadline=deadline,
        context_id=envelope.context_id,
        attempt=envelope.attempt,
        hop=envelope.hop,
        idempotency_key=envelope.idempotency_key or envelope.request_id,
        metadata=envelope.metadata,
        retry_allowance=RetryAllowance(envelope.retry_allowance),
        now=clock.now,
    )


def dedupe_key(envelope: Envelope, capability: str) -> tuple[Key | None, bytes]:
    """Return the key and the payload's fingerprint; only a key that the caller chose asks for dedupe.

    The default is the request id. The fingerprint tells a repeat from another request that uses the key by mistake.
    """
    if envelope.idempotency_key is None or envelope.idempotency_key == envelope.request_id:
        return None, b""
    text = json.dumps(envelope.payload, sort_keys=True, separators=(",", ":"))
    return (envelope.from_agent, capability, envelope.idempotency_key), hashlib.sha256(text.encode()).digest()
