"""The half of a client that is called: its ASGI app, its registry entry, its server, in the right order."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable
from typing import Any

from agent_reach import codec
from agent_reach.addresses import advertised_url, loopback_url
from agent_reach.config import ReachConfig
from agent_reach.errors import AgentIdInUse, ClientNotOpen, ConfigError, ReachError, SchemaConflict
from agent_reach.events import ContractClash, Event, RegistrationChanged
from agent_reach.handlers import HandlerSpec
from agent_reach.identity import Identity
from agent_reach.knowledge import Knowledge
from agent_reach.model import AgentInfo, Endpoint
from agent_reach.ports import Answer, Clock, Dialer, DialRequest, Registry
from agent_reach.registry.announcing import Announcer, RegistrationState
from agent_reach.registry.memory import MemoryRegistry
from agent_reach.serving.asgi import ReachApp
from agent_reach.serving.drain import drain
from agent_reach.serving.signals import stop_signals
from agent_reach.serving.uvicorn_server import UvicornServer

__all__ = ["ServedAgent"]

# Closing must not wait for an etcd that is down; the entry then ends with its lease.
_WITHDRAW_S = 1.5
# How often the app is asked whether it answers yet, and after how long somebody is told that it doesn't.
_PROBE_EVERY_S = 0.1
_PROBE_COMPLAINT_S = 10.0
# Turns of the loop that a list, or the news of a registration, takes in process: about six; the rest is reserve.
_SETTLE_TURNS = 20


class ServedAgent:
    """Serves the handlers of one client. Does nothing, at no cost, for a client without handlers."""

    def __init__(
        self,
        identity: Identity,
        specs: tuple[HandlerSpec, ...],
        *,
        knowledge: Knowledge,
        dialer_for: Callable[[str], Dialer],
        config: ReachConfig,
        clock: Clock,
        rng: random.Random,
        emit: Callable[[Event], None],
    ) -> None:
        self._identity = identity
        self._specs = specs
        self._registry: Registry | None = None
        self._knowledge = knowledge
        self._dialer_for = dialer_for
        self._config = config
        self._clock = clock
        self._rng = rng
        self._emit = emit
        self._app: ReachApp | None = None
        self._announcer: Announcer | None = None
        self._announcing: asyncio.Task[None] | None = None
        self._is_mounted = False
        self._refusal: RegistrationState | None = None
        self.draining = False

    @property
    def registration(self) -> RegistrationState:
        """How our registry entry stands."""
        if self._refusal is not None:
            return self._refusal
        return RegistrationState() if self._announcer is None else self._announcer.state

    async def open(self, registry: Registry) -> None:
        """Serve in this process at once where that needs no socket: on a memory registry, or mounted."""
        self._registry = registry
        self._refusal = None
        self.draining = False
        if not self._specs:
            return
        if self._is_mounted:
            self._start_mounted()
        elif self._identity.listen is None:
            await self._open_local(registry)

    async def close(self) -> None:
        """Withdraw from the registry and stop the app. Running calls are cut: `serve_forever` drains before."""
        registry, self._registry = self._registry, None
        if self._announcing is not None:
            self._announcing.cancel()
            await asyncio.gather(self._announcing, return_exceptions=True)
            self._announcing = None
        await self._withdraw()
        if self._app is not None:
            await self._app.stop()
            if isinstance(registry, MemoryRegistry) and registry.apps.get(self._local_url) is self._app:
                del registry.apps[self._local_url]
            if not self._is_mounted:
                self._app = None

    # --- mounted -------------------------------------------------------------------------------------------

    def asgi(self, *, enter: Callable[[], Awaitable[object]], leave: Callable[[], Awaitable[object]]) -> ReachApp:
        """Return the app for a host; `enter` and `leave` open and close the client where it is served bare."""
        self._require_handlers()
        if self._identity.advertise is None:
            raise ConfigError(
                "asgi() needs advertise=, the URL under which peers reach the app, like "
                "advertise='http://10.0.0.7:8000/agents' (or AGENT_REACH_ADVERTISE)"
            )

        async def startup() -> None:
            if self._registry is None:
                await enter()

        async def shutdown() -> None:
            await leave()

        self._is_mounted = True
        if self._app is None:
            self._app = self._new_app(on_lifespan=(startup, shutdown))
        if self._registry is not None:
            self._start_mounted()
        return self._app

    def _start_mounted(self) -> None:
        assert self._app is not None
        assert self._identity.advertise is not None
        self._app.start()
        url = self._identity.advertise
        self._announcing = asyncio.get_running_loop().create_task(self._announce_mounted(url))

    async def _announce_mounted(self, url: str) -> None:
        """Register in the background; what the owner of `serve_forever` would be raised, `state` tells here."""
        try:
            await self._announce_when_answering(url, url)
        except ReachError as error:
            self._refusal = RegistrationState("refused", error.message, self._clock.now(), error)
            self._emit(
                RegistrationChanged(agent_id=self._identity.agent_id, status="refused", detail=error.message)
            )

    # --- in this process -----------------------------------------------------------------------------------

    @property
    def _local_url(self) -> str:
        return f"local://{self._identity.agent_id}.{self._identity.namespace}"

    async def _open_local(self, registry: Registry) -> None:
        agent_id = self._identity.agent_id
        if not isinstance(registry, MemoryRegistry):
            if self._identity.advertise is None:
                raise ConfigError(
                    f"{agent_id} has handlers but no address: pass listen='0.0.0.0:9101' and await "
                    "serve_forever(), or advertise= and mount asgi() in your application"
                )
            return
        if self._local_url in registry.apps:
            raise AgentIdInUse(
                f"agent id {agent_id!r} in namespace {self._identity.namespace!r} is held by another open client "
                "of this process; give this one another agent_id",
                agent_id=agent_id,
            )
        # A memory registry answers at once: these turns of the loop bring the first list, and those below bring
        # word of us to the other clients on this loop.
        await _turns()
        self._check_contracts()
        self._app = self._new_app()
        self._app.start()
        registry.apps[self._local_url] = self._app
        await self._new_announcer(Endpoint(protocol="local", url=self._local_url)).first_attempt()
        await _turns()

    # --- serving -------------------------------------------------------------------------------------------

    async def serve_forever(self) -> None:
        """Listen, register once `/invoke` answers, serve until told to stop, drain."""
        self._require_handlers()
        listen = self._identity.listen
        if listen is None:
            raise ConfigError(
                "serve_forever() needs listen='host:port' (or AGENT_REACH_LISTEN), like '0.0.0.0:9101'"
            )
        app = self._app = self._new_app()
        server = UvicornServer(app, listen)
        await server.start()
        app.start()
        stop, hurry = asyncio.Event(), asyncio.Event()
        try:
            url = self._identity.advertise or advertised_url(
                server.host, server.port, registry_address=self._require_registry().address
            )
            with stop_signals(stop, hurry):
                await self._serve_until(stop, url, loopback_url(server.host, server.port))
                self.draining = True
                await drain(
                    app=app,
                    withdraw=self._withdraw,
                    stop_server=server.stop,
                    clock=self._clock,
                    config=self._config.serving,
                    hurry=hurry,
                )
        finally:
            await server.stop(0.0)

    async def _serve_until(self, stop: asyncio.Event, url: str, probe_url: str) -> None:
        """Return when `stop` is set; raise what makes serving pointless, such as a taken agent id."""
        stopped = asyncio.ensure_future(stop.wait())
        announcing = asyncio.ensure_future(self._announce_when_answering(url, probe_url))
        try:
            await asyncio.wait({stopped, announcing}, return_when=asyncio.FIRST_COMPLETED)
            if announcing.done():
                announcing.result()
            await stopped
        finally:
            for task in (stopped, announcing):
                task.cancel()
            await asyncio.gather(stopped, announcing, return_exceptions=True)

    async def _announce_when_answering(self, url: str, probe_url: str) -> None:
        """Register once the app answers at `probe_url` as this very agent; return when that is settled.

        Raises AgentIdInUse if another live process holds the id, SchemaConflict where the policy refuses.
        """
        started = self._clock.now()
        complained = False
        while not await self._answers(probe_url):
            if not complained and self._clock.now() - started > _PROBE_COMPLAINT_S:
                complained = True
                detail = f"{probe_url}/invoke doesn't answer as this agent yet; is the app mounted there?"
                self._emit(RegistrationChanged(agent_id=self._identity.agent_id, status="waiting", detail=detail))
            await self._clock.sleep(_PROBE_EVERY_S)
        # If the registry can't be asked, there is nothing to compare with, and the announcer says so.
        with contextlib.suppress(ReachError):
            await self._knowledge.discover(self._config.timeouts.discovery_s)
        self._check_contracts()
        announcer = self._new_announcer(Endpoint(url=url))
        while announcer.state.status != "registered":
            try:
                await announcer.wait_registered(3600.0)
            except (AgentIdInUse, ConfigError):
                raise
            except ReachError:
                # The announcer never gives up and says so in `state`; neither do we.
                await self._clock.sleep(_PROBE_EVERY_S)

    async def _answers(self, url: str) -> bool:
        """True if `/invoke` at `url` is served by this very process: an empty request is refused in our name."""
        request = DialRequest(
            url=f"{url}/invoke",
            headers={"content-type": "application/json"},
            body=b"{}",
            timeout_s=2.0,
            connect_timeout_s=1.0,
            max_reply_bytes=64 * 1024,
        )
        result = await self._dialer_for(url).send(request)
        if not isinstance(result, Answer):
            return False
        try:
            body: Any = codec.loads(result.body)
        except ValueError:
            return False
        return isinstance(body, dict) and body.get("agent_id") == self._identity.agent_id

    # --- parts ---------------------------------------------------------------------------------------------

    def _require_registry(self) -> Registry:
        if self._registry is None:
            raise ClientNotOpen(f"ReachClient {self._identity.agent_id} was closed while it was starting to serve")
        return self._registry

    def _require_handlers(self) -> None:
        if not self._specs:
            raise ConfigError("there is nothing to serve: pass handlers=[...] to ReachClient")

    def _new_app(
        self, on_lifespan: tuple[Callable[[], Awaitable[None]], Callable[[], Awaitable[None]]] | None = None
    ) -> ReachApp:
        return ReachApp(
            agent_id=self._identity.agent_id,
            incarnation=self._identity.incarnation,
            namespace=self._identity.namespace,
            specs=self._specs,
            config=self._config.serving,
            hop_limit=self._config.hop_limit,
            clock=self._clock,
            emit=self._emit,
            on_lifespan=on_lifespan,
        )

    def _new_announcer(self, endpoint: Endpoint) -> Announcer:
        record = self._record(endpoint)
        self._announcer = Announcer(
            self._require_registry(),
            lambda: record,
            config=self._config.registry,
            clock=self._clock,
            rng=self._rng,
            emit=self._emit,
        )
        self._announcer.start()
        return self._announcer

    def _record(self, endpoint: Endpoint) -> AgentInfo:
        first = self._specs[0]
        return AgentInfo(
            agent_id=self._identity.agent_id,
            incarnation=self._identity.incarnation,
            name=self._identity.name,
            namespace=self._identity.namespace,
            version=first.agent_version,
            endpoint=endpoint,
            health_check_url=f"{endpoint.url}/health",
            zone=self._identity.zone,
            weight=first.weight,
            registered_at=self._clock.wall(),
            metadata=first.metadata,
            capabilities=tuple(spec.info for spec in self._specs),
        )

    def _check_contracts(self) -> None:
        """Compare our contracts with those of live instances of the same names, as `schema_policy` says."""
        if self._config.registry.schema_policy == "ignore":
            return
        for spec in self._specs:
            for other in self._knowledge.index.lookup(spec.info.name).candidates:
                theirs = other.capability
                if theirs.name != spec.info.name or theirs.schema_hash in (None, spec.info.schema_hash):
                    continue
                if self._config.registry.schema_policy == "refuse":
                    raise SchemaConflict(
                        f"{spec.info.name} of {self._identity.agent_id} has another schema than that of the live "
                        f"{other.agent_id}: raise the major version, or set schema_policy='warn'",
                        capability=spec.info.name,
                    )
                self._emit(
                    ContractClash(
                        capability=spec.info.name,
                        agent_id=self._identity.agent_id,
                        other_agent_id=other.agent_id,
                    )
                )

    async def _withdraw(self) -> None:
        if self._announcer is not None:
            await self._announcer.withdraw(_WITHDRAW_S)


async def _turns() -> None:
    """Give every task that can run its turn, a few times over."""
    for _ in range(_SETTLE_TURNS):
        await asyncio.sleep(0)
