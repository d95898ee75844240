"""What this client knows of the others: the index, kept current by the watcher, and questions to it."""

from __future__ import annotations

import copy
import secrets

from agent_reach.errors import ClientNotOpen, Forbidden, ReachError, RegistryUnavailable, Unauthorized
from agent_reach.model import AgentInfo
from agent_reach.ports import Registry
from agent_reach.registry.hosting import Signal
from agent_reach.registry.watching import Watcher, WatchView
from agent_reach.routing import failures
from agent_reach.routing.explain import Route, explain
from agent_reach.routing.index import Change, Lookup
from agent_reach.routing.names import near_names
from agent_reach.routing.router import Router
from agent_reach.runtime import Runtime

__all__ = ["Knowledge"]


class Knowledge:
    """The index with its watcher. Used on one event loop only."""

    def __init__(self, namespace: str, runtime: Runtime, *, zone: str | None = None) -> None:
        self._namespace = namespace
        self._runtime = runtime
        self._address = ""
        self._watcher: Watcher | None = None
        self._changed = Signal()
        self.router = Router(runtime.config, runtime.rng, zone=zone, age_s=lambda: self.age_s)
        self.index = self.router.index

    @property
    def view(self) -> WatchView:
        """How the watch stands."""
        return WatchView() if self._watcher is None else self._watcher.view

    @property
    def closed(self) -> bool:
        """True before `open` and after `close`."""
        return self._watcher is None

    @property
    def stale(self) -> bool:
        """True while the registry doesn't confirm what we know."""
        return self.view.status != "fresh"

    @property
    def age_s(self) -> float | None:
        """Seconds since the registry last proved what we know; None before the first proof."""
        proof_at = self.view.proof_at
        return None if proof_at is None else max(0.0, self._runtime.clock.now() - proof_at)

    async def open(self, registry: Registry) -> None:
        """Begin to watch, and return when the first list is there or has failed.

        Raises what made it fail where the settings say that this is fatal.
        """
        self._address = registry.address
        self._watcher = Watcher(
            registry,
            self._namespace,
            apply=self._apply,
            config=self._runtime.config.registry,
            clock=self._runtime.clock,
            rng=self._runtime.rng,
            emit=self._runtime.emit,
        )
        self._watcher.start()
        await self._watcher.first_attempt()
        if self._runtime.config.registry.on_unavailable == "fail":
            await self._watcher.wait_loaded(self._runtime.config.timeouts.discovery_s)

    async def close(self) -> None:
        """Stop watching, and forget what was known: nobody would keep it current."""
        watcher, self._watcher = self._watcher, None
        # Whoever waits for an agent is told at once, and not when its time is up.
        self._changed.fire()
        try:
            if watcher is not None:
                await watcher.stop()
        finally:
            self.index.clear()

    async def discover(self, timeout_s: float, **call: str) -> None:
        """Wait for the first list of agents; every caller of a cold start shares it.

        Raises RegistryUnavailable, Unauthorized or Forbidden, carrying the call's keywords, after `timeout_s`.
        """
        if self._watcher is None or self.view.status != "starting":
            return
        try:
            await self._watcher.wait_loaded(min(timeout_s, self._runtime.config.timeouts.discovery_s))
        except ReachError as error:
            self._require_open()
            error.capability, error.request_id = call.get("capability"), call.get("request_id")
            raise

    def offered(self, capability: str, *, pinned: str | None, request_id: str) -> Lookup:
        """Return who offers `capability`.

        Raises AgentNotFound if nobody does, or not the one instance asked for; RegistryUnavailable if nothing
        is known because the registry can't be asked, Unauthorized or Forbidden if it refuses us.
        """
        self._require_open()
        found = self.index.lookup(capability)
        if found.candidates and (pinned is None or any(c.agent_id == pinned for c in found.candidates)):
            return found
        call: failures.Call = {"capability": capability, "request_id": request_id, "attempts": ()}
        if not found.candidates and self.view.status in ("starting", "expired"):
            if isinstance(self.view.error, Unauthorized | Forbidden):
                # Not empty, and not down: it is ours to read once somebody grants it.
                refused = copy.copy(self.view.error)
                refused.capability, refused.request_id = capability, request_id
                raise refused
            reason = f": {self.view.error}" if self.view.error else ""
            text = f"nothing is known of {capability}: the registry {self._address} can't be asked{reason}"
            raise RegistryUnavailable(text, endpoints=(self._address,), **call)
        raise failures.not_found(
            call,
            namespace=self._namespace,
            near=near_names(capability, self.index.capabilities),
            pinned=pinned,
            known=len(found.candidates),
            stale_s=self.age_s if self.stale else None,
        )

    async def wait_for(self, capability: str, timeout_s: float) -> tuple[AgentInfo, ...]:
        """Return the instances of `capability` as soon as there is one; after `timeout_s` raise as `offered`."""

        def settled() -> tuple[AgentInfo, ...] | None:
            return self.agents(capability) or (() if self._watcher is None else None)

        found = await self._changed.wait_for(settled, self._runtime.clock, timeout_s)
        self._require_open()
        if not found:
            self.offered(capability, pinned=None, request_id=secrets.token_hex(16))
            return self.agents(capability)
        return found

    def agents(self, capability: str | None) -> tuple[AgentInfo, ...]:
        """The instances known now: all, or those that answer for one capability."""
        if capability is None:
            return tuple(instance.info for instance in self.index.instances.values())
        return tuple(c.instance.info for c in self.index.lookup(capability).candidates)

    def explain(self, capability: str, context_id: str | None = None) -> Route:
        """What a call would see now; with `context_id`, a call of that conversation."""
        return explain(
            capability,
            self.router,
            context_id=context_id,
            now=self._runtime.clock.now(),
            stale=self.stale,
            age_s=self.age_s,
        )

    def _require_open(self) -> None:
        if self._watcher is None:
            raise ClientNotOpen("the client was closed meanwhile: use it inside its `async with` only")

    def _apply(self, change: Change) -> None:
        self.index.apply(change, self._runtime.clock.now())
        self._changed.fire()
