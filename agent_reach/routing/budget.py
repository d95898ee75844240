"""What a call tree may still spend on retries."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["RetryAllowance"]


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
