"""What happens second by second in a few scenarios."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from agent_reach.testing.simulation import Simulation
from tests.simulation.algorithms import ALGORITHMS, OURS
from tests.simulation.running import simulate
from tests.simulation.scenarios import SCENARIOS

__all__ = ["TIMELINES", "Series", "Timeline", "sample"]

Series: TypeAlias = dict[str, list[float | None]]
"""Values by name, one for each bucket of time; None where nothing happened."""

_ROUND_ROBIN, _P2C = "round robin, 3 blind retries", "P2C peak EWMA (Finagle, Linkerd)"


@dataclass(frozen=True, slots=True)
class Timeline:
    """`read` takes a run's values out of its world, given the seconds of a bucket and of the whole run. With
    `apart` each algorithm has a panel of its own. `marks`: when what happens.
    """

    scenario: str
    title: str
    unit: str
    bucket_s: float
    algorithms: tuple[str, ...]
    read: Callable[[Simulation, float, float], Series]
    apart: bool = False
    marks: tuple[tuple[float, str], ...] = ()


def _calls_by_server(sim: Simulation, bucket_s: float, length_s: float) -> Series:
    return {name: _rate(sim, name, bucket_s, length_s) for name in sim.servers}


def _calls_to_first(sim: Simulation, bucket_s: float, length_s: float) -> Series:
    return {"": _rate(sim, next(iter(sim.servers)), bucket_s, length_s)}


def _rate(sim: Simulation, agent_id: str, bucket_s: float, length_s: float) -> list[float | None]:
    return [count / bucket_s for count in sim.metrics.attempts_over_time(agent_id, length_s, bucket_s)]


def _success(sim: Simulation, bucket_s: float, length_s: float) -> Series:
    buckets = range(math.ceil(length_s / bucket_s))
    parts = [sim.metrics.summary(from_s=b * bucket_s, until_s=(b + 1) * bucket_s) for b in buckets]
    return {"": [part.success_share * 100 if part.calls else None for part in parts]}


TIMELINES: dict[str, Timeline] = {
    line.scenario: line
    for line in (
        Timeline(
            "two-die",
            "Calls sent to each of five instances, two of which die",
            "calls per second",
            1.0,
            (OURS, _ROUND_ROBIN),
            _calls_by_server,
            apart=True,
            marks=((10.0, "1 dies"), (30.0, "2 is lost")),
        ),
        Timeline(
            "half-fail",
            "Success while two of four instances fail",
            "% of the calls that began",
            2.0,
            (OURS, _P2C, _ROUND_ROBIN),
            _success,
            marks=((15.0, "two fail"), (30.0, "well again")),
        ),
        Timeline(
            "one-slow-of-eleven",
            "Calls sent to the one of eleven instances that takes 2 s",
            "calls per second",
            2.0,
            (OURS, _P2C, _ROUND_ROBIN),
            _calls_to_first,
        ),
    )
}


def sample(scenario: str, algorithm: str, seed: int, length_s: float | None = None) -> Series:
    """Run a scenario and return its values over time."""
    line = TIMELINES[scenario]
    sim = simulate(scenario, ALGORITHMS[algorithm], seed, length_s)
    return line.read(sim, line.bucket_s, SCENARIOS[scenario].length_s if length_s is None else length_s)
