"""What all calls of one client share: who is there, the settings, randomness, what was learnt."""

from __future__ import annotations

import random

from agent_reach.config import ReachConfig
from agent_reach.routing.index import Index, Lookup
from agent_reach.routing.scoring import PeakEwmaScorer

__all__ = ["Router"]


class Router:
    """One for each client. Its sessions read and write it in their steps, which never interleave."""

    def __init__(
        self, config: ReachConfig | None = None, rng: random.Random | None = None, *, zone: str | None = None
    ) -> None:
        self.config = config or ReachConfig()
        self.rng = rng or random.Random()
        self.zone = zone
        self.index = Index(self.config)
        self.scorer = PeakEwmaScorer(self.config.scoring)

    def lookup(self, capability: str) -> Lookup:
        """Return who answers for a capability now."""
        return self.index.lookup(capability)
