"""From "the app is up" to "the entry is in the registry", and out again."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from agent_reach.dialing.exchange import OutgoingCall, interpret
from agent_reach.dialing.httpx_dialer import HttpxDialer
from agent_reach.errors import ConfigError, ReachError, SchemaConflict
from agent_reach.events import ContractClash, RegistrationChanged
from agent_reach.handlers import HandlerSpec
from agent_reach.identity import Identity
from agent_reach.knowledge import Knowledge
from agent_reach.model import PING, AgentInfo, Endpoint, problems_of
from agent_reach.ports import Registry
from agent_reach.registry.announcing import Announcer, RegistrationState
from agent_reach.routing.outcomes import Succeeded
from agent_reach.runtime import Runtime

__all__ = ["Registration"]

# Closing must not wait for an etcd that is down; the entry then ends with its lease.
_WITHDRAW_S = 1.2
# How often the app is asked whether it answers yet, at first and later, and when somebody is told that it doesn't.
_PROBE_EVERY_S = 0.1
_PROBE_SELDOM_S = 2.0
_PROBE_COMPLAINT_S = 3.0


class Registration:
    """One agent's entry, from the probe of its address to its withdrawal. For one opening of a client."""

    def __init__(
        self,
        identity: Identity,
        specs: tuple[HandlerSpec, ...],
        endpoint: Endpoint,
        incarnation: str,
        *,
        registry: Registry,
        knowledge: Knowledge,
        runtime: Runtime,
    ) -> None:
        self._identity = identity
        self._specs = specs
        self._knowledge = knowledge
        self._runtime = runtime
        self._incarnation = incarnation
        self._refusal: RegistrationState | None = None
        self._record = self._first_record(endpoint)
        self._announcer = Announcer(
            registry,
            lambda: self._record,
            config=runtime.config.registry,
            clock=runtime.clock,
            rng=runtime.rng,
            emit=runtime.emit,
        )
        self._task: asyncio.Task[None] | None = None
        self._withdrawn = False

    @property
    def state(self) -> RegistrationState:
        """How the entry stands."""
        return self._refusal or self._announcer.state

    async def now(self) -> None:
        """Register at once; return after the first attempt. Raises AgentIdInUse or SchemaConflict."""
        self._check_contracts()
        self._announcer.start()
        await self._announcer.first_attempt()

    def once_answering(self, probe_url: str) -> asyncio.Task[None]:
        """Register in the background, once this very process answers `/invoke` at `probe_url`.

        The task ends when that is settled: `state` is `registered` or `refused`.
        """
        self._task = asyncio.get_running_loop().create_task(self._register(probe_url))
        return self._task

    async def update(self, changes: Mapping[str, Any], timeout_s: float) -> None:
        """Change fields of the entry, and return once the registry has them. Raises ConfigError for a bad value."""
        try:
            record = AgentInfo.model_validate({**dict(self._record), "schema": 1, **changes})
            record.to_bytes()
        except ValidationError as error:
            reasons = "; ".join(f"{field}: {reason}" for field, reason in problems_of(error))
            raise ConfigError(f"the entry can't be changed so: {reasons}") from None
        except ValueError as error:
            raise ConfigError(f"the entry can't be changed so: {error}") from None
        self._record = record
        await self._announcer.rewrite(timeout_s)

    async def withdraw(self) -> None:
        """Take the entry out, or see to it that it never comes. Bounded; a second call does nothing."""
        if self._withdrawn:
            return
        self._withdrawn = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._announcer.withdraw(_WITHDRAW_S)

    async def _register(self, probe_url: str) -> None:
        await self._until_answering(probe_url)
        # If the registry can't be asked, there is nothing to compare with, and the announcer says so.
        with contextlib.suppress(ReachError):
            await self._knowledge.discover(self._runtime.config.timeouts.discovery_s)
        try:
            self._check_contracts()
        except SchemaConflict as error:
            self._refusal = RegistrationState("refused", error.message, self._runtime.clock.now(), error)
            self._tell("refused", error.message)
            return
        self._announcer.start()
        while self._announcer.state.status not in ("registered", "refused"):
            # The announcer never gives up and says so in `state`; neither do we.
            with contextlib.suppress(ReachError):
                await self._announcer.wait_registered(3600.0)
            await self._runtime.clock.sleep(_PROBE_EVERY_S)

    async def _until_answering(self, url: str) -> None:
        clock = self._runtime.clock
        started, pause_s, complained = clock.now(), _PROBE_EVERY_S, False
        while not await self._answers(url):
            if not complained and clock.now() - started > _PROBE_COMPLAINT_S:
                complained = True
                self._tell("waiting", f"{url}/invoke isn't answered by this process yet; is the app mounted there?")
            await clock.sleep(pause_s)
            pause_s = min(pause_s * 1.5, _PROBE_SELDOM_S)

    async def _answers(self, url: str) -> bool:
        """True if this very process answers a ping at `url`."""
        agent_id, wall = self._identity.agent_id, self._runtime.clock.wall()
        ping = OutgoingCall(
            request_id=secrets.token_hex(16),
            trace_id=secrets.token_hex(16),
            from_agent=agent_id,
            namespace=self._identity.namespace,
            target_capability=PING,
            payload_json=b"{}",
        )
        request = ping.request(
            url, target_agent=agent_id, timeout_s=2.0, connect_timeout_s=1.0, max_reply_bytes=64 * 1024, wall=wall
        )
        # Directly: the client's own dialer may go through a proxy that doesn't know this host's loopback.
        probe = HttpxDialer()
        try:
            result = await probe.send(request)
        finally:
            await probe.aclose()
        outcome = interpret(result, request_id=ping.request_id, agent_id=agent_id, wall=wall)
        own = {"incarnation": self._incarnation}
        return isinstance(outcome, Succeeded) and outcome.reply.data == own

    def _check_contracts(self) -> None:
        """Compare our contracts with those of live instances of the same names, as `schema_policy` says."""
        policy = self._runtime.config.registry.schema_policy
        if policy == "ignore":
            return
        for spec in self._specs:
            name = spec.info.name
            for other in self._knowledge.index.lookup(name).candidates:
                if other.capability.name != name or other.capability.schema_hash in (None, spec.info.schema_hash):
                    continue
                advice = (
                    f"{name} has another schema here than on the live {other.agent_id}, and callers get either: "
                    "give the new contract a new major version"
                )
                if policy == "refuse":
                    raise SchemaConflict(f"{advice}, or set schema_policy='warn'", capability=name)
                self._runtime.emit(
                    ContractClash(
                        capability=name,
                        agent_id=self._identity.agent_id,
                        other_agent_id=other.agent_id,
                        detail=advice,
                    )
                )

    def _first_record(self, endpoint: Endpoint) -> AgentInfo:
        first = self._specs[0]
        return AgentInfo(
            agent_id=self._identity.agent_id,
            incarnation=self._incarnation,
            name=self._identity.name,
            namespace=self._identity.namespace,
            version=first.agent_version,
            endpoint=endpoint,
            health_check_url=f"{endpoint.url}/health",
            zone=self._identity.zone,
            weight=first.weight,
            registered_at=self._runtime.clock.wall(),
            metadata=first.metadata,
            capabilities=tuple(spec.info for spec in self._specs),
        )

    def _tell(self, status: str, detail: str) -> None:
        self._runtime.emit(RegistrationChanged(agent_id=self._identity.agent_id, status=status, detail=detail))
