"""Reading a request of reach/1 and deciding whether it may run."""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any

from pydantic import ValidationError

from agent_reach import codec
from agent_reach.context import CallContext
from agent_reach.model import PROTOCOL, Envelope, problems_of
from agent_reach.ports import Clock
from agent_reach.routing.budget import RetryAllowance
from agent_reach.serving.answers import Failed, refusal
from agent_reach.serving.dedupe import Key

__all__ = ["check_envelope", "context_of", "dedupe_key", "read_envelope"]

# Names and ids are logged and shown. With a line break in one a caller could forge a log line, with an escape
# sequence or a change of writing direction dress one up: C0 and C1 controls, line separators, bidi controls.
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")
_IDS = (
    "request_id",
    "from_agent",
    "namespace",
    "target_capability",
    "target_agent",
    "idempotency_key",
    "context_id",
)


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
        envelope = Envelope.model_validate(raw)
        problems = tuple(
            (name, "control characters aren't allowed")
            for name in _IDS
            if _CONTROL.search(getattr(envelope, name) or "")
        )
    except ValidationError as error:
        problems = problems_of(error)
    if not problems:
        return envelope, response_to
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


def context_of(
    envelope: Envelope, capability: str, deadline: float, purse: RetryAllowance, clock: Clock
) -> CallContext:
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
        retry_allowance=purse,
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
