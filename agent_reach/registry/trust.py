"""Whether mass departure is believed. Pure: time comes in as `now`, in seconds.

Two things look like everybody leaving when nobody does, and they are doubted:

* **A list** after trouble (a lost watch, a failed list, a wiped store) that lacks more than half: the store may
  have forgotten. It is believed only when a later list still lacks the same instances: one lease time later, and a
  request and a pause between attempts to register. By then each living agent is back.
* **Removals by watch** right after the store was away for long: a store that froze ends, as it wakes, all leases
  whose time went by meanwhile. A living agent renews every third of its lease, so an outage of less than two thirds
  ends none; a restart or a new leader gives every lease its full time again; and a waking etcd ends due leases
  within seconds. So removals are doubted only in the first seconds after two thirds of a lease time without a word
  from the store, with a request that failed meanwhile; and only once more than half went that way. Agents that
  leave in good order in those very seconds can't be told apart: they too stay in use a lease time longer.

Every other removal by watch is believed at once, also after a watch that was lost and came back.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Set

__all__ = ["Trust"]

# etcd looks for due leases twice a second and ends up to 1,000 a second.
_WAKING_S = 5.0


class Trust:
    """Follows which instances are missing but not believed gone."""

    def __init__(self, *, lease_s: float, confirm_s: float) -> None:
        self._lease_s = lease_s
        self._confirm_s = confirm_s
        self._trouble = False
        self._doubted: set[str] = set()
        self._confirm_at = 0.0
        # A request failed since the store was heard of last, and when that was.
        self._silent = False
        self._heard_at = math.inf
        # After a long silence: until when a mass removal by watch is doubted, how many were known, how many went.
        self._guard_until = 0.0
        self._guarded = 0
        self._removed = 0

    @property
    def doubted(self) -> Set[str]:
        """Which instances are missing from the store, but not believed gone."""
        return self._doubted

    @property
    def confirm_at(self) -> float | None:
        """When a list decides about the doubted ones; None if none is doubted."""
        return self._confirm_at if self._doubted else None

    def watch_lost(self) -> None:
        """The next list may be that of a store that just came back."""
        self._trouble = True

    def store_lost(self, now: float) -> None:
        """The store is out of reach or lost its history: nobody could register, so a running wait begins anew."""
        self._trouble = self._silent = True
        self._confirm_at = now + self._confirm_s

    def heard(self, known: int, now: float) -> None:
        """The store spoke, by list or by watch; `known` instances were there, what it said isn't taken in yet."""
        if self._silent and now - self._heard_at >= self._lease_s * 2 / 3:
            self._guard_until = now + _WAKING_S
            self._guarded, self._removed = known, 0
        self._silent = False
        self._heard_at = now

    def believes_list(self, known: Set[str], listed: Collection[str], now: float) -> bool:
        """Take in a list; True if what it lacks may be dropped."""
        missing = known - set(listed)
        if self._doubted and now >= self._confirm_at:
            believed = True
        elif self._doubted:
            believed = not missing
        else:
            believed = not (self._trouble and 2 * len(missing) > len(known))
            if not believed:
                self._confirm_at = now + self._confirm_s
        self._doubted = set() if believed else set(missing)
        if believed:
            self._trouble = False
        return believed

    def believes_removal(self, agent_id: str, now: float) -> bool:
        """Take in a removal seen by watch; False only if more than half went that way as a store woke.

        One agent that leaves, or a few in quiet times, are believed at once.
        """
        self._removed += 1
        if now >= self._guard_until or self._removed < 2 or 2 * self._removed <= self._guarded:
            self._doubted.discard(agent_id)
            return True
        if not self._doubted:
            self._confirm_at = now + self._confirm_s
        self._doubted.add(agent_id)
        return False

    def confirmed(self) -> None:
        """What is known is what the store holds; no trouble is left to explain what goes from here on."""
        self._trouble = False

    def seen(self, agent_id: str) -> None:
        """An instance was written again."""
        self._doubted.discard(agent_id)

    def forget(self) -> None:
        """The index was emptied: nothing is left to protect."""
        self._doubted.clear()
        self._trouble = self._silent = False
        self._guard_until = 0.0
