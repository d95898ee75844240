"""How near an instance is: zones are named "region/zone"."""

from __future__ import annotations

from collections.abc import Sequence

from agent_reach.routing.instance import Candidate

__all__ = ["distance", "rings"]


def distance(mine: str | None, other: str | None) -> int:
    """0 in the same zone, 1 in the same region, 2 elsewhere or unknown."""
    if mine is None or other is None:
        return 2
    if mine == other:
        return 0
    return 1 if mine.partition("/")[0] == other.partition("/")[0] else 2


def rings(candidates: Sequence[Candidate], mine: str | None) -> tuple[tuple[Candidate, ...], ...]:
    """Group candidates by distance, nearest first, no empty groups; one group for who doesn't know its zone."""
    if mine is None:
        return (tuple(candidates),)
    groups: tuple[list[Candidate], ...] = ([], [], [])
    for candidate in candidates:
        groups[distance(mine, candidate.instance.info.zone)].append(candidate)
    return tuple(tuple(group) for group in groups if group)
