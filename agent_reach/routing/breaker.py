"""Circuit breaker of one instance.

    state      event                                     next state
    CLOSED     failures in a row, or a low success rate  OPEN       (unless the ejection cap forbids it)
    CLOSED     nothing listens there                     OPEN       (at once, for a shorter time)
    OPEN       its time is over and a call is admitted   HALF_OPEN  (that call is the probe)
    not CLOSED a call sent in panic succeeds             CLOSED
    HALF_OPEN  the probe succeeds                        CLOSED
    HALF_OPEN  the probe fails                           OPEN       (twice as long)
    HALF_OPEN  the probe ends neutrally                  HALF_OPEN  (the next call is the probe)

Every state change starts a new generation; a permit of an earlier one counts for nothing when it comes back
(sony/gobreaker), so late answers and cancelled calls never poison the statistics. (But a late good answer proves
that somebody listens.) The failure conditions are those of Finagle's FailureAccrualPolicy and Linkerd's unified
policy.
"""

from __future__ import annotations

import enum
import random
from collections.abc import Callable
from dataclasses import dataclass

from agent_reach.config import BreakerConfig
from agent_reach.routing.stats import SlidingPair

__all__ = ["Breaker", "BreakerPermit", "BreakerState", "Transition", "Verdict"]


# However much its peers are overloaded, an instance that fails is looked at no more often.
_BETWEEN_PROBES_S = 1.0


class BreakerState(enum.Enum):
    """Where the breaker stands."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Verdict(enum.Enum):
    """What an outcome says of the instance: NEUTRAL is neither a success nor a failure of its own, UNREACHABLE a
    failure that needs no second one to be believed.
    """

    SUCCESS = "success"
    FAILURE = "failure"
    UNREACHABLE = "unreachable"
    NEUTRAL = "neutral"


@dataclass(frozen=True, slots=True)
class BreakerPermit:
    """Leave to send one call. Every permit must come back through `Breaker.record`, exactly once."""

    generation: int
    probe: bool


@dataclass(frozen=True, slots=True)
class Transition:
    """A state change, as data. `until`: when an open breaker admits its probe, on the caller's clock."""

    before: BreakerState
    after: BreakerState
    reason: str
    until: float | None = None


class Breaker:
    """One instance's state machine. Times are seconds on the caller's monotonic clock."""

    __slots__ = (
        "_config",
        "_hurried",
        "_in_a_row",
        "_open_s",
        "_opened_at",
        "_probing",
        "_window",
        "generation",
        "reason",
        "state",
        "unreachable",
        "until",
    )

    def __init__(self, config: BreakerConfig) -> None:
        self._config = config
        self._window = SlidingPair(config.window_s)
        self._in_a_row = 0
        # How long it opened last, if it didn't close since.
        self._open_s = 0.0
        self._opened_at = 0.0
        self._hurried = False
        self._probing = False
        # True from when nothing listened there until something does.
        self.unreachable = False
        self.state = BreakerState.CLOSED
        self.generation = 0
        self.until = 0.0
        self.reason = ""

    def available(self, now: float) -> bool:
        """True if a call would be admitted at `now`."""
        if self.state is BreakerState.CLOSED:
            return True
        if self.state is BreakerState.OPEN:
            return now >= self.until
        return not self._probing

    def hurry(self, now: float) -> bool:
        """Bring the probe forward, for a call that nobody else takes; False if one went out within a second."""
        if self.state is not BreakerState.OPEN or now < self._opened_at + _BETWEEN_PROBES_S:
            return False
        self.until = min(self.until, now)
        self._hurried = True
        return True

    def probe_due(self, now: float) -> bool:
        """True if the next call admitted would be the probe."""
        return self.state is not BreakerState.CLOSED and self.available(now)

    def admit(self, now: float) -> tuple[BreakerPermit, Transition | None]:
        """Admit a call; an unavailable breaker admits it too (panic), but not as its probe."""
        if self.state is BreakerState.OPEN and now >= self.until:
            transition = self._move(BreakerState.HALF_OPEN, "its time is over: one call probes it")
            self._probing = True
            return BreakerPermit(self.generation, probe=True), transition
        if self.state is BreakerState.HALF_OPEN and not self._probing:
            self._probing = True
            return BreakerPermit(self.generation, probe=True), None
        return BreakerPermit(self.generation, probe=False), None

    def record(
        self,
        permit: BreakerPermit,
        verdict: Verdict,
        now: float,
        rng: random.Random,
        may_open: Callable[[], bool],
        trip_after: int | None = None,
    ) -> Transition | None:
        """Take a permit back. `may_open` is asked only when the breaker is about to trip; `trip_after` stands for
        the configured number of failures in a row.
        """
        if permit.generation != self.generation:
            # It answers a call that was on its way when nobody seemed to listen: somebody does.
            return self._close() if self.unreachable and verdict is Verdict.SUCCESS else None
        if permit.probe:
            self._probing = False
        if verdict is Verdict.NEUTRAL:
            return None
        if verdict is Verdict.SUCCESS and self.state is not BreakerState.CLOSED:
            return self._close()
        if self.state is BreakerState.CLOSED:
            reason = self._count(verdict, now, trip_after or self._config.consecutive_failures)
            if verdict is Verdict.UNREACHABLE:
                return self._open("nothing listens at its address", verdict, now, rng)
            return self._open(reason, verdict, now, rng) if reason and may_open() else None
        return self._open("its probe failed", verdict, now, rng) if permit.probe else None

    def counts(self, now: float) -> tuple[int, int]:
        """Return (successes, failures) of the last window."""
        return self._window.counts(now)

    def well(self, now: float) -> bool:
        """False if it fails too often itself, shut out or not."""
        return self.state is BreakerState.CLOSED and not self._why_trip(now, self._config.consecutive_failures)

    def _count(self, verdict: Verdict, now: float, trip_after: int) -> str:
        """Count one outcome; return why the breaker should open, or ""."""
        self._window.count(verdict is Verdict.SUCCESS, now)
        if verdict is Verdict.SUCCESS:
            self._in_a_row = 0
            return ""
        self._in_a_row += 1
        return self._why_trip(now, trip_after)

    def _why_trip(self, now: float, trip_after: int) -> str:
        if self._in_a_row >= trip_after:
            return f"{self._in_a_row} failures in a row"
        successes, failures = self._window.counts(now)
        total = successes + failures
        if total >= self._config.min_calls and successes < self._config.success_rate * total:
            return f"{failures} of {total} calls failed within {self._config.window_s:g} s"
        return ""

    def _open(self, reason: str, verdict: Verdict, now: float, rng: random.Random) -> Transition:
        self.unreachable = verdict is Verdict.UNREACHABLE
        first_s = self._config.unreachable_s if self.unreachable else self._config.open_s
        # What was looked at before its time is no worse than it was.
        again_s = self._open_s if self._hurried else self._open_s * 2
        self._open_s = min(max(first_s, again_s), self._config.max_open_s)
        self._opened_at, self._hurried = now, False
        # Equal jitter: half is certain, half is drawn, so that clients don't probe in step.
        self.until = now + self._open_s / 2 + rng.random() * self._open_s / 2
        return self._move(BreakerState.OPEN, reason)

    def _close(self) -> Transition:
        self._open_s = 0.0
        self._hurried = False
        self._in_a_row = 0
        self.unreachable = False
        self._window.clear()
        return self._move(BreakerState.CLOSED, "a call succeeded")

    def _move(self, after: BreakerState, reason: str) -> Transition:
        before, self.state, self.reason = self.state, after, reason
        self.generation += 1
        self._probing = False
        return Transition(before, after, reason, self.until if after is BreakerState.OPEN else None)
