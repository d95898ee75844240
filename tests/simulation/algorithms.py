"""Who competes."""

from __future__ import annotations

import random

from agent_reach.testing.simulation import AgentReach, Algorithm, AlgorithmFactory
from tests.simulation.baselines import BASELINES

__all__ = ["ALGORITHMS", "OURS"]

OURS = "Agent-Reach"


def _ours(rng: random.Random, zone: str | None) -> Algorithm:
    return AgentReach(rng, zone=zone)


ALGORITHMS: dict[str, AlgorithmFactory] = {OURS: _ours, **BASELINES}
