"""Whether mass departure is believed. Pure: time comes in as `now`, in seconds.

After trouble with the registry (a lost watch, a failed list, a wiped store) an empty answer most often means that
the registry forgot, not that everybody left. So it is believed only when a list at least one lease time later still
lacks the same instances: by then each living agent has registered again.
"""

from __future__ import annotations

from collections.abc import Collection, Set

__all__ = ["Trust"]


class Trust:
    """Follows which instances are missing but not believed gone."""

    def __init__(self, confirm_s: float) -> None:
        self._confirm_s = confirm_s
        self._trouble = False
        self._doubted: set[str] = set()
        self._confirm_at = 0.0
        # After trouble: until when a mass removal by watch is doubted, how many were known, how many went since.
        self._guard_until = 0.0
        self._guarded = 0
        self._removed = 0

    @property
    def confirm_at(self) -> float | None:
        """When a list decides about the doubted ones; None if none is doubted."""
        return self._confirm_at if self._doubted else None

    def watch_lost(self) -> None:
        """The next list may be that of a store that just came back."""
        self._trouble = True

    def store_lost(self, now: float) -> None:
        """The store is out of reach or lost its history: nobody could register, so a running wait begins anew."""
        self._trouble = True
        self._confirm_at = now + self._confirm_s

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
        if believed and self._trouble:
            self._trouble = False
            self._guard_until = now + self._confirm_s
            self._guarded, self._removed = len(known), 0
        return believed

    def believes_removal(self, agent_id: str, now: float) -> bool:
        """Take in a removal seen by watch; False only if, right after trouble, more than half went that way.

        A store that froze past the leases' time ends them all when it wakes; one agent that leaves, or a few in
        quiet times, are believed at once.
        """
        self._removed += 1
        if now >= self._guard_until or self._removed < 2 or 2 * self._removed <= self._guarded:
            self._doubted.discard(agent_id)
            return True
        if not self._doubted:
            self._confirm_at = now + self._confirm_s
        self._doubted.add(agent_id)
        return False

    def seen(self, agent_id: str) -> None:
        """An instance was written again."""
        self._doubted.discard(agent_id)

    def forget(self) -> None:
        """The index was emptied: nothing is left to protect."""
        self._doubted.clear()
        self._trouble = False
        self._guard_until = 0.0
