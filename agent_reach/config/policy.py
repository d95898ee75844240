"""Bundles of settings for kinds of calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from agent_reach.config import checks
from agent_reach.config.calls import HedgeConfig, RetryConfig
from agent_reach.config.choice import Strategy, check_strategy

__all__ = ["Policy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How one kind of call is made; what is None stays as the client's settings have it.

    `trip_after`: so many failures in a row shut an instance out, as far as a call of this policy is the last of
    them. Keywords of the call itself go before those of its policy.

    `TOOL`: a quick step of an agent's loop, worth a second copy where the first is slow. `ANALYSIS`: minutes of
    model time; repeated once, after a pause, and never twice at a time. `CRITICAL`: for callers with an answer of
    their own; one attempt, two failures shut an instance out, and `fallback=` comes at once.
    """

    retry: RetryConfig | None = None
    hedge: HedgeConfig | Literal[False] | None = None
    strategy: Strategy | None = None
    trip_after: int | None = None

    TOOL: ClassVar[Policy]
    ANALYSIS: ClassVar[Policy]
    CRITICAL: ClassVar[Policy]

    def __post_init__(self) -> None:
        checks.instance(self, "retry", RetryConfig, "or None")
        if self.hedge is not False:
            checks.instance(self, "hedge", HedgeConfig, "or None, or False for none")
        if self.strategy is not None:
            check_strategy(self.strategy)
        if self.trip_after is not None:
            checks.whole(self, "trip_after", least=1)


Policy.TOOL = Policy(hedge=HedgeConfig())
Policy.ANALYSIS = Policy(retry=RetryConfig(max_attempts=2, base_s=1.0), hedge=False)
Policy.CRITICAL = Policy(retry=RetryConfig(max_attempts=1, patience_s=0.0), trip_after=2)
