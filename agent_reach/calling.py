"""THE call loop: do what the session says, tell it how that went. Decisions are made in routing/session.py."""

from __future__ import annotations

import asyncio
import inspect
import math
import secrets
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, assert_never

from pydantic import BaseModel, ValidationError

from agent_reach import codec
from agent_reach.attempting import Attempts
from agent_reach.context import CallContext, current_call
from agent_reach.dialing.exchange import OutgoingCall, interpret
from agent_reach.errors import (
    ClientNotOpen,
    ConfigError,
    DeadlineExceeded,
    HopLimitExceeded,
    InvalidPayload,
    InvalidReply,
    OutcomeUnknown,
    ReachError,
)
from agent_reach.events import BreakerChanged, CallEnded
from agent_reach.knowledge import Knowledge
from agent_reach.model import problems_of
from agent_reach.options import CallOptions, adapter_of
from agent_reach.places import Places
from agent_reach.reply import Outcome, Reply
from agent_reach.routing import outcomes
from agent_reach.routing.choosing import distinct
from agent_reach.routing.explain import Route
from agent_reach.routing.names import check_capability
from agent_reach.routing.session import CallSession
from agent_reach.routing.steps import Await, CallPlan, Raise, Return, Send, Wait
from agent_reach.runtime import Runtime

__all__ = ["Caller"]

# Room for what surrounds a payload or a result: ids, metadata, load.
_ENVELOPE_BYTES = 64 * 1024


class Caller:
    """Makes calls for one client."""

    def __init__(self, agent_id: str, namespace: str, *, knowledge: Knowledge, runtime: Runtime) -> None:
        self._agent_id = agent_id
        self._namespace = namespace
        self._knowledge = knowledge
        self._dialer_for = runtime.dialer_for
        self._config = runtime.config
        self._clock = runtime.clock
        self._emit = runtime.emit
        self._places = Places(runtime.clock)

    async def call(self, capability: str | Route, payload: Any, options: CallOptions) -> Reply[Any]:
        """Carry out one call, as `ReachClient.call` promises."""
        started = self._clock.now()
        route = capability if isinstance(capability, Route) else None
        name = check_capability(route.capability if route is not None else capability)
        call = self._outgoing(name, options)
        session: CallSession | None = None
        outcome = "Cancelled"
        try:
            call = replace(call, payload_json=self._encode(payload, call))
            left_s = self._time_left(call)
            await self._knowledge.discover(
                left_s if options.timeout is None else min(left_s, options.timeout),
                capability=name,
                request_id=call.request_id,
            )
            preferred = () if route is None else tuple(view.agent_id for view in route.candidates)
            plan = self._plan(call, options, started, left_s, preferred)
            session = CallSession(plan, self._knowledge.router)
            reply = await self._run(session, call, started, pinned=options.agent_id)
            if options.response_model is not None:
                reply = _typed(reply, options.response_model, call)
            outcome = "ok"
            return reply
        except ReachError as error:
            outcome = type(error).__name__
            if options.fallback is None or isinstance(error, ConfigError | ClientNotOpen | InvalidPayload):
                raise
            return await self._fall_back(options.fallback, error, call, started)
        except Exception as error:
            outcome = type(error).__name__
            raise
        finally:
            self._call_ended(call, session, started, outcome)

    async def fan_out(self, capability: str, payload: Any, n: int, options: CallOptions) -> list[Outcome[Any]]:
        """Carry out one call to each of several instances, as `ReachClient.fan_out` promises."""
        if not isinstance(n, int) or isinstance(n, bool) or n < 1:
            raise ConfigError(f"n={n!r} must be a whole number >= 1: how many instances to ask")
        name = check_capability(capability)
        call = self._outgoing(name, options)
        self._encode(payload, call)
        left_s = self._time_left(call)
        await self._knowledge.discover(
            left_s if options.timeout is None else min(left_s, options.timeout),
            capability=name,
            request_id=call.request_id,
        )
        now = self._clock.now()
        plan = self._plan(call, options, now, left_s, ())

        async def ask(agent_id: str) -> Outcome[Any]:
            try:
                return Outcome(agent_id, reply=await self.call(name, payload, replace(options, agent_id=agent_id)))
            except ReachError as error:
                return Outcome(agent_id, error=error)

        async with asyncio.TaskGroup() as group:
            asked = [group.create_task(ask(one)) for one in distinct(plan, self._knowledge.router, n, now)]
        return [task.result() for task in asked]

    async def _run(
        self, session: CallSession, call: OutgoingCall, started: float, *, pinned: str | None
    ) -> Reply[Any]:
        def ended() -> None:
            self._tell_breakers(session, call.target_capability)
            self._places.freed()

        attempts = Attempts(session, lambda send: self._attempt(send, call), self._clock, ended)
        try:
            return await self._follow(session, attempts, call, started, pinned=pinned)
        finally:
            await attempts.cancel()

    async def _follow(
        self, session: CallSession, attempts: Attempts, call: OutgoingCall, started: float, *, pinned: str | None
    ) -> Reply[Any]:
        # Those who can go to the same instances wait in one queue; who comes while others wait goes behind them.
        queue = (call.target_capability, pinned)
        woken = False
        if self._places.crowded(queue):
            woken = await self._places.wait(queue, self._config.timeouts.connect_s)
        while True:
            step = session.next(self._clock.now())
            if woken and not (isinstance(step, Wait) and step.until_place):
                # It goes, so there may be room for more; or it ends, and the place is the next one's.
                self._places.freed()
            match step:
                case Send():
                    woken = False
                    await attempts.begin(step)
                case Await(longest_s):
                    await attempts.wait(longest_s)
                case Wait(seconds, until_place=True):
                    woken = await self._places.wait(queue, seconds, again=woken)
                case Wait(seconds):
                    await self._clock.sleep(seconds)
                case Return(reply, tried):
                    return Reply(
                        data=reply.data,
                        agent_id=reply.agent_id,
                        request_id=call.request_id,
                        attempts=tried,
                        elapsed_s=self._clock.now() - started,
                        deprecated=reply.deprecated,
                        stale=self._knowledge.stale,
                    )
                case Raise(error):
                    if self._knowledge.closed and not isinstance(error, OutcomeUnknown):
                        text = f"the client was closed while it called {call.target_capability}"
                        raise ClientNotOpen(
                            text,
                            capability=call.target_capability,
                            request_id=call.request_id,
                            attempts=session.attempts,
                        )
                    raise error
                case _:
                    assert_never(step)

    async def _attempt(self, send: Send, call: OutgoingCall) -> outcomes.Outcome:
        request = call.attempt(
            send,
            wall=self._clock.wall(),
            connect_timeout_s=self._config.timeouts.connect_s,
            # A result of the largest size comes in an envelope.
            max_reply_bytes=self._config.serving.max_body_bytes + _ENVELOPE_BYTES,
        )
        result = await self._dialer_for(request.url).send(request)
        return interpret(
            result,
            request_id=call.request_id,
            agent_id=send.candidate.agent_id,
            wall=self._clock.wall(),
        )

    # --- setting a call up -----------------------------------------------------------------------------------

    def _plan(
        self, call: OutgoingCall, options: CallOptions, started: float, left_s: float, preferred: tuple[str, ...]
    ) -> CallPlan:
        """Settle what the session needs to know; raise as `Knowledge.offered` if nobody offers it."""
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
            hedge=options.hedge or self._config.hedge,
            context_id=call.context_id,
            require_context=options.require_context,
            trip_after=options.trip_after,
        )

    def _outgoing(self, capability: str, options: CallOptions) -> OutgoingCall:
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

    def _encode(self, payload: Any, call: OutgoingCall) -> bytes:
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

    def _time_left(self, call: OutgoingCall) -> float:
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

    async def _fall_back(
        self, fallback: Callable[[ReachError], Any], error: ReachError, call: OutgoingCall, started: float
    ) -> Reply[Any]:
        data = fallback(error)
        if inspect.isawaitable(data):
            data = await data
        elapsed_s = self._clock.now() - started
        return Reply(data, "", call.request_id, error.attempts, elapsed_s, from_fallback=True)

    # --- telling ---------------------------------------------------------------------------------------------

    def _tell_breakers(self, session: CallSession, capability: str) -> None:
        now = self._clock.now()
        for agent_id, change in session.take_transitions():
            self._emit(
                BreakerChanged(
                    agent_id=agent_id,
                    capability=capability,
                    before=change.before.value,
                    after=change.after.value,
                    reason=change.reason,
                    retry_in_s=None if change.until is None else change.until - now,
                )
            )

    def _call_ended(self, call: OutgoingCall, session: CallSession | None, started: float, outcome: str) -> None:
        attempts = session.attempts if session is not None else ()
        last = session.last if session is not None and outcome != "ok" else None
        self._emit(
            CallEnded(
                request_id=call.request_id,
                trace_id=call.trace_id,
                from_agent=call.from_agent,
                target_capability=call.target_capability,
                agent_id=attempts[-1].agent_id if attempts else None,
                attempt=len(attempts),
                elapsed_ms=(self._clock.now() - started) * 1000,
                outcome=outcome,
                detail="" if last is None else outcomes.brief(last),
            )
        )


def _caller() -> CallContext | None:
    """The call that is being served here and now; None outside, and in what a handler left running."""
    context = current_call.get()
    return None if context is None or context.serving.over else context


def _typed(reply: Reply[Any], response_model: Any, call: OutgoingCall) -> Reply[Any]:
    """Check the data against what the caller expects, and convert it."""
    try:
        data = adapter_of(response_model).validate_python(reply.data)
    except ValidationError as error:
        problems = "; ".join(f"{field}: {reason}" for field, reason in problems_of(error))
        raise InvalidReply(
            f"{reply.agent_id} answered {call.target_capability}, but not as response_model expects: {problems}",
            capability=call.target_capability,
            request_id=call.request_id,
            attempts=reply.attempts,
        ) from None
    return replace(reply, data=data)
