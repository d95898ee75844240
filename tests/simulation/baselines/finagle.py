"""Two parts of Finagle that `p2c_peak_ewma.py` is built of: failure accrual and the retry budget.

Source: twitter/finagle, read in its repository under `finagle-core/src/main/scala/com/twitter/finagle/`:
`liveness/FailureAccrualFactory.scala` and `FailureAccrualPolicy.scala` (with the defaults), `util/Ema.scala`,
`Backoff.scala` (`equalJittered`), `service/RetryBudget.scala`.

Failure accrual of one endpoint:
- Two policies at once, either of which marks it dead: (1) the moving average of success (weight exp(-dt / 30 s),
  the first sample as it is) is below 0.8, at least 30 s after the endpoint was built or revived, with at least 5
  requests in the last 30 s (in 5 slices); (2) 5 failures in a row.
- Dead for 5 s the first time, then 5 to 10, 10 to 20 s, ... (half of it jitter), 300 s at the most; each policy
  counts its own times, and the longer wins.
- Then one request is the probe, and no other is let in before that ends. It succeeds: alive, and all history, the
  dead times too, begins anew. It fails: the policies are asked as ever; if neither marks it dead, the next is the
  probe. What is neither (cancelled, a fault of this process): the next is the probe.
- Failures that arrive while it is dead, or before the probe is sent, count for nothing.

Retry budget: each call puts 0.2 retries in, each retry takes 1 out, both are forgotten after 10 s (in 10 slices);
and 100 are always there (10/s x 10 s).
"""

from __future__ import annotations

import enum
import math
import random

__all__ = ["Accrual", "RetryBudget", "WindowedSum"]

_RATE, _RATE_WINDOW_S, _LEAST_REQUESTS = 0.8, 30.0, 5
_IN_A_ROW = 5
_DEAD_S, _MAX_DEAD_S = 5.0, 300.0
_BUDGET_TTL_S, _PER_CALL, _RESERVE = 10.0, 0.2, 100.0


class WindowedSum:
    """A sum over about the last `window_s` seconds, which forgets a slice at a time."""

    __slots__ = ("_newest", "_slice_s", "_slices", "_total")

    def __init__(self, window_s: float, slices: int) -> None:
        self._slice_s = window_s / slices
        self._slices = [0.0] * slices
        self._newest = 0
        self._total = 0.0

    def add(self, amount: float, now: float) -> None:
        """Add to the newest slice."""
        self._turn(now)
        self._slices[self._newest % len(self._slices)] += amount
        self._total += amount

    def value(self, now: float) -> float:
        """Return the sum as of `now`."""
        self._turn(now)
        return self._total

    def _turn(self, now: float) -> None:
        newest = int(now / self._slice_s)
        if newest <= self._newest:
            return
        count = len(self._slices)
        for passed in range(max(self._newest + 1, newest - count + 1), newest + 1):
            self._slices[passed % count] = 0.0
        self._newest = newest
        self._total = sum(self._slices)


class RetryBudget:
    """How many retries all calls together may make."""

    __slots__ = ("_balance",)

    def __init__(self) -> None:
        self._balance = WindowedSum(_BUDGET_TTL_S, 10)

    def deposit(self, now: float) -> None:
        """A call begins."""
        self._balance.add(_PER_CALL, now)

    def withdraw(self, now: float) -> bool:
        """Take one retry; False if there is none."""
        # Fifths don't add up exactly in floats.
        if self._balance.value(now) + _RESERVE < 1.0 - 1e-9:
            return False
        self._balance.add(-1.0, now)
        return True


class _Deaths:
    """The dead times of one policy: equal jitter, doubling."""

    __slots__ = ("_count",)

    def __init__(self) -> None:
        self._count = 0

    def next_s(self, rng: random.Random) -> float:
        """Return how long it is dead this time."""
        self._count += 1
        if self._count == 1:
            return _DEAD_S
        half_s = _DEAD_S * 2.0 ** min(self._count - 2, 10)
        return min(_MAX_DEAD_S, half_s + rng.random() * half_s)


class _State(enum.Enum):
    ALIVE = enum.auto()
    DEAD = enum.auto()
    PROBE_OPEN = enum.auto()
    PROBE_CLOSED = enum.auto()


class Accrual:
    """Whether one endpoint is to be asked."""

    __slots__ = (
        "_at",
        "_average",
        "_deaths_in_a_row",
        "_deaths_of_rate",
        "_in_a_row",
        "_requests",
        "_start",
        "_state",
        "_until",
    )

    def __init__(self, now: float) -> None:
        self._state = _State.ALIVE
        self._until = 0.0
        self._begin(now)

    def open(self, now: float) -> bool:
        """Say whether it is alive or waits for its probe."""
        if self._state is _State.ALIVE:
            return True
        self._wake(now)
        return self._state is _State.PROBE_OPEN

    def sent(self, now: float) -> None:
        """A request goes to it."""
        self._wake(now)
        if self._state is _State.PROBE_OPEN:
            self._state = _State.PROBE_CLOSED

    def succeeded(self, now: float) -> None:
        """A request succeeded."""
        if self._state is not _State.ALIVE:
            self._wake(now)
            if self._state is _State.PROBE_CLOSED:
                self._state = _State.ALIVE
                self._begin(now)
        self._in_a_row = 0
        self._sample(1.0, now)

    def failed(self, now: float, rng: random.Random) -> None:
        """A request failed."""
        self._wake(now)
        if self._state not in (_State.ALIVE, _State.PROBE_CLOSED):
            return
        self._sample(0.0, now)
        self._in_a_row += 1
        dead_s = 0.0
        old_enough = now - self._start >= _RATE_WINDOW_S
        if old_enough and self._average < _RATE and self._requests.value(now) >= _LEAST_REQUESTS:
            dead_s = self._deaths_of_rate.next_s(rng)
        if self._in_a_row >= _IN_A_ROW:
            dead_s = max(dead_s, self._deaths_in_a_row.next_s(rng))
        if dead_s > 0:
            self._state = _State.DEAD
            self._until = now + dead_s
        elif self._state is _State.PROBE_CLOSED:
            self._state = _State.PROBE_OPEN

    def ignored(self) -> None:
        """A request ended in a way that says nothing of it."""
        if self._state is _State.PROBE_CLOSED:
            self._state = _State.PROBE_OPEN

    def _begin(self, now: float) -> None:
        self._start = now
        self._in_a_row = 0
        self._average: float = 0.0
        self._at: float | None = None
        self._requests = WindowedSum(_RATE_WINDOW_S, 5)
        self._deaths_of_rate = _Deaths()
        self._deaths_in_a_row = _Deaths()

    def _wake(self, now: float) -> None:
        if self._state is _State.DEAD and now >= self._until:
            self._state = _State.PROBE_OPEN

    def _sample(self, success: float, now: float) -> None:
        keep = 0.0 if self._at is None else math.exp(-(now - self._at) / _RATE_WINDOW_S)
        self._average = success * (1.0 - keep) + self._average * keep
        self._at = now
        self._requests.add(1.0, now)
