"""Setting a call up: its ids, its bytes, its time, and what its session must know. Nothing is sent yet."""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from agent_reach import codec
from agent_reach.config import ReachConfig
from agent_reach.context import CallContext, current_call
from agent_reach.dialing.exchange import OutgoingCall
from agent_reach.errors import DeadlineExceeded, HopLimitExceeded, InvalidPayload
from agent_reach.knowledge import Knowledge
from agent_reach.options import CallOptions
from agent_reach.routing.steps import CallPlan

__all__ = ["Planner"]


class Planner:
    """Sets calls of one client up."""

    def __init__(self, agent_id: str, namespace: str, *, knowledge: Knowledge, config: ReachConfig) -> None:
        self._agent_id = agent_id
        self._namespace = namespace
        self._knowledge = knowledge
        self._config = config

    def plan(
        self, call: OutgoingCall, options: CallOptions, started: float, left_s: float, preferred: tuple[str, ...]
    ) -> CallPlan:
        """Settle what the session needs to know; raise as `Knowledge.offered` if nobody offers it."""
        hedge = self._config.hedge if options.hedge is None else options.hedge or None
        if call.context_id is not None:
            # Nobody but its owner knows the conversation.
            hedge = None
        name, parent = call.target_capability, _caller()
        found = self._knowledge.offered(name, pinned=options.agent_id, request_id=call.request_id)
        return CallPlan.of(
            name,
            call.request_id,
            found.candidates,
            started=started,
            timeout_s=options.timeout,
            left_s=left_s,
            retry=options.retry or self._config.retry,
            timeouts=self._config.timeouts,
            allowance=None if parent is None else parent.retry_allowance,
            pinned=options.agent_id,
            preferred=preferred,
            strategy=options.strategy or self._config.strategy,
            hedge=hedge,
            context_id=call.context_id,
            require_context=options.require_context,
            trip_after=options.trip_after,
        )

    def outgoing(self, capability: str, options: CallOptions) -> OutgoingCall:
        """Say what stays the same over the call's attempts, ids and all; the payload is left out."""
        parent = _caller()
        inherited = parent.context_id if parent is not None else None
        return OutgoingCall(
            request_id=secrets.token_hex(16),
            trace_id=parent.trace_id if parent is not None else secrets.token_hex(16),
            from_agent=self._agent_id,
            namespace=self._namespace,
            target_capability=capability,
            hop=parent.hop + 1 if parent is not None else 1,
            idempotency_key=options.idempotency_key,
            context_id=options.context_id or inherited,
            metadata=dict(options.metadata or {}),
        )

    def encode(self, payload: Any, call: OutgoingCall) -> bytes:
        """Encode the payload; raise InvalidPayload if it is no object, has no JSON form or is too large."""
        limit = self._config.serving.max_body_bytes
        if payload is None:
            return b"{}"
        try:
            if isinstance(payload, BaseModel):
                payload = payload.model_dump(mode="json")
            if not isinstance(payload, Mapping) or not all(isinstance(key, str) for key in payload):
                problem = f"must be a dict with string keys or a pydantic model, not {type(payload).__name__}"
            else:
                body = codec.dumps(dict(payload))
                if len(body) <= limit:
                    return body
                problem = f"is {len(body)} bytes long, the limit is {limit} (ServingConfig.max_body_bytes)"
        except Exception as error:  # noqa: BLE001 - foreign code: a model's serialiser, or a mapping of the caller's
            problem = f"has no JSON form: {error}"
        raise InvalidPayload(
            f"the payload of {call.target_capability} {problem}. Nothing was sent",
            capability=call.target_capability,
            request_id=call.request_id,
        )

    def time_left(self, call: OutgoingCall) -> float:
        """Seconds that whoever called this agent has left; infinity for a root call.

        Raises DeadlineExceeded if that is none, HopLimitExceeded if the call tree is too deep.
        """
        parent = _caller()
        if parent is None:
            return math.inf
        about: dict[str, Any] = {"capability": call.target_capability, "request_id": call.request_id}
        if call.hop > self._config.hop_limit:
            raise HopLimitExceeded(
                f"{call.target_capability} would be hop {call.hop} of a call tree limited to "
                f"{self._config.hop_limit}: do two agents call each other in a circle?",
                **about,
            )
        if parent.time_left_s <= 0:
            raise DeadlineExceeded(
                f"{call.target_capability} was not called: whoever called this agent has no time left",
                phase="pick",
                **about,
            )
        return parent.time_left_s


def _caller() -> CallContext | None:
    """The call that is being served here and now; None outside, and in what a handler left running."""
    context = current_call.get()
    return None if context is None or context.serving.over else context
