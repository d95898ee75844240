"""A capability of which every call fails, whichever instance it goes to: what all of them depend on is down.

Sending all calls there helps nobody: each fails, and its retries make the trouble last. So calls wait, while one
at a time goes out to see whether it is over. Users of routers that fail at once instead ask for this
(BerriAI/litellm#3646).

    state       event                                      next state
    UP          so many failures in a row                  DOWN        (calls wait; a probe every half second)
    DOWN        a call succeeds                            RECOVERING  (each success lets two more go)
    RECOVERING  enough succeeded, or some time has passed  UP
    RECOVERING  so many failures in a row                  DOWN
"""

from __future__ import annotations

import enum
import random

__all__ = ["Outage", "OutageState"]

# By chance, at a failure rate of 60 %, once in 27,000 calls; at 100 calls a second an outage is known within 0.2 s.
_IN_A_ROW = 20
# Failures that are further apart have nothing to do with each other.
_TOGETHER_S = 30.0
_PROBE_S = 0.5
# Doubling from 1, this many at once come after seven rounds; whoever bears them bears the rest.
_ENOUGH = 64
_RECOVERY_S = 5.0


class OutageState(enum.Enum):
    """Where it stands."""

    UP = "up"
    DOWN = "down"
    RECOVERING = "recovering"


class Outage:
    """One capability as one client sees it. Times are seconds on the caller's monotonic clock."""

    __slots__ = ("_credits", "_failed_at", "_until", "in_a_row", "state")

    def __init__(self) -> None:
        self.state = OutageState.UP
        self.in_a_row = 0
        self._failed_at = 0.0
        self._credits = 0
        # DOWN: when the next probe goes; RECOVERING: when it is over at the latest.
        self._until = 0.0

    def wait_s(self, now: float) -> float:
        """How long a call that would go out now has to wait; 0 if it may go."""
        if self.state is OutageState.UP:
            return 0.0
        if self.state is OutageState.RECOVERING and (self._credits > 0 or now >= self._until):
            return 0.0
        return max(0.0, self._until - now)

    def sent(self, now: float, rng: random.Random) -> None:
        """A call went out."""
        if self.state is OutageState.DOWN:
            self._until = now + _PROBE_S * (0.5 + rng.random() / 2)
        elif self.state is OutageState.RECOVERING:
            self._credits -= 1

    def succeeded(self, now: float) -> OutageState | None:
        """A call was answered; return the state if that changed it."""
        self.in_a_row = 0
        if self.state is OutageState.DOWN:
            self.state = OutageState.RECOVERING
            self._until = now + _RECOVERY_S
            self._credits = 2
            return self.state
        if self.state is OutageState.RECOVERING:
            self._credits += 2
            if self._credits >= _ENOUGH or now >= self._until:
                self.state = OutageState.UP
                return self.state
        return None

    def failed(self, now: float, rng: random.Random) -> OutageState | None:
        """A call failed, by no fault of its caller; return the state if that changed it."""
        self.in_a_row = self.in_a_row + 1 if now - self._failed_at <= _TOGETHER_S else 1
        self._failed_at = now
        if self.state is not OutageState.DOWN and self.in_a_row >= _IN_A_ROW:
            self.state = OutageState.DOWN
            self._until = now + _PROBE_S * (0.5 + rng.random() / 2)
            return self.state
        return None
