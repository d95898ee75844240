"""Round robin with blind retries: what teams write by hand.

Source: no project's; the loop of `for url in itertools.cycle(urls)` with `except Exception: continue` around a
call.

- The next instance in the circle, wherever it stands; each client begins at a place of its own.
- Three retries, so four attempts in all, after any failure, also of calls that aren't idempotent, also after
  answers that will be the same elsewhere (4xx).
- At once, on the next in the circle, which is the same one if it is alone.
- No breaker, no statistics; an attempt has the capability's tier time.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from agent_reach.routing.instance import Candidate
from agent_reach.routing.outcomes import Outcome
from tests.simulation.baselines.common import BaselineSession, Rules, Stats

__all__ = ["RoundRobin"]


class RoundRobin(Rules[Stats]):
    """The next one, up to four times."""

    max_attempts = 4

    def __init__(self, rng: random.Random, zone: str | None) -> None:
        super().__init__(rng, zone)
        self._turn = int(rng.random() * 1000)

    def fresh(self, now: float) -> Stats:
        """Nothing but the count in flight."""
        return Stats()

    def pick(self, call: BaselineSession, candidates: Sequence[Candidate], now: float) -> Candidate | None:
        """Return the next in the circle."""
        self._turn += 1
        return candidates[self._turn % len(candidates)]

    def learn(self, call: BaselineSession, stats: Stats, outcome: Outcome, elapsed_s: float, now: float) -> None:
        """Learn nothing."""
        return

    def retry_in_s(self, call: BaselineSession, candidate: Candidate, outcome: Outcome, now: float) -> float | None:
        """At once, while attempts are left."""
        return 0.0 if len(call.attempts) < self.max_attempts else None
