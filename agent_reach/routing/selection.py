"""Power of two choices (Mitzenmacher 2001; finagle `P2CPick.scala`): draw two, send to the better.

The cost of a pick doesn't grow with the number of candidates, unless nearly none of them can be used.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from agent_reach.routing.instance import Candidate
from agent_reach.routing.scoring import PeakEwmaScorer

__all__ = ["pick"]

# With half of the candidates unusable, five draws of two all miss in 1 of 1,000 picks; then all are looked at.
_DRAWS = 5


def pick(
    candidates: Sequence[Candidate],
    usable: Callable[[Candidate], bool],
    scorer: PeakEwmaScorer,
    now: float,
    rng: random.Random,
) -> Candidate | None:
    """Return the better of two usable candidates drawn at random; None if none is usable."""
    count = len(candidates)
    if count < 2:
        return candidates[0] if count and usable(candidates[0]) else None
    for _ in range(_DRAWS):
        first = int(rng.random() * count)
        second = int(rng.random() * (count - 1))
        if second >= first:
            second += 1
        one, other = candidates[first], candidates[second]
        one_usable, other_usable = usable(one), usable(other)
        if one_usable and other_usable:
            return _better(one, other, scorer, now, rng)
        if one_usable or other_usable:
            return one if one_usable else other
    left = [candidate for candidate in candidates if usable(candidate)]
    if not left:
        return None
    one = left[int(rng.random() * len(left))]
    return _better(one, left[int(rng.random() * len(left))], scorer, now, rng)


def _better(one: Candidate, other: Candidate, scorer: PeakEwmaScorer, now: float, rng: random.Random) -> Candidate:
    """The better of two.

    One whose breaker waits for its probe comes first, or it would never be heard of again: its failures made it
    look slow for longer than it is shut out. One that warms up takes part in its share of the draws only.
    """
    if one.instance.breaker.probe_due(now) != other.instance.breaker.probe_due(now):
        return one if one.instance.breaker.probe_due(now) else other
    assumed_s = scorer.assumed_s((one, other), now)
    its, others = scorer.score(one, now, assumed_s), scorer.score(other, now, assumed_s)
    # Relative to its rival: where all are new, nobody is held back.
    share = min(its.warm, others.warm) / max(its.warm, others.warm)
    if share < 1 and rng.random() >= share:
        return one if its.warm > others.warm else other
    return one if its.cost <= others.cost else other
