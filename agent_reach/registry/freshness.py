"""How long what is known of the registry may be relied on. Pure: time comes in as `now`, in seconds.

    starting -> fresh <-> stale -> expired
                  ^                   |
                  +-------------------+

A proof makes it fresh, unless agents are missing that aren't believed gone. Nothing proved for `refresh_s` and a
bit makes it stale, stale for longer than `stale_grace_s` makes it expired.
"""

from __future__ import annotations

import math
import random
from typing import Literal, TypeAlias

from agent_reach.config import RegistryConfig

__all__ = ["Freshness", "ViewStatus"]

ViewStatus: TypeAlias = Literal["starting", "fresh", "stale", "expired"]

# A list that decides about missing agents comes up to this much later, so that not every client lists at once.
_CONFIRM_JITTER_S = 1.0


class Freshness:
    """Follows the last proof, and says when to refresh next."""

    def __init__(self, config: RegistryConfig, rng: random.Random) -> None:
        self._config = config
        self._rng = rng
        self.status: ViewStatus = "starting"
        # When the last proof came.
        self.proof_at: float | None = None
        self.refresh_at = 0.0
        self.stale_since = 0.0
        self._fresh_until = 0.0
        # From when a list decides about missing agents, and when ours comes.
        self._confirm_at = self._decide_at = math.inf

    def next_at(self) -> float:
        """When to look again: the next refresh is due, or time changes the status."""
        if self.status == "fresh":
            return min(self.refresh_at, self._fresh_until)
        if self.status == "stale":
            return min(self.refresh_at, self._expires_at)
        return self.refresh_at

    def prove(self, now: float, confirm_at: float | None) -> None:
        """A refresh proved what is known; but a list at `confirm_at`, if set, decides about missing agents."""
        self.refresh_at = math.inf
        self.hear(now, confirm_at)
        self.refresh_by(self._fresh_until)

    def hear(self, now: float, confirm_at: float | None) -> None:
        """The watch said something, so what is known was right just now. The next refresh comes all the same."""
        self.proof_at = now
        self._fresh_until = now + self._config.refresh_s + self._rng.uniform(0.0, self._config.refresh_jitter_s)
        if confirm_at is None:
            self.status = "fresh"
            return
        if confirm_at != self._confirm_at:
            # Drawn once for each: the least of many draws would be the same for all clients.
            self._confirm_at = confirm_at
            self._decide_at = confirm_at + self._rng.uniform(0.0, _CONFIRM_JITTER_S)
        self.refresh_by(self._decide_at)
        self._grow_stale(now)

    def recall(self, now: float, age_s: float) -> None:
        """What is known is from a time when this process didn't run, and was proved `age_s` seconds ago."""
        self.proof_at = now - age_s
        self._grow_stale(now)

    def age(self, now: float) -> None:
        """Let knowledge grow old that nothing proved."""
        if self.status == "fresh" and now >= self._fresh_until:
            self._grow_stale(now)
        if self.status == "stale" and now >= self._expires_at:
            self.status = "expired"

    @property
    def _expires_at(self) -> float:
        # What is proved again and again doesn't expire, though agents are missing that aren't believed gone.
        return max(self.stale_since, self.proof_at or self.stale_since) + self._config.stale_grace_s

    def refresh_by(self, at: float) -> None:
        """Refresh at `at` or sooner."""
        self.refresh_at = min(self.refresh_at, at)

    def part_ways(self, now: float) -> None:
        """Clients start together, or come back together after an outage: let each refresh at its own time."""
        latest_s = self._config.refresh_s + self._config.refresh_jitter_s
        self.refresh_by(now + self._rng.uniform(self._config.refresh_s / 3, latest_s))

    def _grow_stale(self, now: float) -> None:
        if self.status in ("fresh", "starting"):
            self.status = "stale"
            self.stale_since = now
