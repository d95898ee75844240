"""From the bytes of a request to the bytes of its answer: checks, admission, dedupe, the handler, its time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from agent_reach import codec
from agent_reach.config import ServingConfig
from agent_reach.context import CallContext, current_call
from agent_reach.errors import InvalidPayload, InvalidReply
from agent_reach.events import CallServed, Event
from agent_reach.handlers import HandlerSpec
from agent_reach.model import PING, Envelope, ErrorInfo, LoadReport
from agent_reach.ports import Clock
from agent_reach.routing.budget import RetryAllowance
from agent_reach.routing.names import alias_target
from agent_reach.serving.admission import Admission, Full
from agent_reach.serving.answers import (
    Done,
    Failed,
    Response,
    Result,
    clean,
    encode,
    handler_failed,
    invalid_payload,
    out_of_time,
    refusal,
    stopped,
)
from agent_reach.serving.dedupe import Dedupe, Finished, Key, Run
from agent_reach.serving.requests import check_envelope, context_of, dedupe_key, read_envelope

__all__ = ["Dispatcher"]

# A day. Longer is no deadline, and a number without bound would overflow the timer.
_LONGEST_TTL_MS = 24 * 3600 * 1000


@dataclass(frozen=True, slots=True)
class _Served:
    spec: HandlerSpec
    admission: Admission


class Dispatcher:
    """Answers requests of reach/1 for one agent. `state` is starting, accepting, draining or stopped for good.

    `load` in an answer is that of the capability asked for, and so is "overloaded" as `state`; where no
    capability is known it is the whole agent's.
    """

    def __init__(
        self,
        *,
        agent_id: str,
        incarnation: str,
        namespace: str,
        specs: Iterable[HandlerSpec],
        config: ServingConfig,
        hop_limit: int,
        clock: Clock,
        emit: Callable[[Event], None],
    ) -> None:
        self.state = "starting"
        self._agent_id = agent_id
        self._pong = Done(codec.dumps({"incarnation": incarnation}))
        self._namespace = namespace
        self._config = config
        self._hop_limit = hop_limit
        self._clock = clock
        self._emit = emit
        self._dedupe = Dedupe(ttl_s=config.dedupe_ttl_s, entries=config.dedupe_entries, clock=clock)
        self._served: dict[str, _Served] = {}
        self._aliases: dict[str, str] = {}
        for spec in specs:
            info = spec.info
            queue = config.queue_factor * (spec.max_running or 0) if spec.queue is None else spec.queue
            admission = Admission(max_concurrency=spec.max_running, queue=queue, clock=clock)
            self._served[info.name] = _Served(spec, admission)
            self._aliases |= {alias_target(info.name, alias): info.name for alias in info.soft_aliases}
        self._stopped = asyncio.Event()
        self._runs: set[Run] = set()
        self._requests = 0
        self._idle: set[asyncio.Future[None]] = set()

    # --- for the owner -------------------------------------------------------------------------------------

    @property
    def in_flight(self) -> int:
        """Requests that are `counted`, and handlers that still run although nobody waits for them."""
        return self._requests + sum(run.waiters == 0 for run in self._runs)

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Count one request as in flight, from before its body is read."""
        self._requests += 1
        try:
            yield
        finally:
            self._requests -= 1
            self._tell_idle()

    async def wait_idle(self, timeout_s: float) -> bool:
        """Wait until nothing is in flight; False if that took longer than `timeout_s` seconds."""
        if not self.in_flight:
            return True
        idle = asyncio.get_running_loop().create_future()
        timer = asyncio.ensure_future(self._clock.sleep(timeout_s))
        self._idle.add(idle)
        try:
            await asyncio.wait({idle, timer}, return_when=asyncio.FIRST_COMPLETED)
            return not self.in_flight
        finally:
            self._idle.discard(idle)
            timer.cancel()

    async def stop(self, cleanup_s: float) -> None:
        """Answer 503 from now on and cancel what runs; what doesn't end within `cleanup_s` is left behind.

        Returns at once if it was called before.
        """
        if self.state == "stopped":
            return
        self.state = "stopped"
        self._stopped.set()
        own = asyncio.current_task()
        tasks = [run.task for run in self._runs if run.task is not None and run.task is not own]
        for task in tasks:
            task.cancel()
        if tasks:
            _, stubborn = await asyncio.wait(tasks, timeout=cleanup_s)
            for task in stubborn:
                task.cancel()  # the second one leaves a thread behind (see HandlerSpec.invoke)

    # --- one request ---------------------------------------------------------------------------------------

    def respond(self, result: Result, *, response_to: str | None = None, close: bool = False) -> Response:
        """Write an answer to what is no call of a capability."""
        loads = [served.admission.load for served in self._served.values()]
        load = LoadReport(in_flight=sum(one.in_flight for one in loads), queued=sum(one.queued for one in loads))
        return encode(
            result,
            agent_id=self._agent_id,
            response_to=response_to,
            state=self.state,
            load=load,
            close=close or self.state == "draining",
        )

    async def answer(self, body: bytes, *, received: float, gone: Callable[[], Awaitable[None]]) -> Response | None:
        """Answer one request that was `received` then (by the clock). None: `gone` returned, nobody listens.

        Cancellation, like a caller that is gone, cancels the handler.
        """
        envelope, response_to = read_envelope(body)
        if isinstance(envelope, Failed):
            return self.respond(envelope, response_to=response_to)
        if envelope.target_capability == PING:
            return self.respond(self._check(envelope, is_offered=True) or self._pong, response_to=response_to)
        name = self._aliases.get(envelope.target_capability, envelope.target_capability)
        served = self._served.get(name)
        purse = RetryAllowance(envelope.retry_allowance)
        try:
            result = await self._result(envelope, served, purse, received, gone)
        except asyncio.CancelledError:
            self._report(envelope, None, received)
            raise
        self._report(envelope, result, received)
        if result is None:
            return None
        if served is None:
            return self.respond(result, response_to=response_to)
        overloaded = self.state == "accepting" and served.admission.is_full
        return encode(
            result,
            agent_id=self._agent_id,
            response_to=response_to,
            state="overloaded" if overloaded else self.state,
            load=served.admission.load,
            deprecated=name != envelope.target_capability,
            close=self.state == "draining",
            retry_allowance=purse.left,
        )

    def _check(self, envelope: Envelope, *, is_offered: bool) -> Failed | None:
        return check_envelope(
            envelope,
            agent_id=self._agent_id,
            namespace=self._namespace,
            hop_limit=self._hop_limit,
            is_offered=is_offered,
        )

    async def _result(
        self,
        envelope: Envelope,
        served: _Served | None,
        purse: RetryAllowance,
        received: float,
        gone: Callable[[], Awaitable[None]],
    ) -> Result | None:
        refused = self._check(envelope, is_offered=served is not None)
        if refused is not None or served is None:
            return refused
        deadline = received + min(envelope.ttl_ms, _LONGEST_TTL_MS) / 1000
        if self._clock.now() >= deadline:
            return refusal(504, "DeadlineExceeded", "the caller's time was up on arrival", retryable=True)
        context = context_of(envelope, served.spec.info.name, deadline, purse, self._clock)
        try:
            arguments = served.spec.bind(envelope.payload, context)
        except InvalidPayload as error:
            return invalid_payload(error, served.spec.input_schema.get("properties", {}))
        except Exception as error:  # noqa: BLE001 - the boundary: a model's validator is the user's code
            return handler_failed(error, idempotent=served.spec.info.idempotent, executed=False)
        return await self._wait(envelope, served, context, arguments, gone)

    async def _wait(
        self,
        envelope: Envelope,
        served: _Served,
        context: CallContext,
        arguments: Mapping[str, Any],
        gone: Callable[[], Awaitable[None]],
    ) -> Result | None:
        """Wait for the handler, the caller's deadline or the caller's leaving, whichever comes first."""
        info = served.spec.info
        key, fingerprint = dedupe_key(envelope, info.name)
        time_up = asyncio.ensure_future(self._clock.sleep(context.deadline - self._clock.now()))
        leaving = asyncio.ensure_future(gone())
        # A handler that ignores its cancellation keeps its task, but not its caller, and not our exit.
        stopping = asyncio.ensure_future(self._stopped.wait())
        try:
            while True:
                run = self._dedupe.find(key) if key is not None else None
                if run is not None and run.fingerprint != fingerprint:
                    reason = "used before with another payload"
                    problems = (("idempotency_key", reason),)
                    return refusal(422, "InvalidPayload", f"idempotency_key: {reason}", problems=problems)
                if isinstance(run, Finished):
                    return run.result
                if run is None:
                    run = self._begin(key, fingerprint, envelope, served, context, arguments)
                # A repeat that joins waits for its own time, but the handler's context keeps the first caller's
                # deadline (and retries): what it calls may run out of time although the repeat has some left.
                assert run.task is not None
                run.waiters += 1
                try:
                    ends = {run.task, time_up, leaving, stopping}
                    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    run.leave()
                if run.task.done() and not run.task.cancelled():
                    return run.task.result()
                if leaving.done():
                    return None
                if time_up.done():
                    # Where others still wait, a run that is in the queue now will be executed none the less.
                    executing = run.executing or run.waiters > 0
                    ttl_s = envelope.ttl_ms / 1000
                    return out_of_time(info.name, ttl_s, idempotent=info.idempotent, executing=executing)
                if stopping.done():
                    return stopped(self._agent_id, info.name, idempotent=info.idempotent, executing=run.executing)
                if not run.abandoned:
                    # Cancelled by the application (a "cancel job" of its own) or by itself: it ran, and failed.
                    error = asyncio.CancelledError("the handler's task was cancelled")
                    return handler_failed(error, idempotent=info.idempotent)
                # A run that others had given up ended just after we joined it: run anew.
        finally:
            for waiting in (time_up, leaving, stopping):
                waiting.cancel()

    def _begin(
        self,
        key: Key | None,
        fingerprint: bytes,
        envelope: Envelope,
        served: _Served,
        context: CallContext,
        arguments: Mapping[str, Any],
    ) -> Run:
        run = Run(fingerprint)

        def ended(run: Run) -> None:
            self._runs.discard(run)
            assert run.task is not None
            # Only Ctrl-C gets here as an exception. It ends the loop by itself; asking for it keeps asyncio from
            # complaining that nobody did.
            failed = run.task.cancelled() or run.task.exception() is not None
            if key is not None:
                self._dedupe.end(key, run, None if failed else run.task.result())
            self._tell_idle()

        run.start(self._execute(run, envelope, served, context, arguments), ended)
        self._runs.add(run)
        if key is not None:
            self._dedupe.begin(key, run)
        return run

    async def _execute(
        self, run: Run, envelope: Envelope, served: _Served, context: CallContext, arguments: Mapping[str, Any]
    ) -> Result:
        try:
            permit = await served.admission.enter()
        except Full as full:
            message = f"{envelope.target_capability} is at its limit on {self._agent_id}, and its queue is full"
            return refusal(503, "Overloaded", message, retryable=True, retry_after_ms=full.retry_after_ms)
        try:
            run.executing = True
            current_call.set(context)
            returned = await served.spec.invoke(arguments)
            data = self._encode(returned, served.spec)
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            # Raised by the handler itself, as by a task of its own that was cancelled: a failure like others.
            return handler_failed(error, idempotent=served.spec.info.idempotent)
        except KeyboardInterrupt:
            raise  # a person wants the process to stop
        except BaseException as error:  # noqa: BLE001 - the boundary: sys.exit() in a handler must not end the agent
            return handler_failed(error, idempotent=served.spec.info.idempotent)
        finally:
            context.serving.over = True
            permit.release()
        return Done(data) if isinstance(data, bytes) else data

    def _encode(self, returned: Any, spec: HandlerSpec) -> bytes | Failed:
        """Encode what the handler returned; it ran, so what doesn't fit is told as a failure of its own kind."""
        try:
            data = spec.encode(returned)
        except InvalidReply as error:
            # The message may quote the result; the caller, who is to have it, is told.
            problem, detail = error.message, "the result doesn't fit its annotation or has no JSON form"
        else:
            if len(data) <= self._config.max_body_bytes:
                return data
            problem = detail = f"the result has {len(data)} bytes, the limit is {self._config.max_body_bytes}"
        return Failed(500, ErrorInfo(type="InvalidResult", message=clean(problem), executed=True), detail=detail)

    # --- how it ended --------------------------------------------------------------------------------------

    def _report(self, envelope: Envelope, result: Result | None, received: float) -> None:
        cause: BaseException | None = None
        match result:
            case None:
                name, detail = "Disconnected", "the caller left before the answer"
            case Done():
                name, detail = "ok", ""
            case Failed():
                name, detail, cause = result.error.type, result.detail, result.cause
        self._emit(
            CallServed(
                request_id=envelope.request_id,
                trace_id=envelope.trace_id,
                from_agent=envelope.from_agent,
                target_capability=envelope.target_capability,
                agent_id=self._agent_id,
                attempt=envelope.attempt,
                elapsed_ms=(self._clock.now() - received) * 1000,
                outcome=name,
                detail=detail,
                error=cause,
            )
        )

    def _tell_idle(self) -> None:
        # In this order: at the end of every request, and hardly ever does anyone wait.
        if self._idle and not self.in_flight:
            for idle in self._idle:
                if not idle.done():
                    idle.set_result(None)
