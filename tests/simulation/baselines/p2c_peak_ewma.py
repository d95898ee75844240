"""Power of two choices over a peak-sensitive latency, with failure accrual: Finagle's rules and Linkerd's together.

One strong combination: neither project is exactly this. From Finagle the balancer, the failure accrual and the
retry budget; from Linkerd that a failure is booked as slow, without which an instance that fails fast looks the
fastest.

Source: twitter/finagle, read in its repository: `loadbalancer/PeakEwma.scala`, `loadbalancer/p2c/P2CPick.scala`,
`loadbalancer/Balancer.scala`, `service/RequeueFilter.scala`, `service/Retries.scala`; `finagle.py` beside this
file names the rest. linkerd/linkerd2-proxy, read in its repository: `linkerd/load-biaser/src/lib.rs` at e0f4993.

- Load = ewma x (pending + 1). A sample above the average replaces it; a lower one, and no sample at all, pulls it
  down with weight 1 - exp(-dt / 10 s). Without a sample: 0 when nothing is pending, else a huge penalty +
  pending.
- A failure is recorded as at least 5 s, at least what it took, at least its Retry-After (up to 300 s). Failures
  are 5xx, lost answers, time-outs, refused connections, unreadable answers, and 429. (Linkerd records a refused
  or broken connection as it took; but it doesn't choose an endpoint that it can't connect to.) Cancelled calls
  are recorded as they took.
- Two different ones drawn at random; one that accrual closed comes after one that it didn't, then the lower load
  wins. If the winner is closed: drawn again, 5 times in all; then a sixth draw's winner is asked even so (fails
  open).
- Failure accrual (`finagle.py`): 5xx, lost, refused, unreadable are failures; 4xx, also 429, are successes;
  cancelled calls and faults of this process are ignored.
- Retries at once, each from the budget (`finagle.py`), three attempts in all, by a new draw that doesn't avoid
  whom the call tried. What was never run (refused connections; 429 and 503 that say so) is requeued for any call;
  other failures (5xx, lost, unreadable) are repeated for an idempotent one only. Finagle's own limit of
  requeues for one call, a fifth of the balance, isn't simulated: it is tighter only when 5 or fewer are left.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from agent_reach.routing.instance import Candidate
from agent_reach.routing.outcomes import Cancelled, Outcome, Rejected, Succeeded, Unsent
from tests.simulation.baselines.common import BaselineSession, Rules, Stats
from tests.simulation.baselines.finagle import Accrual, RetryBudget

__all__ = ["P2CPeakEwma"]

_DECAY_S = 10.0
_PENALTY = 1e9
_DRAWS = 5
_FAILURE_S, _MAX_RETRY_AFTER_S = 5.0, 300.0


class _Node(Stats):
    __slots__ = ("_at", "_ewma_s", "accrual")

    def __init__(self, now: float) -> None:
        super().__init__()
        self._ewma_s = 0.0
        self._at = now
        self.accrual = Accrual(now)

    def load(self, now: float) -> float:
        """Return the cost of one more call."""
        if self._ewma_s == 0.0:
            return _PENALTY + self.in_flight if self.in_flight else 0.0
        return self._ewma_s * math.exp((self._at - now) / _DECAY_S) * (self.in_flight + 1)

    def observe(self, took_s: float, now: float) -> None:
        """Take in one sample."""
        keep = math.exp((self._at - now) / _DECAY_S)
        faded_s = self._ewma_s * keep
        # Compared with the average as it was left: Finagle fades it at each look, Linkerd doesn't.
        self._ewma_s = took_s if took_s > self._ewma_s else faded_s + took_s * (1.0 - keep)
        self._at = now


class P2CPeakEwma(Rules[_Node]):
    """The better of two."""

    max_attempts = 3

    def __init__(self, rng: random.Random, zone: str | None) -> None:
        super().__init__(rng, zone)
        self._budget = RetryBudget()

    def fresh(self, now: float) -> _Node:
        """Never asked, and alive."""
        return _Node(now)

    def pick(self, call: BaselineSession, candidates: Sequence[Candidate], now: float) -> Candidate | None:
        """Return the better of two drawn at random."""
        if not call.attempts:
            self._budget.deposit(now)
        for _ in range(_DRAWS):
            chosen, node, is_open = self._draw(candidates, now)
            if is_open:
                break
        else:
            chosen, node, _ = self._draw(candidates, now)
        node.accrual.sent(now)
        return chosen

    def learn(self, call: BaselineSession, stats: _Node, outcome: Outcome, elapsed_s: float, now: float) -> None:
        """Record how long it took, or stands for, and tell the accrual."""
        stats.observe(_booked_s(outcome, elapsed_s), now)
        match outcome:
            case Cancelled() | Unsent(local=True):
                stats.accrual.ignored()
            case Succeeded():
                stats.accrual.succeeded(now)
            case Rejected() if outcome.status < 500:
                stats.accrual.succeeded(now)
            case _:
                stats.accrual.failed(now, self.rng)

    def retry_in_s(self, call: BaselineSession, candidate: Candidate, outcome: Outcome, now: float) -> float | None:
        """At once, if it may be repeated and the budget has one."""
        if len(call.attempts) >= self.max_attempts:
            return None
        if not _never_run(outcome) and not (candidate.capability.idempotent and _failure(outcome)):
            return None
        return 0.0 if self._budget.withdraw(now) else None

    def is_last(self, call: BaselineSession, candidate: Candidate) -> bool:
        """True also of a call that isn't idempotent: it isn't repeated after a time-out."""
        return not candidate.capability.idempotent or super().is_last(call, candidate)

    def _draw(self, candidates: Sequence[Candidate], now: float) -> tuple[Candidate, _Node, bool]:
        """Return the better of two, and whether accrual lets it be asked."""
        count = len(candidates)
        if count == 1:
            only = self.of(candidates[0], now)
            return candidates[0], only, only.accrual.open(now)
        first = int(self.rng.random() * count)
        second = int(self.rng.random() * (count - 1))
        if second >= first:
            second += 1
        one, other = candidates[first], candidates[second]
        its, others = self.of(one, now), self.of(other, now)
        its_open, others_open = its.accrual.open(now), others.accrual.open(now)
        better = its_open if its_open != others_open else its.load(now) <= others.load(now)
        return (one, its, its_open) if better else (other, others, others_open)


def _booked_s(outcome: Outcome, elapsed_s: float) -> float:
    if not _failure(outcome):
        return elapsed_s
    asked_s = (outcome.retry_after_s or 0.0) if isinstance(outcome, Rejected) else 0.0
    return max(_FAILURE_S, elapsed_s, min(asked_s, _MAX_RETRY_AFTER_S))


def _failure(outcome: Outcome) -> bool:
    """True for what is recorded as slow."""
    match outcome:
        case Succeeded() | Cancelled() | Unsent(local=True):
            return False
        case Rejected():
            return outcome.status >= 500 or outcome.status == 429
        case _:
            return True


def _never_run(outcome: Outcome) -> bool:
    if isinstance(outcome, Rejected):
        return not outcome.error.executed and outcome.status in (429, 503)
    return isinstance(outcome, Unsent) and not outcome.local
