"""The naive registry: the instance with the fewest failures, removed after five in a row.

Source: no project's; the registry of agents that a first design has, with a `failure_count` in each entry that a
success sets back to 0.

- The instance with the lowest count of failures; among those the one used least; among those any.
- A failure of any kind, also the caller's own (4xx), counts one; a success sets the count back to 0.
- Five failures in a row remove an instance for good, until its process registers anew (a new incarnation).
- Two retries, so three attempts in all, after any failure, at once, on an instance that the call didn't try, while
  one is left; else on one that it did.
- All removed: the call fails.
"""

from __future__ import annotations

from collections.abc import Sequence

from agent_reach.routing.instance import Candidate
from agent_reach.routing.outcomes import Cancelled, Outcome, Succeeded
from tests.simulation.baselines.common import BaselineSession, Rules, Stats

__all__ = ["LeastFailures"]

_REMOVED_AFTER = 5


class _Entry(Stats):
    __slots__ = ("failures", "uses")

    def __init__(self) -> None:
        super().__init__()
        self.failures = 0
        self.uses = 0


class LeastFailures(Rules[_Entry]):
    """The fewest failures win."""

    max_attempts = 3

    def fresh(self, now: float) -> _Entry:
        """No failure, no use."""
        return _Entry()

    def pick(self, call: BaselineSession, candidates: Sequence[Candidate], now: float) -> Candidate | None:
        """Return the least failed, then least used one."""
        best: list[tuple[Candidate, _Entry]] = []
        best_key = (True, _REMOVED_AFTER, 0)
        for candidate in candidates:
            entry = self.of(candidate, now)
            if entry.failures >= _REMOVED_AFTER:
                continue
            key = (candidate.agent_id in call.tried, entry.failures, entry.uses)
            if key < best_key:
                best, best_key = [(candidate, entry)], key
            elif key == best_key:
                best.append((candidate, entry))
        if not best:
            return None
        chosen, entry = best[int(self.rng.random() * len(best))]
        entry.uses += 1
        return chosen

    def learn(self, call: BaselineSession, stats: _Entry, outcome: Outcome, elapsed_s: float, now: float) -> None:
        """Count."""
        if isinstance(outcome, Succeeded):
            # Removed is removed: an answer that comes late doesn't bring an entry back.
            if stats.failures < _REMOVED_AFTER:
                stats.failures = 0
        elif not isinstance(outcome, Cancelled):
            stats.failures += 1

    def retry_in_s(self, call: BaselineSession, candidate: Candidate, outcome: Outcome, now: float) -> float | None:
        """At once, while attempts are left."""
        return 0.0 if len(call.attempts) < self.max_attempts else None
