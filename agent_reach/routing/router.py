"""What all calls of one client share: who is there, the settings, randomness, what was learnt."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from agent_reach.config import ReachConfig
from agent_reach.routing.affinity import Contexts, owner_by_hash, owner_of
from agent_reach.routing.budget import RetryBudget
from agent_reach.routing.decisions import DecisionLog
from agent_reach.routing.index import Index, Lookup
from agent_reach.routing.instance import Candidate
from agent_reach.routing.locality import rings
from agent_reach.routing.outage import Outage
from agent_reach.routing.scoring import scorer_of
from agent_reach.routing.stats import RecentLatencies

__all__ = ["Router", "Shared"]


class Shared:
    """What the calls of one capability share: what they may spend on retries and on second copies, how long they
    took, whether all of them fail.
    """

    __slots__ = ("_candidates", "_rings", "_zone", "hedges", "latencies", "outage", "retries")

    def __init__(self, config: ReachConfig, zone: str | None) -> None:
        retry = config.retry
        self.retries = RetryBudget(retry.budget_ratio, retry.budget_least, retry.budget_window_s)
        # Their share is the call's own (`HedgeConfig.budget_ratio`); one in ten seconds at any rate.
        self.hedges = RetryBudget(0.0, 1, retry.budget_window_s)
        self.latencies = RecentLatencies()
        self.outage = Outage()
        self._zone = zone
        self._candidates: Sequence[Candidate] = ()
        self._rings: tuple[tuple[Candidate, ...], ...] = ()

    def call_began(self, now: float) -> None:
        """Count a call: so many more retries and second copies may be made."""
        self.retries.call_began(now)
        self.hedges.call_began(now)

    def rings(self, candidates: Sequence[Candidate]) -> tuple[tuple[Candidate, ...], ...]:
        """Return the candidates grouped by distance; grouped anew only when others are there."""
        if candidates is not self._candidates:
            self._candidates, self._rings = candidates, rings(candidates, self._zone)
        return self._rings


class Router:
    """One for each client. Its sessions read and write it in their steps, which never interleave."""

    def __init__(
        self,
        config: ReachConfig | None = None,
        rng: random.Random | None = None,
        *,
        zone: str | None = None,
        age_s: Callable[[], float | None] = lambda: None,
    ) -> None:
        self.config = config or ReachConfig()
        self.rng = rng or random.Random()
        self.zone = zone
        self.index = Index(self.config)
        self.scorer = scorer_of(self.config, zone)
        self.contexts = Contexts(self.config.affinity.remembered)
        self.decisions = DecisionLog(age_s, self.config.scoring)
        # Calls in flight by timeout tier.
        self.in_flight: dict[str, int] = {}
        self._shared: dict[str, Shared] = {}
        self._turns = 0

    def lookup(self, capability: str) -> Lookup:
        """Return who answers for a capability now."""
        return self.index.lookup(capability)

    def owner(
        self, capability: str, context_id: str, candidates: Sequence[Candidate]
    ) -> tuple[str | None, str | None]:
        """Return the agent that a conversation belongs to, and the one that held it so far if that is gone."""
        if not candidates:
            return None, None
        remembered = self.contexts.owner(capability, context_id)
        if remembered is not None and any(owner_of(candidate) == remembered for candidate in candidates):
            return remembered[0], None
        lost = None if remembered is None else remembered[0]
        return owner_by_hash(context_id, candidates).agent_id, lost

    def shared(self, capability: str) -> Shared:
        """Return what the calls of a capability share."""
        shared = self._shared.get(capability)
        if shared is None:
            shared = self._shared[capability] = Shared(self.config, self.zone)
        return shared

    def next_turn(self) -> int:
        """Count the choices made so far."""
        self._turns += 1
        return self._turns

    def tier_full(self, tier: str) -> bool:
        """True if as many calls of a timeout tier are in flight as may be."""
        return self.in_flight.get(tier, 0) >= self.config.bulkheads.per_tier

    def begin(self, tier: str) -> None:
        """A call of this tier went out."""
        self.in_flight[tier] = self.in_flight.get(tier, 0) + 1

    def end(self, tier: str) -> None:
        """A call of this tier ended."""
        left = self.in_flight[tier] - 1
        if left:
            self.in_flight[tier] = left
        else:
            del self.in_flight[tier]
