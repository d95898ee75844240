"""What decides in a simulated client: Agent-Reach's own sessions, or another algorithm behind the same protocol."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Protocol

from agent_reach.config import ReachConfig
from agent_reach.routing.budget import RetryAllowance
from agent_reach.routing.index import Change
from agent_reach.routing.outcomes import Outcome
from agent_reach.routing.router import Router
from agent_reach.routing.session import CallSession
from agent_reach.routing.steps import CallPlan, Send, Step

__all__ = ["AgentReach", "Algorithm", "CallRequest", "Session"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRequest:
    """One call that a simulated client is asked for, at `started` (virtual seconds).

    `timeout_s`: the total that the caller named, None for the capability's own. `left_s`: what whoever called this
    client has left; `allowance`: that call's purse of retries. Both are None for a root call.
    """

    capability: str
    request_id: str
    started: float
    timeout_s: float | None = None
    left_s: float | None = None
    allowance: RetryAllowance | None = None
    context_id: str | None = None


class Session(Protocol):
    """One call's decisions. `CallSession` is one; see there for how it is driven."""

    def next(self, now: float) -> Step:
        """Say what to do at `now`."""
        ...

    def record(self, outcome: Outcome, now: float, send: Send | None = None) -> None:
        """Take in how an attempt ended: `send`, or the only one under way."""
        ...


class Algorithm(Protocol):
    """What one simulated client decides by."""

    def apply(self, change: Change, now: float) -> None:
        """Take in that an instance came, changed or went."""
        ...

    def open(self, request: CallRequest) -> Session | None:
        """Begin a call; None if nobody is known that offers it."""
        ...


class AgentReach:
    """Agent-Reach itself: the router and the sessions that `ReachClient` uses."""

    def __init__(self, rng: random.Random, config: ReachConfig | None = None, *, zone: str | None = None) -> None:
        self.router = Router(config, rng, zone=zone)

    def apply(self, change: Change, now: float) -> None:
        """Take in that an instance came, changed or went."""
        self.router.index.apply(change, now)

    def open(self, request: CallRequest) -> CallSession | None:
        """Begin a call; None if nobody is known that offers it."""
        found = self.router.lookup(request.capability)
        if not found.candidates:
            return None
        config = self.router.config
        plan = CallPlan.of(
            request.capability,
            request.request_id,
            found.candidates,
            started=request.started,
            timeout_s=request.timeout_s,
            left_s=float("inf") if request.left_s is None else request.left_s,
            retry=config.retry,
            timeouts=config.timeouts,
            allowance=request.allowance,
            strategy=config.strategy,
            hedge=config.hedge,
            context_id=request.context_id,
        )
        return CallSession(plan, self.router)
