"""The ASGI app of an agent: `/invoke`, `/health`, `/ready`, `/capabilities`."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from typing import Any, TypeAlias

from agent_reach import codec
from agent_reach.config import ServingConfig
from agent_reach.events import Event, RegistrationChanged
from agent_reach.handlers import HandlerSpec
from agent_reach.model import ErrorInfo
from agent_reach.ports import Clock
from agent_reach.serving.answers import Failed, Response, refusal
from agent_reach.serving.dispatch import Dispatcher

__all__ = ["ReachApp"]

_log = logging.getLogger("agent_reach.serving")

Scope: TypeAlias = MutableMapping[str, Any]
Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
Hook: TypeAlias = Callable[[], Awaitable[None]]

# Time for cancelled handlers to clean up when the app stops; the process is about to end.
_CLEANUP_S = 1.0

_METHODS = {"/invoke": ("POST",), "/health": ("GET", "HEAD"), "/ready": ("GET", "HEAD"), "/capabilities": ("GET",)}


class ReachApp:
    """Serves the handlers `specs`; mountable under any prefix of a host application.

    It refuses work with 503 `NotStarted` until its owner calls `start`: a mounted app gets no lifespan of its
    own, and answering before being registered would hide that. Served bare, the lifespan runs `on_lifespan`
    (startup, shutdown), by default `start` and `stop`. No error of a handler leaves it: in process, too, errors
    are answers.

    `loop` is the event loop that `start` was called on. The app, its queues and its handlers belong to it: who
    calls from another one, as `LocalDialer` does, must bring the call there. A stopped app may be started again,
    on another loop too; `incarnation` is that of the first start only.
    """

    def __init__(
        self,
        *,
        agent_id: str,
        namespace: str,
        specs: Iterable[HandlerSpec],
        config: ServingConfig,
        hop_limit: int,
        clock: Clock,
        emit: Callable[[Event], None],
        incarnation: str | None = None,
        on_lifespan: tuple[Hook, Hook] | None = None,
    ) -> None:
        self.loop: asyncio.AbstractEventLoop | None = None
        self._agent_id = agent_id
        self._namespace = namespace
        self._specs = tuple(specs)
        self._config = config
        self._hop_limit = hop_limit
        self._clock = clock
        self._emit = emit
        self._complained = False
        self._on_lifespan = on_lifespan or (self._start, self.stop)
        self._renew(secrets.token_hex(8) if incarnation is None else incarnation)

    def _renew(self, incarnation: str) -> None:
        """Make what lives from one start to the next: queues, remembered answers, what is told of this start."""
        self._identity = {"agent_id": self._agent_id, "incarnation": incarnation, "namespace": self._namespace}
        described = [_described(spec) for spec in self._specs]
        self._capabilities = codec.dumps({**self._identity, "capabilities": described})
        self._dispatcher = Dispatcher(
            agent_id=self._agent_id,
            incarnation=incarnation,
            namespace=self._namespace,
            specs=self._specs,
            config=self._config,
            hop_limit=self._hop_limit,
            clock=self._clock,
            emit=self._emit,
        )

    # --- for the owner -------------------------------------------------------------------------------------

    @property
    def state(self) -> str:
        """`starting`, `accepting`, `draining` or `stopped`."""
        return self._dispatcher.state

    @property
    def incarnation(self) -> str:
        """New at every start, and told by `/health`, `/ready`, `/capabilities` and the ping."""
        return self._identity["incarnation"]

    @property
    def in_flight(self) -> int:
        """Requests being received or answered, and handlers that still run although their caller is gone."""
        return self._dispatcher.in_flight

    def start(self) -> None:
        """Accept calls from now on, on the running event loop; started before, under a new incarnation.

        Nothing of the start before is kept, as after a restart of the process. Without a `stop` in between, on the
        same loop, it goes on as it was.
        """
        loop = asyncio.get_running_loop()
        # An earlier loop may have ended without a stop; what waited there never ends.
        if self.state == "stopped" or self.loop not in (None, loop):
            self._renew(secrets.token_hex(8))
        self.loop = loop
        self._dispatcher.state = "accepting"

    def begin_anew(self, agent_id: str) -> None:
        """Be the app of `agent_id` under a new incarnation; for one that was never started in this process."""
        self._agent_id = agent_id
        self._complained = False
        self._renew(secrets.token_hex(8))

    def begin_drain(self) -> None:
        """Say `draining` in every answer and in `/ready`; calls are still accepted."""
        if self.state == "accepting":
            self._dispatcher.state = "draining"

    async def wait_idle(self, timeout_s: float) -> bool:
        """Wait until nothing is in flight; False if that took longer than `timeout_s` seconds."""
        return await self._dispatcher.wait_idle(timeout_s)

    async def stop(self, cleanup_s: float = _CLEANUP_S) -> None:
        """Cancel what still runs and answer 503 from now on. Takes `cleanup_s` seconds at most.

        Call `begin_drain` and `wait_idle` before to let running calls end.
        """
        await self._dispatcher.stop(cleanup_s)

    async def _start(self) -> None:
        self.start()

    # --- ASGI ----------------------------------------------------------------------------------------------

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection scope: http, lifespan; a websocket is closed."""
        match scope["type"]:
            case "http":
                await self._serve(scope, receive, send)
            case "lifespan":
                await self._lifespan(receive, send)
            case "websocket":
                await send({"type": "websocket.close", "code": 1008, "reason": "reach/1 is plain HTTP"})
            case _:
                return

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            response = await self._respond(scope, receive)
        except Exception:  # noqa: BLE001 - a bug of ours; in process, too, an error must look as on the wire
            _log.exception("answering %s failed", scope.get("path"))
            error = ErrorInfo(type="InternalError", message="the agent failed; its log says why", executed=True)
            response = self._dispatcher.respond(Failed(500, error))
        if response is None:
            return
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(response.body))]
        if response.close:
            headers.append((b"connection", b"close"))
        if response.allow is not None:
            headers.append((b"allow", response.allow.encode()))
        try:
            await send({"type": "http.response.start", "status": response.status, "headers": headers})
            await send({"type": "http.response.body", "body": response.body})
        except Exception as error:  # noqa: BLE001 - servers differ in what they raise for a caller that is gone
            _log.debug("an answer couldn't be sent: %r", error)

    async def _respond(self, scope: Scope, receive: Receive) -> Response | None:
        received = self._clock.now()
        path = _path_of(scope)
        headers: dict[bytes, bytes] = dict(scope["headers"])
        allowed = _METHODS.get(path)
        if allowed is None:
            return self._refuse(404, "NotFound", f"no {path}; this agent has {', '.join(_METHODS)}")
        if scope["method"] not in allowed:
            refused = self._refuse(405, "MethodNotAllowed", f"{path} takes {' or '.join(allowed)}")
            return Response(refused.status, refused.body, refused.close, allow=", ".join(allowed))
        if b"origin" in headers:
            # Agents never send it; browsers do, and a page of anybody's could else call an agent on localhost.
            return self._refuse(403, "Forbidden", "requests from web pages are refused")
        match path:
            case "/health":
                return Response(200, codec.dumps({"status": "ok", **self._identity}))
            case "/ready":
                status = 200 if self.state == "accepting" else 503
                return Response(status, codec.dumps({"status": self.state, **self._identity}))
            case "/capabilities":
                return Response(200, self._capabilities)
            case _:
                return await self._invoke(headers, receive, received)

    async def _invoke(self, headers: Mapping[bytes, bytes], receive: Receive, received: float) -> Response | None:
        # To its end a request belongs to the start that it came to, though the app may be started anew meanwhile.
        dispatcher = self._dispatcher
        with dispatcher.counted():
            refused = self._unless_serving(dispatcher) or self._unless_plain_json(headers)
            if refused is not None:
                return refused
            body = await self._read_body(headers, receive)
            if body is None or isinstance(body, Response):
                return body
            # A body may take long; a handler that began after the stop would be neither waited for nor cancelled.
            refused = self._unless_serving(dispatcher)
            if refused is not None:
                return refused
            return await dispatcher.answer(body, received=received, gone=lambda: _gone(receive))

    def _unless_serving(self, dispatcher: Dispatcher) -> Response | None:
        if dispatcher.state not in ("starting", "stopped"):
            return None
        text = (
            f"{self._agent_id} isn't serving ({dispatcher.state}): its ReachClient must be open. A "
            "mounted app has no lifespan of its own; enter the client in the host's lifespan"
        )
        if dispatcher.state == "starting" and not self._complained:
            # Nobody may ever look at the answers of an agent that isn't registered.
            self._complained = True
            self._emit(RegistrationChanged(agent_id=self._agent_id, status="waiting", detail=text))
        return dispatcher.respond(refusal(503, "NotStarted", text, retryable=True), close=True)

    def _unless_plain_json(self, headers: Mapping[bytes, bytes]) -> Response | None:
        if headers.get(b"content-type", b"").partition(b";")[0].strip().lower() != b"application/json":
            return self._refuse(415, "UnsupportedMediaType", "the content-type must be application/json")
        if headers.get(b"content-encoding", b"identity").strip().lower() != b"identity":
            return self._refuse(415, "UnsupportedMediaType", "a content-encoding isn't accepted: send plain JSON")
        return None

    async def _read_body(self, headers: Mapping[bytes, bytes], receive: Receive) -> bytes | Response | None:
        """Read the body within the bound; None if the caller left meanwhile."""
        most = self._config.max_body_bytes
        announced = headers.get(b"content-length", b"")
        chunks: list[bytes] = []
        size = int(announced) if announced.isdigit() and len(announced) < 20 else 0
        if size <= most:
            size = 0
            while size <= most:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return None
                chunk = message.get("body", b"")
                size += len(chunk)
                chunks.append(chunk)
                if not message.get("more_body", False):
                    break
        if size > most:
            return self._refuse(413, "PayloadTooLarge", f"the body is larger than {most} bytes")
        return b"".join(chunks)

    def _refuse(self, status: int, kind: str, message: str, *, retryable: bool = False) -> Response:
        # Whatever of the body wasn't read would be taken for the next request: the connection is done.
        return self._dispatcher.respond(refusal(status, kind, message, retryable=retryable), close=True)

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        startup, shutdown = self._on_lifespan
        while True:
            message = await receive()
            phase = message["type"]
            try:
                await (startup() if phase == "lifespan.startup" else shutdown())
            except Exception as error:  # noqa: BLE001 - told to the server, which then stops
                _log.exception("%s failed", phase)
                await send({"type": f"{phase}.failed", "message": f"{type(error).__name__}: {error}"})
                return
            await send({"type": f"{phase}.complete"})
            if phase == "lifespan.shutdown":
                return


async def _gone(receive: Receive) -> None:
    """Return when the caller hung up."""
    try:
        message = await receive()
    except Exception as error:  # noqa: BLE001 - a middleware in between may raise anything; the deadline still holds
        _log.debug("watching for a disconnect failed: %r", error)
    else:
        if message["type"] == "http.disconnect":
            return
    # A middleware that hides disconnects may answer anything, at once and for ever: asking again would spin.
    await asyncio.get_running_loop().create_future()


def _path_of(scope: Scope) -> str:
    """The path below the mount point; some frameworks leave the prefix in `path`, others take it out."""
    path: str = scope["path"]
    prefix: str = scope.get("root_path", "").rstrip("/")
    return path[len(prefix) :] if prefix and path.startswith(f"{prefix}/") else path


def _described(spec: HandlerSpec) -> dict[str, Any]:
    return {
        **spec.info.model_dump(mode="json"),
        "input_schema": dict(spec.input_schema),
        "output_schema": dict(spec.output_schema),
    }
