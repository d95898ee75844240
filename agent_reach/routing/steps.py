"""What a call session is asked for, and what it answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from agent_reach.config import HedgeConfig, RetryConfig, Strategy, TimeoutConfig
from agent_reach.errors import Attempt, ReachError
from agent_reach.model import ReplyEnvelope
from agent_reach.routing.budget import RetryAllowance
from agent_reach.routing.instance import Candidate

__all__ = ["Await", "CallPlan", "Raise", "Return", "Send", "Step", "Wait"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallPlan:
    """What was asked for. `started` and `deadline` are on the caller's monotonic clock, in seconds.

    `explicit_timeout`: the caller named a total, so the last attempt may use all that is left of it. `own_purse`:
    the retries are a root call's, so no sibling draws from them. `pinned`: only this instance. `preferred`: these
    first, in order, while they are usable. `tier`: of the capability's time. `context_id`: the conversation that it
    is part of; `require_context`: nobody but its owner may answer. `trip_after`: as `Policy.trip_after`.
    """

    capability: str
    request_id: str
    started: float
    deadline: float
    retry: RetryConfig
    allowance: RetryAllowance
    explicit_timeout: bool = False
    own_purse: bool = True
    pinned: str | None = None
    preferred: tuple[str, ...] = ()
    tier: str = "interactive"
    strategy: Strategy = "single"
    hedge: HedgeConfig | None = None
    context_id: str | None = None
    require_context: bool = False
    trip_after: int | None = None

    @classmethod
    def of(
        cls,
        capability: str,
        request_id: str,
        candidates: Sequence[Candidate],
        *,
        started: float,
        timeout_s: float | None,
        left_s: float,
        retry: RetryConfig,
        timeouts: TimeoutConfig,
        allowance: RetryAllowance | None,
        pinned: str | None = None,
        **how: Any,
    ) -> CallPlan:
        """Settle a call's total time and its purse of retries.

        `timeout_s` is what the caller named, if anything; else each attempt gets the capability's own time, all of
        them `TimeoutConfig.total_s` at the most, and a longer capability one attempt. Never more than `left_s`,
        which whoever called the caller has left. `allowance`: the purse of that call; None for a root. `how`: other
        fields of the plan, as they are.
        """
        meant = next((c for c in candidates if c.agent_id == pinned), candidates[0])
        attempt_s = timeouts.of(meant.capability.timeout)
        own_s = max(attempt_s, min(attempt_s * retry.max_attempts, timeouts.total_s))
        wanted_s = own_s if timeout_s is None else timeout_s
        own_purse = allowance is None
        if allowance is None:
            most = retry.max_attempts - 1 if retry.tree_allowance is None else retry.tree_allowance
            allowance = RetryAllowance(most)
        return cls(
            capability=capability,
            request_id=request_id,
            started=started,
            deadline=started + min(left_s, wanted_s),
            retry=retry,
            allowance=allowance,
            explicit_timeout=timeout_s is not None,
            own_purse=own_purse,
            pinned=pinned,
            tier=timeouts.tier_of(meant.capability.timeout),
            **how,
        )


@dataclass(frozen=True, slots=True)
class Send:
    """Send attempt `number` (1-based) to `candidate`, give it `timeout_s` seconds and `retry_allowance` retries.

    `hedge_after_s`: if it is still under way after so many seconds, ask what next: maybe a second copy.
    """

    candidate: Candidate
    number: int
    timeout_s: float
    retry_allowance: int
    hedge_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class Wait:
    """Ask again in `seconds`; with `until_place`, as soon as a call of this client ended, if that is sooner."""

    seconds: float
    until_place: bool = False


@dataclass(frozen=True, slots=True)
class Await:
    """Nothing to begin while attempts are under way; ask again when one of them ended, or in `seconds`."""

    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Return:
    """The call succeeded."""

    reply: ReplyEnvelope
    attempts: tuple[Attempt, ...]


@dataclass(frozen=True, slots=True)
class Raise:
    """The call failed."""

    error: ReachError


Step: TypeAlias = Send | Await | Wait | Return | Raise
