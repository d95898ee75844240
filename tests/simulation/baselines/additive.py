"""An additive score: shares of health, load, locality and weight, and the highest wins.

Source: DESIGN.md section 5, preset BALANCED (health .4, load .3, locality .2, weight .1), as such scores are
usually written, over the last 20 calls and with no breaker.

- Score = .4 health + .3 load + .2 locality + .1 weight; the highest of all wins, ties at random.
- Health: the share of successes among the last 20 calls; 1 if there was none. A refusal of what the caller sent
  (4xx but 429) and a cancelled call count for nothing.
- Load: 1 - min(1, in flight / max concurrency). In flight: this client's own calls, or those running and waiting
  by the instance's last report, whichever is more. Max concurrency: the capability's, else the instance's, else
  100.
- Locality: 1 in the caller's zone, .5 in its region ("region/zone"), else 0; 0 without a zone.
- Weight: relative to the greatest weight of all.
- Three attempts in all, each on an instance that the call didn't try, while one is left; pauses of 0.2 s and 0.4
  s. Retried is any failure but a refusal of what the caller sent, also of calls that aren't idempotent.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

from agent_reach.routing.instance import Candidate
from agent_reach.routing.outcomes import Cancelled, Outcome, Rejected, Succeeded
from tests.simulation.baselines.common import BaselineSession, Rules, Stats

__all__ = ["Additive"]

_HEALTH, _LOAD, _LOCALITY, _WEIGHT = 0.4, 0.3, 0.2, 0.1
_WINDOW = 20
_ALL = (1 << _WINDOW) - 1
_PAUSE_S, _MULTIPLIER = 0.2, 2.0
_LIMIT = 100


class _Record(Stats):
    """`history`: the last calls as bits, 1 for a success; `calls`: how many of them there are."""

    __slots__ = ("calls", "health", "history", "reported")

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.history = 0
        self.health = 1.0
        self.reported = 0

    def count(self, success: bool) -> None:
        """Take in one call."""
        self.calls = min(self.calls + 1, _WINDOW)
        self.history = (self.history << 1 | success) & _ALL
        self.health = self.history.bit_count() / self.calls


class _Row(NamedTuple):
    """One instance in a pick; `fixed` is what locality and weight give it."""

    candidate: Candidate
    record: _Record
    limit: int
    fixed: float


class Additive(Rules[_Record]):
    """The highest score wins."""

    max_attempts = 3

    def __init__(self, rng: random.Random, zone: str | None) -> None:
        super().__init__(rng, zone)
        self._candidates: Sequence[Candidate] = ()
        self._rows: list[_Row] = []

    def fresh(self, now: float) -> _Record:
        """Healthy and idle."""
        return _Record()

    def pick(self, call: BaselineSession, candidates: Sequence[Candidate], now: float) -> Candidate | None:
        """Return the untried one with the highest score."""
        # The index makes a new tuple at each change, so what an instance's record says is looked up once.
        if candidates is not self._candidates:
            self._candidates = candidates
            greatest = max(candidate.instance.info.weight for candidate in candidates)
            self._rows = [self._row(candidate, greatest, now) for candidate in candidates]
        rows = self._rows
        if call.tried:
            rows = [row for row in rows if row.candidate.agent_id not in call.tried] or rows
        best: list[Candidate] = []
        best_score = -1.0
        for candidate, record, limit, fixed in rows:
            running = max(record.in_flight, record.reported)
            free = 1.0 - running / limit if running < limit else 0.0
            score = fixed + _HEALTH * record.health + _LOAD * free
            if score > best_score:
                best, best_score = [candidate], score
            elif score == best_score:
                best.append(candidate)
        return best[int(self.rng.random() * len(best))]

    def learn(self, call: BaselineSession, stats: _Record, outcome: Outcome, elapsed_s: float, now: float) -> None:
        """Count the call, and keep what the instance says of its load."""
        if isinstance(outcome, Succeeded):
            stats.count(True)
            load = outcome.reply.load
        elif isinstance(outcome, Cancelled) or _callers_fault(outcome):
            return
        else:
            stats.count(False)
            load = outcome.load if isinstance(outcome, Rejected) else None
        if load is not None:
            stats.reported = load.in_flight + load.queued

    def retry_in_s(self, call: BaselineSession, candidate: Candidate, outcome: Outcome, now: float) -> float | None:
        """After 0.2 s, then 0.4 s."""
        if _callers_fault(outcome) or len(call.attempts) >= self.max_attempts:
            return None
        return _PAUSE_S * _MULTIPLIER ** (len(call.attempts) - 1)

    def _row(self, candidate: Candidate, greatest_weight: float, now: float) -> _Row:
        info = candidate.instance.info
        limit = candidate.capability.max_concurrency or info.max_concurrency or _LIMIT
        fixed = _LOCALITY * self._locality(info.zone) + _WEIGHT * info.weight / greatest_weight
        return _Row(candidate, self.of(candidate, now), limit, fixed)

    def _locality(self, zone: str | None) -> float:
        if self.zone is None or zone is None:
            return 0.0
        if zone == self.zone:
            return 1.0
        return 0.5 if zone.partition("/")[0] == self.zone.partition("/")[0] else 0.0


def _callers_fault(outcome: Outcome) -> bool:
    return isinstance(outcome, Rejected) and 400 <= outcome.status < 500 and outcome.status != 429
