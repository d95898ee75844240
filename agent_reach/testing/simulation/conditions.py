"""What a server's faults mean at a given moment."""

from __future__ import annotations

import math
import random
from typing import TypeAlias

from agent_reach.testing.simulation.faults import (
    BlackHole,
    Busy,
    DropAfterExecuting,
    FailFast,
    FailSlow,
    Fault,
    Hang,
    Pauses,
    Refuse,
    SharedDownstream,
    Slow,
    WarmUp,
)

__all__ = ["Conditions", "Fate"]

Fate: TypeAlias = Hang | FailFast | FailSlow | Busy | DropAfterExecuting | SharedDownstream
"""A fault that decides what becomes of a request."""


class Conditions:
    """One server's faults, sorted by what they act on."""

    __slots__ = ("_doors", "_fates", "_pauses", "_slow", "_warm_ups", "any", "paces")

    def __init__(self) -> None:
        self._doors: list[Refuse | BlackHole] = []
        self._fates: list[Fate] = []
        self._slow: list[Slow] = []
        self._warm_ups: list[WarmUp] = []
        self._pauses: list[Pauses] = []
        # So that a healthy server pays one look: is there anything, and does anything change how long work takes?
        self.any = False
        self.paces = False

    def add(self, fault: Fault) -> None:
        """Take in a fault."""
        self.any = True
        match fault:
            case Refuse() | BlackHole():
                self._doors.append(fault)
            case Slow():
                self._slow.append(fault)
            case WarmUp():
                self._warm_ups.append(fault)
            case Pauses():
                self._pauses.append(fault)
            case _:
                self._fates.append(fault)
        self.paces = bool(self._slow or self._warm_ups or self._pauses)

    def door(self, now: float) -> Refuse | BlackHole | None:
        """What meets who connects."""
        for fault in self._doors:
            if fault.from_s <= now < fault.until_s:
                return fault
        return None

    def fate(self, now: float, rng: random.Random) -> Fate | None:
        """What becomes of a request, if not the usual."""
        for fault in self._fates:
            # Each draws, in its interval or not, so that the end of one doesn't change whom the next one hits.
            if rng.random() < fault.share and fault.from_s <= now < fault.until_s:
                return fault
        return None

    def factor(self, now: float, started: float) -> float:
        """How many times the usual time work takes that begins now."""
        factor = 1.0
        for slow in self._slow:
            if slow.from_s <= now < slow.until_s:
                factor *= slow.factor
        for warm_up in self._warm_ups:
            age = now - started
            if warm_up.from_s <= now < warm_up.until_s and age < warm_up.for_s:
                factor *= warm_up.factor + (1.0 - warm_up.factor) * age / warm_up.for_s
        return factor

    def awake(self, now: float) -> float:
        """`now`, or the end of the pause that it lies in."""
        moved = True
        while moved:
            moved = False
            for pause in self._pauses:
                begin = _latest(pause, now)
                if now < begin + pause.for_s:
                    now, moved = begin + pause.for_s, True
        return now

    def ends(self, now: float, work_s: float) -> float:
        """When `work_s` seconds of work end that begin now: it stands still in pauses."""
        while True:
            now = self.awake(now)
            stop = min((_next(pause, now) for pause in self._pauses), default=math.inf)
            if now + work_s <= stop:
                return now + work_s
            work_s -= stop - now
            now = stop


def _latest(pause: Pauses, now: float) -> float:
    """The beginning of the latest pause at or before `now`; minus infinity if there was none."""
    turn = _turn(pause, now)
    if pause.until_s < math.inf:
        turn = min(turn, math.ceil((pause.until_s - pause.from_s) / pause.every_s) - 1)
    return pause.from_s + turn * pause.every_s if turn >= 0 else -math.inf


def _next(pause: Pauses, now: float) -> float:
    """The beginning of the next pause after `now`; infinity if none comes."""
    begin = pause.from_s + max(0, _turn(pause, now) + 1) * pause.every_s
    return begin if begin < pause.until_s else math.inf


def _turn(pause: Pauses, now: float) -> int:
    # 6 x 0.1 + 0.1 is not 7 x 0.1: without the grain, work that stops at a pause would never get into it.
    return math.floor((now - pause.from_s) / pause.every_s + 1e-9)
