"""Whether another process that holds our agent id lives, told by its lease alone. Pure: times are parameters."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

__all__ = ["Holder"]

# etcd drops the fraction of what is left of a lease, so there may be this much more.
_ROUNDING_S = 1.0
# How often the end of a lease must move before its holder counts as alive. A living holder renews every third of
# its lease, again and again; a restart or a change of leader in etcd lengthens a dead one's lease too, once each.
_PROOFS = 2


@dataclass(frozen=True, slots=True)
class Holder:
    """Another process's entry: its revision, when its lease ends at the latest unless it is renewed, and how often
    it was seen to end later than that, last `renewed_at`; since when it is watched, and the most that was seen left
    of its lease.
    """

    revision: int
    ends_by: float = math.inf
    renewals: int = 0
    renewed_at: float = -math.inf
    first_at: float = math.inf
    most_left_s: float = 0.0

    def seen(self, asked_at: float, answered_at: float, left_s: float) -> Holder:
        """Take in one look: asked and answered when, and how much of the lease was left in between."""
        if left_s <= 0:
            # It ended, or is in its last second. For half a second etcd shows an ended lease's entry, and says 0
            # each time: that proves nothing.
            return self
        ends_by = answered_at + left_s + _ROUNDING_S
        seen = replace(
            self, first_at=min(self.first_at, asked_at), most_left_s=max(self.most_left_s, left_s), ends_by=ends_by
        )
        if asked_at + left_s > self.ends_by:
            return replace(seen, renewals=self.renewals + 1, renewed_at=asked_at)
        return replace(seen, ends_by=min(self.ends_by, ends_by))

    @property
    def lives(self) -> bool:
        """True if it must be alive: renewed again and again, and still after longer than its lease lasts."""
        return self.renewals >= _PROOFS and self.renewed_at - self.first_at >= self.most_left_s
