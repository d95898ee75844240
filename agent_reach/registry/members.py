"""Which member of a cluster to ask. Pure: time comes in as `now`, in seconds; used under its owner's lock.

One member is asked for as long as it answers. One that failed is passed over while another hasn't. When all have
failed they are tried in turn: one attempt at a time however many ask, and a pause before each. So an outage costs
a dozen dials in half a minute, and its end is noticed within one pause.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from agent_reach.config import RegistryConfig

__all__ = ["Members"]

# Whoever comes while another's attempt is under way asks again after this: soon after it ended, at no cost.
_ATTEMPT_POLL_S = 0.1


class Members:
    """The members of one cluster, by address, and which of them failed since it last answered."""

    def __init__(self, addresses: Sequence[str], config: RegistryConfig, rng: random.Random) -> None:
        # Clients begin at different members, so that each gets its share.
        first = rng.randrange(len(addresses))
        self._addresses = [*addresses[first:], *addresses[:first]]
        self._config = config
        self._rng = rng
        self._failed: set[str] = set()
        # While all have failed: how many attempts in a row were refused, no further one before, and until when one
        # is under way. Attempts that hang take long enough by themselves, so several may be.
        self._attempts = 0
        self._next_at = 0.0
        self._busy_until = 0.0
        self._last_hung = False

    @property
    def any_left(self) -> bool:
        """True while a member hasn't failed."""
        return len(self._failed) < len(self._addresses)

    def pick(self, now: float) -> str | None:
        """The member to ask; None if all failed and none may be asked before `wait_s`."""
        for address in self._addresses:
            if address not in self._failed:
                return address
        if self.wait_s(now) > 0.0:
            return None
        if self._attempts:
            self._busy_until = now + self._config.request_timeout_s
        # The next attempt takes the next one.
        self._addresses.append(self._addresses.pop(0))
        return self._addresses[-1]

    def wait_s(self, now: float) -> float:
        """Seconds until a member may be asked."""
        if self.any_left:
            return 0.0
        return _ATTEMPT_POLL_S if now < self._busy_until else max(0.0, self._next_at - now)

    def worked(self, address: str) -> None:
        """This member answered."""
        if address in self._failed:
            self._failed.discard(address)
            self._attempts, self._next_at, self._busy_until = 0, 0.0, 0.0

    def failed(self, address: str, now: float) -> None:
        """This member can't be reached, or says that it can't serve."""
        was_known = address in self._failed and not self._last_hung
        self._failed.add(address)
        if self.any_left or (was_known and now >= self._busy_until):
            # Others are left, or it is late news of an attempt that has been counted.
            return
        self._busy_until, self._last_hung = 0.0, False
        self._attempts += 1
        # 2**64 is past any cap; the bound keeps the power from growing for years.
        cap_s = min(self._config.backoff_max_s, self._config.backoff_base_s * 2.0 ** min(self._attempts, 64))
        # At least half of it: the mean pause, not only its end, bounds what an outage costs.
        self._next_at = now + self._rng.uniform(cap_s / 2, cap_s)

    def hung(self, address: str) -> None:
        """This member didn't answer in time; the next attempt need not wait."""
        self._failed.add(address)
        self._attempts, self._next_at, self._busy_until, self._last_hung = 0, 0.0, 0.0, True
