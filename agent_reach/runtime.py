"""What every part of one client shares."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from agent_reach.config import ReachConfig
from agent_reach.events import Event
from agent_reach.ports import Clock, Dialer

__all__ = ["Runtime"]


@dataclass(frozen=True, slots=True)
class Runtime:
    """Settings, time, randomness, where events go, and who dials a url."""

    config: ReachConfig
    clock: Clock
    rng: random.Random
    emit: Callable[[Event], None]
    dialer_for: Callable[[str], Dialer]
