"""The half of a client that calls and looks; `ReachClient` adds the other one, which lives and serves."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar, Unpack, overload

from pydantic import BaseModel

from agent_reach.calling import Caller
from agent_reach.config import HedgeConfig, Policy, ReachConfig, RetryConfig, Strategy
from agent_reach.errors import ReachError
from agent_reach.knowledge import Knowledge
from agent_reach.model import AgentInfo
from agent_reach.options import CallKeywords, CallOptions
from agent_reach.reply import Outcome, Reply
from agent_reach.routing.decisions import Decision
from agent_reach.routing.explain import Explanation, Route
from agent_reach.routing.names import check_capability

__all__ = ["Asking"]

T = TypeVar("T")


class Asking:
    """What `ReachClient` offers to who calls others."""

    _caller: Caller
    _config: ReachConfig
    _knowledge: Knowledge

    def _require_open(self) -> None:
        raise NotImplementedError

    # --- calling -------------------------------------------------------------------------------------------

    @overload
    async def call(
        self,
        capability: str | Route,
        payload: Mapping[str, Any] | BaseModel | None = None,
        *,
        response_model: type[T],
        **keywords: Unpack[CallKeywords],
    ) -> Reply[T]: ...

    @overload
    async def call(
        self,
        capability: str | Route,
        payload: Mapping[str, Any] | BaseModel | None = None,
        *,
        response_model: Any = None,
        **keywords: Unpack[CallKeywords],
    ) -> Reply[Any]: ...

    async def call(
        self,
        capability: str | Route,
        payload: Mapping[str, Any] | BaseModel | None = None,
        *,
        timeout: float | None = None,
        agent_id: str | None = None,
        context_id: str | None = None,
        require_context: bool = False,
        idempotency_key: str | None = None,
        policy: Policy | None = None,
        strategy: Strategy | None = None,
        retry: RetryConfig | None = None,
        hedge: HedgeConfig | Literal[False] | None = None,
        fallback: Callable[[ReachError], Any] | None = None,
        response_model: Any = None,
        metadata: Mapping[str, str] | None = None,
    ) -> Reply[Any]:
        """Send one request and return its answer, whatever it takes within `timeout` seconds in all.

        `capability` is a name, or a `Route` from `resolve`, whose ranking is then followed. `payload` is an
        object: a dict or a pydantic model. `agent_id` pins one instance. Without `timeout` a call gets its
        capability's own time for each attempt, at most 30 s in all; a nested call never gets more than its caller
        has left. It is repeated only where that is safe: the capability is idempotent, or nothing was executed.
        `idempotency_key` lets an instance recognise a repeat of yours. Calls with the same `context_id` go to the
        instance that answered the first of them while it is there; with `require_context` to no other. `policy`
        is a bundle for a kind of call (`Policy.TOOL`), and `strategy`, `retry` and `hedge` go before what it or
        the settings say: how an instance is chosen, how often the call is repeated, and whether an idempotent one
        gets a second copy elsewhere when the first is slow (`hedge=False`: it doesn't). `response_model` checks
        and types `data`. `fallback`, sync or async, is given the error when all else failed, and its result
        becomes the reply; it isn't asked about the caller's own mistakes (ConfigError, ClientNotOpen,
        InvalidPayload).

        Raises a `ReachError`: AgentNotFound, NoHealthyAgent, Overloaded, DeadlineExceeded, RemoteError,
        OutcomeUnknown, ContextLost, InvalidPayload, InvalidReply, RegistryUnavailable and the rest of the tree.
        """
        self._require_open()
        options = CallOptions(
            timeout=timeout,
            agent_id=agent_id,
            context_id=context_id,
            require_context=require_context,
            idempotency_key=idempotency_key,
            policy=policy,
            strategy=strategy,
            retry=retry,
            hedge=hedge,
            fallback=fallback,
            response_model=response_model,
            metadata=metadata,
        )
        return await self._caller.call(capability, payload, options)

    async def fan_out(
        self,
        capability: str,
        payload: Mapping[str, Any] | BaseModel | None = None,
        n: int = 3,
        *,
        timeout: float | None = None,
        strategy: Strategy | None = None,
        retry: RetryConfig | None = None,
        response_model: Any = None,
        metadata: Mapping[str, str] | None = None,
    ) -> list[Outcome[Any]]:
        """Ask `n` different instances at once, and return one outcome for each; partial failure is data.

        They are chosen as for calls, best first; fewer where fewer are there. Each is a call to that instance
        alone, with its own retries; all of them have the same `timeout`.

        Raises ConfigError for bad arguments, InvalidPayload, and AgentNotFound or RegistryUnavailable if nobody is
        there to ask.
        """
        self._require_open()
        options = CallOptions(
            timeout=timeout, strategy=strategy, retry=retry, response_model=response_model, metadata=metadata
        )
        return await self._caller.fan_out(capability, payload, n, options)

    # --- looking -------------------------------------------------------------------------------------------

    async def resolve(self, capability: str, *, context_id: str | None = None) -> Route:
        """Return the ranked candidates, what was excluded and why, and the risk. A Route can be given to `call`.

        With `context_id`, the owner of that conversation comes first, and the route says if it is gone.

        Raises AgentNotFound with near names, or RegistryUnavailable while nothing is known.
        """
        self._require_open()
        name = check_capability(capability)
        request_id = secrets.token_hex(16)
        await self._knowledge.discover(self._config.timeouts.discovery_s, capability=name, request_id=request_id)
        self._knowledge.offered(name, pinned=None, request_id=request_id)
        return self._knowledge.explain(name, context_id)

    def explain(self, capability: str) -> Explanation:
        """Return what a call would see now, scores part by part; `print` it. Empty if nobody offers it."""
        self._require_open()
        return self._knowledge.explain(check_capability(capability))

    def decisions(self, capability: str | None = None) -> tuple[Decision, ...]:
        """Return the latest decisions, a thousand at the most, the newest last: where each attempt went, by which
        rule, and how the instances looked at that moment. `print` one.
        """
        self._require_open()
        return self._knowledge.router.decisions.latest(None if capability is None else check_capability(capability))

    def agents(self, capability: str | None = None) -> tuple[AgentInfo, ...]:
        """Return the instances known now: all, or those that answer for one capability."""
        self._require_open()
        return self._knowledge.agents(None if capability is None else check_capability(capability))

    async def wait_for(self, capability: str, timeout: float = 30.0) -> tuple[AgentInfo, ...]:
        """Return the instances of `capability` as soon as there is one.

        Raises AgentNotFound (or RegistryUnavailable, Unauthorized or Forbidden, while nothing is known) after
        `timeout` seconds.
        """
        self._require_open()
        return await self._knowledge.wait_for(check_capability(capability), timeout)
