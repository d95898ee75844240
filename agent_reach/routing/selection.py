"""Which of the usable candidates gets a call: the best of a few, each in turn, or by weight.

The best of a few drawn at random: Mitzenmacher's power of two choices (2001; finagle `P2CPick.scala`), with more
than two, so that of a handful the best is found. The cost of a pick doesn't grow with the number of candidates,
unless nearly none of them can be used.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from agent_reach.routing.instance import Candidate
from agent_reach.routing.scoring import Scorer

__all__ = ["best", "cheapest", "in_turn", "pick", "weighted"]


def pick(
    candidates: Sequence[Candidate],
    usable: Callable[[Candidate], bool],
    scorer: Scorer,
    now: float,
    rng: random.Random,
    choices: int,
) -> Candidate | None:
    """Return the best of `choices` usable candidates drawn at random; None if none is usable."""
    count = len(candidates)
    if count > choices:
        # Neighbours from a place drawn at random would always meet the same rivals.
        drawn = [candidates[place] for place in _draw(count, choices, rng)]
        left = [candidate for candidate in drawn if usable(candidate)]
        if left:
            return cheapest(left, scorer, now, rng)
    left = [candidate for candidate in candidates if usable(candidate)]
    if len(left) > choices:
        left = rng.sample(left, choices)
    return cheapest(left, scorer, now, rng) if left else None


def _draw(count: int, choices: int, rng: random.Random) -> set[int]:
    """Return `choices` different places out of `count`."""
    places: set[int] = set()
    while len(places) < choices:
        places.add(int(rng.random() * count))
    return places


def cheapest(drawn: Sequence[Candidate], scorer: Scorer, now: float, rng: random.Random) -> Candidate:
    """The best of a few.

    One whose breaker waits for its probe comes first, or it would never be heard of again: its failures made it
    look slow for longer than it is shut out. One that warms up takes part in its share of the draws only.
    """
    if len(drawn) == 1:
        return drawn[0]
    shares = []
    for candidate in drawn:
        if candidate.instance.breaker.probe_due(now):
            return candidate
        shares.append(scorer.warm(candidate, now))
    warmest = max(shares)
    chosen, least, equals = None, 0.0, 1
    for candidate, share, cost in zip(drawn, shares, scorer.costs(drawn, now), strict=True):
        # Relative to its warmest rival: where all are new, nobody is held back.
        if share < warmest and rng.random() >= share / warmest:
            continue
        if chosen is None or cost < least:
            chosen, least, equals = candidate, cost, 1
        elif cost == least:
            equals += 1
            if rng.random() * equals < 1:
                chosen = candidate
    # The warmest always takes part.
    assert chosen is not None
    return chosen


def best(
    candidates: Sequence[Candidate],
    usable: Callable[[Candidate], bool],
    scorer: Scorer,
    now: float,
    rng: random.Random,
    count: int,
    choices: int,
) -> list[Candidate]:
    """Return the best `count` of `choices` times as many usable candidates drawn at random, the best first."""
    left = [candidate for candidate in candidates if usable(candidate)]
    drawn = rng.sample(left, min(count * choices, len(left)))
    costs = scorer.costs(drawn, now)
    return [drawn[place] for place in sorted(range(len(drawn)), key=costs.__getitem__)][:count]


def in_turn(candidates: Sequence[Candidate], usable: Callable[[Candidate], bool]) -> Candidate | None:
    """Return the usable candidate whose latest turn is longest ago.

    A counter over places in the list would give whoever stands behind one that is out the turns of both.
    """
    return min((c for c in candidates if usable(c)), key=lambda candidate: candidate.learnt.turn, default=None)


def weighted(
    candidates: Sequence[Candidate],
    usable: Callable[[Candidate], bool],
    scorer: Scorer,
    now: float,
    rng: random.Random,
) -> Candidate | None:
    """Return a usable candidate drawn by its announced weight and by how warm it is."""
    left = [candidate for candidate in candidates if usable(candidate)]
    if not left:
        return None
    return rng.choices(left, [c.instance.info.weight * scorer.warm(c, now) for c in left])[0]
