"""The half of a client that is called: its ASGI app, its server, its registry entry, in the right order."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from typing import Any

from agent_reach.addresses import advertised_url, loopback_url
from agent_reach.errors import AgentIdInUse, ClientNotOpen, ConfigError
from agent_reach.events import RegistrationChanged
from agent_reach.handlers import HandlerSpec
from agent_reach.identity import Identity
from agent_reach.knowledge import Knowledge
from agent_reach.model import Endpoint
from agent_reach.ports import Registry
from agent_reach.registration import Registration
from agent_reach.registry.announcing import RegistrationState
from agent_reach.registry.memory import MemoryRegistry
from agent_reach.runtime import Runtime
from agent_reach.serving.asgi import ReachApp
from agent_reach.serving.drain import drain
from agent_reach.serving.signals import stop_signals
from agent_reach.serving.uvicorn_server import UvicornServer

__all__ = ["ServedAgent"]

# Turns of the loop that the news of a registration takes in process: about six; the rest is reserve.
_SETTLE_TURNS = 20


class ServedAgent:
    """Serves the handlers of one client. Does nothing, at no cost, for a client without handlers."""

    def __init__(
        self, identity: Identity, specs: tuple[HandlerSpec, ...], *, knowledge: Knowledge, runtime: Runtime
    ) -> None:
        self._identity = identity
        self._specs = specs
        self._knowledge = knowledge
        self._runtime = runtime
        self._registry: Registry | None = None
        self._app: ReachApp | None = None
        self._server: UvicornServer | None = None
        self._registration: Registration | None = None
        self._registering: asyncio.Task[None] | None = None
        self._is_mounted = False
        self._stop: asyncio.Event | None = None
        self.draining = False

    @property
    def registration(self) -> RegistrationState:
        """How our registry entry stands."""
        return RegistrationState() if self._registration is None else self._registration.state

    async def open(self, registry: Registry) -> None:
        """Begin to serve: on `listen`, mounted, or in this process; the entry follows once that answers.

        Raises ConfigError for a taken port, a missing extra, or handlers without an address.
        """
        self._registry = registry
        self._registration = None
        self._stop = None
        self.draining = False
        if not self._specs:
            return
        if self._is_mounted:
            self._start_mounted(registry)
        elif self._identity.listen is not None:
            await self._listen(self._identity.listen, registry)
        elif isinstance(registry, MemoryRegistry):
            await self._open_local(registry)
        elif self._identity.advertise is None:
            raise ConfigError(
                f"{self._identity.agent_id} has handlers but no address: pass listen='0.0.0.0:9101', or advertise= "
                "and mount asgi() in your application"
            )

    async def update(self, changes: Mapping[str, Any], timeout_s: float) -> None:
        """Change fields of our registry entry; see `ReachClient.update`."""
        self._require_handlers()
        if self._registration is None:
            raise ClientNotOpen(f"agent {self._identity.agent_id} isn't served yet, so it has no entry to change")
        await self._registration.update(changes, timeout_s)

    async def close(self) -> None:
        """Withdraw, stop the app and the server, and let `serve_forever` return. Running calls are cut;
        `serve_forever` lets them end before. Every step is taken, whatever the others come to.
        """
        registry, self._registry = self._registry, None
        server, self._server = self._server, None
        async with AsyncExitStack() as steps:
            if self._stop is not None:
                steps.callback(self._stop.set)
            if server is not None:
                steps.push_async_callback(server.stop, 0.0)
            if self._app is not None:
                steps.callback(self._leave_process, registry, self._app)
                steps.push_async_callback(self._app.stop)
                if not self._is_mounted:
                    self._app = None
            await self._withdraw()

    def _leave_process(self, registry: Registry | None, app: ReachApp) -> None:
        if isinstance(registry, MemoryRegistry) and registry.apps.get(self._local_url) is app:
            del registry.apps[self._local_url]

    def begin_anew(self, identity: Identity) -> None:
        """Serve as `identity`: in a forked child, for a client that isn't open. A mounted app stays where it is."""
        self._identity = identity
        if self._app is not None:
            self._app.begin_anew(identity.agent_id)

    # --- mounted -------------------------------------------------------------------------------------------

    def asgi(self, *, enter: Callable[[], Awaitable[object]], leave: Callable[[], Awaitable[object]]) -> ReachApp:
        """Return the app for a host; `enter` and `leave` open and close the client where it is served bare."""
        self._require_handlers()
        if self._identity.advertise is None:
            raise ConfigError(
                "asgi() needs advertise=, the URL under which peers reach the app, like "
                "advertise='http://10.0.0.7:8000/agents' (or AGENT_REACH_ADVERTISE)"
            )

        if self._is_mounted and self._app is not None:
            return self._app
        if self._registry is not None or self._identity.listen is not None:
            raise ConfigError(
                "asgi() is for a server of your own: call it before the client is opened, and leave listen= out"
            )

        async def startup() -> None:
            if self._registry is None:
                await enter()

        async def shutdown() -> None:
            await leave()

        self._is_mounted = True
        self._app = self._new_app(on_lifespan=(startup, shutdown))
        return self._app

    def _start_mounted(self, registry: Registry) -> None:
        assert self._app is not None
        assert self._identity.advertise is not None
        self._app.start()
        url = self._identity.advertise
        self._register(Endpoint(url=url), registry).once_answering(url)

    # --- in this process -----------------------------------------------------------------------------------

    @property
    def _local_url(self) -> str:
        # Neither name can hold a tilde, so no two agents share a url.
        return f"local://{self._identity.agent_id}~{self._identity.namespace}"

    async def _open_local(self, registry: MemoryRegistry) -> None:
        agent_id = self._identity.agent_id
        if self._local_url in registry.apps:
            raise AgentIdInUse(
                f"agent id {agent_id!r} in namespace {self._identity.namespace!r} is held by another open client "
                "of this process; give this one another agent_id",
                agent_id=agent_id,
            )
        self._app = self._new_app()
        self._app.start()
        registry.apps[self._local_url] = self._app
        await self._register(Endpoint(protocol="local", url=self._local_url), registry).now()
        # Word of us reaches the other clients on this loop within a few turns of it.
        for _ in range(_SETTLE_TURNS):
            await asyncio.sleep(0)

    # --- listening -----------------------------------------------------------------------------------------

    async def _listen(self, listen: str, registry: Registry) -> None:
        self._app = self._new_app()
        server = self._server = UvicornServer(self._app, listen)
        await server.start()
        self._app.start()
        url = self._identity.advertise or advertised_url(
            server.host, server.port, registry_address=registry.address
        )
        registration = self._register(Endpoint(url=url), registry)
        self._registering = registration.once_answering(loopback_url(server.host, server.port))

    async def serve_forever(self) -> None:
        """Serve until SIGTERM or SIGINT, then drain. Raises what makes serving pointless, as a taken agent id."""
        self._require_handlers()
        if self._server is None or self._app is None or self._registering is None:
            raise ConfigError(
                "serve_forever() needs listen='host:port' (or AGENT_REACH_LISTEN), like '0.0.0.0:9101'"
            )
        if self._stop is not None:
            raise ConfigError("serve_forever() was called already: it serves, or has drained; open the client anew")
        stop, hurry = asyncio.Event(), asyncio.Event()
        app, server = self._app, self._server
        self._stop = stop
        with stop_signals(stop, hurry):
            stopped = asyncio.ensure_future(stop.wait())
            try:
                await asyncio.wait({stopped, self._registering}, return_when=asyncio.FIRST_COMPLETED)
                refused = self.registration.status == "refused"
                if refused and self.registration.error is not None and not stop.is_set():
                    raise copy.copy(self.registration.error)
                await stopped
            finally:
                stopped.cancel()
            if self._registry is None:
                return  # closed by other code, which has done all of this
            self.draining = True
            self._runtime.emit(
                RegistrationChanged(
                    agent_id=self._identity.agent_id,
                    status="draining",
                    detail=f"leaving within {self._runtime.config.serving.drain_s:g} s; a second signal hurries",
                )
            )
            await drain(
                app=app,
                withdraw=self._withdraw,
                stop_server=server.stop,
                clock=self._runtime.clock,
                config=self._runtime.config.serving,
                hurry=hurry,
            )

    # --- parts ---------------------------------------------------------------------------------------------

    async def _withdraw(self) -> None:
        if self._registration is not None:
            await self._registration.withdraw()

    def _register(self, endpoint: Endpoint, registry: Registry) -> Registration:
        if self._registry is None:
            raise ClientNotOpen(f"ReachClient {self._identity.agent_id} was closed while it was being opened")
        assert self._app is not None
        self._registration = Registration(
            self._identity,
            self._specs,
            endpoint,
            self._app.incarnation,
            registry=registry,
            knowledge=self._knowledge,
            runtime=self._runtime,
        )
        return self._registration

    def _require_handlers(self) -> None:
        if not self._specs:
            raise ConfigError("there is nothing to serve: pass handlers=[...] to ReachClient")

    def _new_app(
        self, on_lifespan: tuple[Callable[[], Awaitable[None]], Callable[[], Awaitable[None]]] | None = None
    ) -> ReachApp:
        return ReachApp(
            agent_id=self._identity.agent_id,
            namespace=self._identity.namespace,
            specs=self._specs,
            config=self._runtime.config.serving,
            hop_limit=self._runtime.config.hop_limit,
            clock=self._runtime.clock,
            emit=self._runtime.emit,
            on_lifespan=on_lifespan,
        )
