"""Which instance holds a conversation.

Weighted rendezvous hashing (Thaler and Ravishankar 1998; weighted: Schindelhauer and Schomaker 2005): every caller
finds the same owner without talking to the others, and when an instance leaves only its own conversations move.
The owner found is remembered, so that a newcomer doesn't take over what it knows nothing of.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import TypeAlias

from cachetools import LRUCache

from agent_reach.routing.instance import Candidate

__all__ = ["Contexts", "owner_by_hash", "owner_of"]

Owner: TypeAlias = tuple[str, str]
"""Agent id and incarnation: a restarted process holds no conversation any more."""


def owner_by_hash(context_id: str, candidates: Sequence[Candidate]) -> Candidate:
    """Return the candidate that a conversation belongs to, of those there are."""
    return max(candidates, key=lambda candidate: _claim(context_id, candidate))


def _claim(context_id: str, candidate: Candidate) -> float:
    # The length goes in front, or "a" with "bc" would be "ab" with "c".
    text = f"{len(context_id)}:{context_id}{candidate.agent_id}"
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    share = (int.from_bytes(digest, "big") + 1) / (2**64 + 1)
    return -candidate.instance.info.weight / math.log(share)


class Contexts:
    """Who answered a conversation last, by capability; bounded, the least used are forgotten first."""

    __slots__ = ("_owners",)

    def __init__(self, remembered: int) -> None:
        self._owners: LRUCache[tuple[str, str], Owner] = LRUCache(remembered)

    def owner(self, capability: str, context_id: str) -> Owner | None:
        """Return who holds it, None if that isn't known."""
        return self._owners.get((capability, context_id))

    def remember(self, capability: str, context_id: str, candidate: Candidate) -> None:
        """Note that `candidate` answered."""
        self._owners[capability, context_id] = owner_of(candidate)


def owner_of(candidate: Candidate) -> Owner:
    """Return what a candidate is remembered by."""
    return candidate.agent_id, candidate.instance.info.incarnation
