"""`ReachClient`: what users hold. Its parts do the work: knowledge, caller, served agent."""

from __future__ import annotations

import asyncio
import logging
import os
import random
from collections.abc import Iterable, Mapping
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Self

from agent_reach.asking import Asking
from agent_reach.calling import Caller
from agent_reach.config import ReachConfig
from agent_reach.dialing.httpx_dialer import HttpxDialer
from agent_reach.dialing.local import LocalDialer
from agent_reach.errors import ClientNotOpen, ConfigError, ReachError
from agent_reach.events import Event
from agent_reach.forks import leave_loop, note_use, on_fork
from agent_reach.handlers import default_name, specs_of
from agent_reach.home import Home, end_of_program
from agent_reach.identity import identify
from agent_reach.knowledge import Knowledge
from agent_reach.observability.logs import LogObserver
from agent_reach.ports import Clock, Dialer, Observer, Registry, SystemClock
from agent_reach.registry.memory import MemoryRegistry
from agent_reach.registry.urls import open_registry
from agent_reach.reply import ClientState
from agent_reach.runtime import Runtime
from agent_reach.served import ServedAgent
from agent_reach.serving.asgi import ReachApp

__all__ = ["ReachClient"]

_log = logging.getLogger("agent_reach.calls")


class ReachClient(Asking):
    """One agent's way to the others: finds them in the registry, calls them, and serves its own handlers.

    Use it as `async with ReachClient(...) as reach`. `agent_id` names this instance (default: `name` and eight
    random hex digits); `registry` is a URL (`etcd://host:2379`, `memory://NAME`) or a `Registry`; `handlers` are
    what `@register_agent` decorated; `listen` is `host:port`, `advertise` the URL that peers dial. Arguments
    left out come from AGENT_REACH_AGENT_ID, _REGISTRY, _NAMESPACE, _LISTEN, _ADVERTISE and _ZONE.

    `clock` and `rng` are for tests: time turned by hand, randomness with a seed.

    Raises ConfigError for a bad argument.
    """

    def __init__(
        self,
        agent_id: str | None = None,
        *,
        name: str | None = None,
        registry: Registry | str | None = None,
        namespace: str | None = None,
        handlers: Iterable[object] = (),
        listen: str | None = None,
        advertise: str | None = None,
        zone: str | None = None,
        config: ReachConfig | None = None,
        dialer: Dialer | None = None,
        observers: Iterable[Observer] = (),
        clock: Clock | None = None,
        rng: random.Random | None = None,
    ) -> None:
        specs = specs_of(handlers, name=name)
        self._identity = identify(
            agent_id=agent_id,
            name=name,
            default_name=default_name(specs),
            namespace=namespace,
            registry=registry if isinstance(registry, str) else None,
            listen=listen,
            advertise=advertise,
            zone=zone,
        )
        wanted = registry if registry is not None else self._identity.registry
        if wanted is None:
            raise ConfigError(
                "no registry: pass registry='etcd://127.0.0.1:2379' or 'memory://test', or set AGENT_REACH_REGISTRY"
            )
        self._config = config or ReachConfig()
        self._registry = open_registry(wanted, self._config.registry, clock)
        # Ours to close, and to open anew if this client is entered again.
        self._registry_url = wanted if isinstance(wanted, str) else None
        self._clock = clock or _clock_of(self._registry)
        self._observers: tuple[Observer, ...] = (LogObserver(), *observers)
        self._local = LocalDialer(self._registry.apps) if isinstance(self._registry, MemoryRegistry) else None
        self._dialer: Dialer = dialer or HttpxDialer()
        self._owns_dialer = dialer is None
        self._owns_rng = rng is None
        runtime = Runtime(self._config, self._clock, rng or random.Random(), self._emit, self._dialer_for)
        self._runtime = runtime
        self._knowledge = Knowledge(self.namespace, runtime, zone=self._identity.zone)
        self._caller = Caller(self.agent_id, self.namespace, knowledge=self._knowledge, runtime=runtime)
        self._served = ServedAgent(self._identity, specs, knowledge=self._knowledge, runtime=runtime)
        self._home: Home | None = None
        self._opening: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._registry_is_spent = False
        on_fork(self, ReachClient._in_child)

    def __repr__(self) -> str:
        what = f"{len(self._knowledge.index)} instances known" if self._home is not None else "closed"
        return f"<ReachClient {self.agent_id} in {self.namespace!r}: {what}>"

    @property
    def agent_id(self) -> str:
        """This instance's id. A generated one is another in a forked child that got this client unopened."""
        return self._identity.agent_id

    @property
    def namespace(self) -> str:
        """The namespace that this client announces to and calls in."""
        return self._identity.namespace

    # --- life cycle ----------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        if self._home is not None:
            if self._home.pid != os.getpid():
                self._require_home()
            raise ClientNotOpen(f"{self.agent_id} is open already: enter a client once, or make a second one")
        if self._registry_is_spent and self._registry_url is not None:
            self._registry = open_registry(self._registry_url, self._config.registry, self._clock)
            self._registry_is_spent = False
        note_use(self._registry.address)
        self._home = Home.here()
        self._opening = asyncio.get_running_loop().create_task(self._open_parts())
        try:
            await self._opening
        except BaseException:
            await self.aclose()
            raise
        return self

    async def _open_parts(self) -> None:
        await self._knowledge.open(self._registry)
        await self._served.open(self._registry)

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Withdraw, stop watching, close connections. Safe to call twice, and finished even if it is cancelled."""
        if self._home is None:
            return
        if self._home.pid != os.getpid():
            # All that could be closed is the parent's, sockets and threads alike: leave it alone.
            return
        self._require_home()
        if self._closing is None:
            self._closing = asyncio.get_running_loop().create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        if self._opening is not None and not self._opening.done():
            # Both would have their hands on the same parts.
            self._opening.cancel()
            await asyncio.wait([self._opening])
        try:
            async with AsyncExitStack() as steps:
                if self._registry_url is not None:
                    steps.callback(self._registry.close)
                if self._owns_dialer:
                    steps.push_async_callback(self._dialer.aclose)
                steps.push_async_callback(self._knowledge.close)
                await self._served.close()
        finally:
            self._registry_is_spent = True
            self._home = self._closing = self._opening = None

    def _in_child(self) -> None:
        """Take note of a fork, in the child.

        A client that was open belongs to the parent, and stays closed here. One that wasn't (made while a server
        loads its application, before it forks its workers) becomes an agent of its own.
        """
        if self._home is not None:
            leave_loop(self._home.loop)
            return
        self._identity = self._identity.for_child()
        self._caller = Caller(self.agent_id, self.namespace, knowledge=self._knowledge, runtime=self._runtime)
        self._served.begin_anew(self._identity)
        self._registry_is_spent = True
        if self._owns_rng:
            # Or all workers would draw alike: the same instances, and the same pauses.
            self._runtime.rng.seed()

    def asgi(self) -> ReachApp:
        """Return the ASGI app that serves the handlers, to mount in FastAPI or Starlette or to run bare.

        Bare, it opens and closes this client with the server's lifespan. Mounted, the host's lifespan does:
        `async with reach: yield`. It needs `advertise=`, the URL under which peers reach the app.
        """
        return self._served.asgi(enter=self.__aenter__, leave=self.aclose)

    async def serve_forever(self) -> None:
        """Serve until SIGTERM or SIGINT, then drain; a second signal hurries.

        Listening began when the client was opened; the registry entry appears once `/invoke` answers, and goes
        first when draining. Raises AgentIdInUse if another live process holds the agent id, SchemaConflict where
        the settings refuse a clash.
        """
        self._require_open()
        await self._served.serve_forever()

    async def update(
        self, *, metadata: Mapping[str, str] | None = None, weight: float | None = None, timeout: float = 5.0
    ) -> None:
        """Change what this agent says of itself in the registry; returns once it is written there.

        Only what is given changes, `metadata` as a whole; the entry keeps its lease and never leaves the registry
        meanwhile. An agent that isn't registered yet says it with its registration, and this returns at once.

        Raises ConfigError for a bad value; RegistryUnavailable after `timeout` seconds, AgentIdInUse, Unauthorized
        or Forbidden, and then it is written as soon as that is possible.
        """
        self._require_open()
        given = {"metadata": metadata, "weight": weight}
        await self._served.update({k: v for k, v in given.items() if v is not None}, timeout)

    def run(self) -> None:
        """Open, `serve_forever`, close; for a program that does nothing else.

        Raises SystemExit with the error's message in one line where that fails, ConfigError in a running loop.
        """

        async def main() -> None:
            async with self:
                await self.serve_forever()
            await end_of_program()

        if asyncio._get_running_loop() is not None:
            raise ConfigError("run() makes an event loop of its own; inside one, await serve_forever()")
        try:
            asyncio.run(main())
        except ReachError as error:
            raise SystemExit(f"{type(error).__name__}: {error}") from None

    @property
    def state(self) -> ClientState:
        """How this client stands: connected, registered, draining, age of its knowledge, last registry error."""
        self._require_open()
        view, registration = self._knowledge.view, self._served.registration
        return ClientState(
            agent_id=self.agent_id,
            connected=view.connected,
            registered=registration.status == "registered",
            draining=self._served.draining,
            registry=view.status,
            registration=registration.status,
            index_age_s=self._knowledge.age_s,
            instances=len(self._knowledge.index),
            skipped=view.skipped,
            registry_error=registration.error or view.error,
            registration_detail=registration.detail,
        )

    # --- inside ----------------------------------------------------------------------------------------------

    def _require_open(self) -> None:
        if self._home is None or self._closing is not None:
            raise ClientNotOpen(
                f"ReachClient {self.agent_id} isn't open: use it inside `async with ReachClient(...) as reach:`"
            )
        self._require_home()

    def _require_home(self) -> None:
        if self._home != Home.here():
            raise ClientNotOpen(
                f"ReachClient {self.agent_id} is used in another process, event loop or thread than where it was "
                "opened, and where its watch and its connections live: open one in each (after a fork, in each "
                "worker; in plain threads, a SyncReachClient)"
            )

    def _dialer_for(self, url: str) -> Dialer:
        return self._local if self._local is not None and url.startswith("local://") else self._dialer

    def _emit(self, event: Event) -> None:
        for observer in self._observers:
            try:
                observer.on_event(event)
            except Exception:  # noqa: BLE001 - foreign code: its bug must not fail a call or the heartbeat
                _log.exception("observer %r failed on %s", observer, type(event).__name__)


def _clock_of(registry: Registry) -> Clock:
    """A memory registry's own clock, so that turning it turns its clients too; else the machine's."""
    return registry.clock if isinstance(registry, MemoryRegistry) else SystemClock()
