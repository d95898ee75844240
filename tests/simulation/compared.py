"""Worlds that can be built in the simulator and of real processes, and what came of their calls."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from agent_reach.errors import Attempt
from agent_reach.testing.simulation import LogNormal, quantile

__all__ = ["P50_WITHIN", "SUCCESS_WITHIN", "Arrival", "Called", "Figures", "Trouble", "World", "differences"]

# What was promised: success within a hundredth of all calls, the median within a fifth.
SUCCESS_WITHIN, P50_WITHIN = 0.01, 0.20

SERVICE = LogNormal(0.2, 0.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """The second agent fails at once, or with `slower` takes so many times as long, for calls that begin then."""

    from_s: float
    until_s: float
    slower: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """`agents` that run `slots` calls at a time, `clients` that make `per_s` calls a second in all, for `length_s`.

    The first agent is killed at `kill_s`, and stays registered until its lease of `lease_ttl_s` is over. With
    `unsafe` calls mustn't be repeated. All times are seconds.
    """

    name: str
    title: str
    length_s: float = 22.0
    agents: int = 4
    slots: int = 4
    clients: int = 3
    # A call costs 9 ms of processor time on a slow core, on both sides together: a quarter of it. At twice as many,
    # half as long, real medians were 5 to 15 % longer than simulated ones, and that was the machine.
    per_s: float = 30.0
    service: LogNormal = SERVICE
    unsafe: bool = False
    kill_s: float | None = None
    trouble: Trouble | None = None
    lease_ttl_s: float = 15.0

    @property
    def load(self) -> float:
        """The share of all slots that is busy while nothing is wrong."""
        mean_s = self.service.median_s * math.exp(self.service.sigma**2 / 2)
        return self.per_s * mean_s / (self.agents * self.slots)

    def agent_ids(self) -> list[str]:
        """The ids of its agents, the same in both."""
        return [f"work-{number}" for number in range(1, self.agents + 1)]


class Arrival(NamedTuple):
    """A call comes at `time_s` to a client, the first being 0."""

    time_s: float
    client: int


@dataclass(frozen=True, slots=True)
class Called:
    """One call that came at `started_s` and took `took_s` seconds; `failure` is its error's class, None if none."""

    started_s: float
    took_s: float
    failure: str | None
    attempts: tuple[Attempt, ...]


@dataclass(frozen=True, slots=True)
class Figures:
    """Calls in figures. Times are seconds, and of the answered calls; `sent_to` counts attempts by agent id."""

    calls: int
    success: float
    p50_s: float
    p90_s: float
    p99_s: float
    attempts: float
    sent_to: Mapping[str, int]
    failures: Mapping[str, int]

    def share_of(self, agent_id: str) -> float:
        """The part of all attempts that went to an agent, 0 if there were none."""
        return self.sent_to.get(agent_id, 0) / max(1, sum(self.sent_to.values()))

    @classmethod
    def of(cls, calls: Sequence[Called]) -> Figures:
        """Sum up calls, at least one."""
        took = [call.took_s for call in calls if call.failure is None]
        sent_to = Counter(attempt.agent_id for call in calls for attempt in call.attempts)
        return cls(
            len(calls),
            len(took) / len(calls),
            quantile(took, 0.5),
            quantile(took, 0.9),
            quantile(took, 0.99),
            sent_to.total() / len(calls),
            sent_to,
            Counter(call.failure for call in calls if call.failure is not None),
        )


def differences(real: Figures, simulated: Figures) -> list[str]:
    """Say where they differ by more than was promised; nothing if they agree."""
    found = []
    # A rounding error short of the bound is not beyond it.
    if not abs(real.success - simulated.success) <= SUCCESS_WITHIN + 1e-9:
        found.append(f"success: real {real.success:.2%}, simulated {simulated.success:.2%}")
    if not abs(real.p50_s / simulated.p50_s - 1) <= P50_WITHIN + 1e-9:
        found.append(f"p50: real {real.p50_s * 1000:.1f} ms, simulated {simulated.p50_s * 1000:.1f} ms")
    return found
