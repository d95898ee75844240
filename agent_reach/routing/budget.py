"""What may still be spent on retries: by a call tree, and by all calls of a capability."""

from __future__ import annotations

from dataclasses import dataclass

from agent_reach.routing.stats import SlidingPair

__all__ = ["RetryAllowance", "RetryBudget"]


@dataclass(slots=True)
class RetryAllowance:
    """A purse of retries. It is split, never copied: what goes along with an attempt is out of the purse until the
    answer says how much of it is left. So however deep the tree, it retries as often as its root allowed, and a
    leaf runs at most 1 + that many times per root call.
    """

    left: int

    def take(self) -> bool:
        """Spend one retry; False when none is left."""
        if self.left < 1:
            return False
        self.left -= 1
        return True

    def lend(self, *, last: bool) -> int:
        """Hand a part down: half, rounded down, so that we can retry too; all of it to the last attempt."""
        part = self.left if last else self.left // 2
        self.left -= part
        return part

    def give_back(self, part: int) -> None:
        """Take back what was lent and not spent."""
        self.left += part


class RetryBudget:
    """Retries of all calls of a capability together: within the last `window_s` seconds a share of its calls, and
    `least` at any rate (Envoy `retry_budget`; finagle `RetryBudget.scala`, which adds both).

    When everything fails the load grows by that share, not by a factor. A retry that succeeded earns two more, so
    that they go on while at least one in three succeeds: then they help more than they harm.
    """

    __slots__ = ("_least", "_outcomes", "_ratio", "_spent")

    _EARNED = 3

    def __init__(self, ratio: float, least: int, window_s: float) -> None:
        self._ratio = ratio
        self._least = least
        # Calls, and retries.
        self._spent = SlidingPair(window_s)
        # Retries that succeeded.
        self._outcomes = SlidingPair(window_s)

    def call_began(self, now: float) -> None:
        """Count a call."""
        self._spent.count(True, now)

    def left(self, now: float, ratio: float | None = None) -> float:
        """How many retries may be made now; below 1 none. `ratio` stands for the configured share."""
        calls, retries = self._spent.counts(now)
        succeeded, _ = self._outcomes.counts(now)
        ratio = self._ratio if ratio is None else ratio
        return max(self._least, ratio * calls) + self._EARNED * succeeded - retries

    def paid_off(self, now: float) -> None:
        """A retry succeeded."""
        self._outcomes.count(True, now)

    def spend(self, now: float) -> None:
        """Count a retry."""
        self._spent.count(False, now)
