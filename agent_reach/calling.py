"""THE call loop: do what the session says, tell it how that went. Decisions are made in routing/session.py."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any, assert_never

from pydantic import ValidationError

from agent_reach.attempting import Attempts
from agent_reach.dialing.exchange import OutgoingCall, interpret
from agent_reach.errors import (
    ClientNotOpen,
    ConfigError,
    InvalidPayload,
    InvalidReply,
    OutcomeUnknown,
    ReachError,
)
from agent_reach.events import BreakerChanged, CallEnded, OutageChanged
from agent_reach.knowledge import Knowledge
from agent_reach.model import problems_of
from agent_reach.options import CallOptions, adapter_of
from agent_reach.places import Places
from agent_reach.planning import Planner
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
        self._knowledge = knowledge
        self._planner = Planner(agent_id, namespace, knowledge=knowledge, config=runtime.config)
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
        call = self._planner.outgoing(name, options)
        session: CallSession | None = None
        outcome = "Cancelled"
        try:
            call = replace(call, payload_json=self._planner.encode(payload, call))
            left_s = self._planner.time_left(call)
            await self._knowledge.discover(
                left_s if options.timeout is None else min(left_s, options.timeout),
                capability=name,
                request_id=call.request_id,
            )
            preferred = () if route is None else tuple(view.agent_id for view in route.candidates)
            plan = self._planner.plan(call, options, started, left_s, preferred)
            session = CallSession(plan, self._knowledge.router)
            reply = await self._run(session, call, plan)
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
        call = self._planner.outgoing(name, options)
        self._planner.encode(payload, call)
        left_s = self._planner.time_left(call)
        await self._knowledge.discover(
            left_s if options.timeout is None else min(left_s, options.timeout),
            capability=name,
            request_id=call.request_id,
        )
        now = self._clock.now()
        plan = self._planner.plan(call, options, now, left_s, ())

        async def ask(agent_id: str) -> Outcome[Any]:
            try:
                return Outcome(agent_id, reply=await self.call(name, payload, replace(options, agent_id=agent_id)))
            except ReachError as error:
                return Outcome(agent_id, error=error)

        async with asyncio.TaskGroup() as group:
            asked = [group.create_task(ask(one)) for one in distinct(plan, self._knowledge.router, n, now)]
        return [task.result() for task in asked]

    async def _run(self, session: CallSession, call: OutgoingCall, plan: CallPlan) -> Reply[Any]:
        def ended() -> None:
            self._tell_changes(session, call.target_capability)
            self._places.freed()

        attempts = Attempts(session, lambda send: self._attempt(send, call), self._clock, ended)
        try:
            return await self._follow(session, attempts, call, plan)
        finally:
            await attempts.cancel()

    async def _follow(
        self, session: CallSession, attempts: Attempts, call: OutgoingCall, plan: CallPlan
    ) -> Reply[Any]:
        # Those who can go to the same instances wait in one queue; who comes while others wait goes behind them.
        queue = (call.target_capability, plan.pinned)
        woken = False
        now = self._clock.now()
        outage = self._knowledge.router.shared(call.target_capability).outage
        # Those who wait for the end of an outage are in nobody's way who doesn't.
        impatient = plan.retry.patience_s <= 0 and outage.wait_s(now) > 0
        if self._places.crowded(queue) and not impatient and now < plan.deadline:
            woken = await self._places.wait(queue, min(self._config.timeouts.connect_s, plan.deadline - now))
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
                        elapsed_s=self._clock.now() - plan.started,
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

    async def _fall_back(
        self, fallback: Callable[[ReachError], Any], error: ReachError, call: OutgoingCall, started: float
    ) -> Reply[Any]:
        data = fallback(error)
        if inspect.isawaitable(data):
            data = await data
        elapsed_s = self._clock.now() - started
        return Reply(data, "", call.request_id, error.attempts, elapsed_s, from_fallback=True)

    # --- telling ---------------------------------------------------------------------------------------------

    def _tell_changes(self, session: CallSession, capability: str) -> None:
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

        for state in session.take_outages():
            self._emit(OutageChanged(capability=capability, status=state.value))

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
