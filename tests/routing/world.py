"""Small builders for routing tests."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

from agent_reach.config import ReachConfig
from agent_reach.model import AgentInfo, CapabilityInfo, Endpoint, ErrorInfo, ReplyEnvelope
from agent_reach.routing.budget import RetryAllowance
from agent_reach.routing.index import Upsert
from agent_reach.routing.outcomes import Rejected, Succeeded
from agent_reach.routing.router import Router
from agent_reach.routing.session import CallSession
from agent_reach.routing.steps import CallPlan

CAPABILITY = "knowledge.retrieve.v1"


def agent(
    agent_id: str = "kb-1",
    capabilities: Iterable[str] = (CAPABILITY,),
    *,
    incarnation: str = "one",
    idempotent: bool = True,
    timeout: str | float = "interactive",
    aliases: tuple[str, ...] = (),
    slots: int | None = None,
    **fields: Any,
) -> AgentInfo:
    """An instance that offers `capabilities`; `slots`: of each of them it runs so many calls at a time."""
    return AgentInfo(
        agent_id=agent_id,
        incarnation=incarnation,
        name="kb",
        namespace="default",
        endpoint=Endpoint(url=f"http://10.0.0.1:{9000 + sum(map(ord, agent_id)) % 1000}"),
        capabilities=tuple(
            CapabilityInfo(
                name=name, idempotent=idempotent, timeout=timeout, soft_aliases=aliases, max_concurrency=slots
            )
            for name in capabilities
        ),
        **fields,
    )


class World:
    """An index with instances, and sessions on it, at a time that the test names."""

    def __init__(self, *infos: AgentInfo, config: ReachConfig | None = None, seed: int = 1, **router: Any) -> None:
        self.router = Router(config, random.Random(seed), **router)
        self.config, self.rng = self.router.config, self.router.rng
        self.index, self.scorer = self.router.index, self.router.scorer
        for revision, info in enumerate(infos, 1):
            self.index.apply(Upsert(info, revision), 0.0)

    def session(self, *, now: float = 0.0, deadline: float = 30.0, **plan: Any) -> CallSession:
        """Open a session that starts at `now` and ends at `deadline`."""
        retry = plan.pop("retry", self.config.retry)
        allowance = plan.pop("allowance", RetryAllowance(retry.max_attempts))
        return CallSession(
            CallPlan(
                capability=plan.pop("capability", CAPABILITY),
                request_id="r",
                started=now,
                deadline=deadline,
                retry=retry,
                allowance=allowance,
                **plan,
            ),
            self.router,
        )

    def in_flight(self) -> int:
        """Permits in use, over all instances."""
        return sum(instance.in_flight for instance in self.index.instances.values())


def ok(agent_id: str = "kb-1", **fields: Any) -> Succeeded:
    """A good answer."""
    return Succeeded(ReplyEnvelope(code=0, data="fine", agent_id=agent_id, **fields))


def rejected(
    status: int, type_: str = "Failure", *, executed: bool = True, retryable: bool = True, **fields: Any
) -> Rejected:
    """An error answer."""
    state = fields.pop("state", "accepting")
    error = ErrorInfo(type=type_, message="no", executed=executed, retryable=retryable, **fields)
    return Rejected(status, error, state=state)
