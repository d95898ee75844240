"""What became of each call, and whether any was lost."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

__all__ = ["Ended", "Facts", "Killed", "Outage", "Tally", "problems"]

# How long after a kill its last calls may end: the connection breaks at once, but a busy machine tells late.
_KILL_SLACK_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A call that ended. `agent_id` and `url` are the last instance tried; times are monotonic seconds."""

    capability: str
    outcome: Literal["ok", "failed", "unknown"]
    started_at: float
    ended_at: float
    attempts: int = 1
    agent_id: str = ""
    url: str = ""
    error: str = ""


@dataclass(frozen=True, slots=True)
class Killed:
    """An instance that was killed, and when."""

    agent_id: str
    at: float


@dataclass(frozen=True, slots=True)
class Outage:
    """When etcd was away."""

    since: float
    until: float


@dataclass(slots=True)
class Facts:
    """What was done to the agents. `newcomers`: the instances that came later, by agent id and URL."""

    killed: Killed | None = None
    outage: Outage | None = None
    newcomers: list[tuple[str, str]] = field(default_factory=list)


class Tally:
    """Counts the calls."""

    def __init__(self) -> None:
        self.started = 0
        self.calls: list[Ended] = []

    def of(self, capability: str | None = None, outcome: str | None = None) -> list[Ended]:
        """The calls that ended, of one capability or with one outcome if asked for."""
        return [
            call for call in self.calls if capability in (None, call.capability) and outcome in (None, call.outcome)
        ]

    def within(self, outage: Outage) -> list[Ended]:
        """The calls that started while etcd was away."""
        return [call for call in self.calls if outage.since <= call.started_at < outage.until]

    def used(self, agent_id: str, url: str) -> bool:
        """True if that instance answered a call."""
        return any(call.outcome == "ok" and (call.agent_id, call.url) == (agent_id, url) for call in self.calls)

    def rows(self) -> Iterator[tuple[str, ...]]:
        """The table: one row for each capability, and one for all of them."""
        for capability in sorted({call.capability for call in self.calls}):
            yield _row(capability, self.of(capability))
        yield _row("all", self.calls)


COLUMNS = ("capability", "calls", "succeeded", "failed", "unknown", "retried", "p50 ms", "p99 ms", "instances")


def _row(name: str, calls: Sequence[Ended]) -> tuple[str, ...]:
    elapsed = sorted((call.ended_at - call.started_at) * 1000 for call in calls if call.outcome == "ok")
    counts = (
        len(calls),
        *(sum(call.outcome == outcome for call in calls) for outcome in ("ok", "failed", "unknown")),
        sum(call.attempts > 1 for call in calls),
    )
    instances = len({(call.agent_id, call.url) for call in calls if call.outcome == "ok"})
    return (name, *map(str, counts), _quantile(elapsed, 0.5), _quantile(elapsed, 0.99), str(instances))


def _quantile(sorted_values: Sequence[float], share: float) -> str:
    if not sorted_values:
        return "-"
    return f"{sorted_values[max(0, math.ceil(share * len(sorted_values)) - 1)]:.0f}"


def problems(tally: Tally, facts: Facts) -> list[str]:
    """Why the run doesn't show that nothing was lost; empty if it does.

    Either a call was lost, or nothing was put to the test.
    """
    found = [f"{call.capability} failed: {call.error}" for call in tally.of(outcome="failed")]
    unknown = tally.of(outcome="unknown")
    found += [
        f"{call.capability} on {call.agent_id}: outcome unknown, though not for the kill: {call.error}"
        for call in unknown
        if not _lost_to_kill(call, facts.killed)
    ]
    if tally.started != len(tally.calls):
        found.append(f"{tally.started - len(tally.calls)} calls never ended")
    if facts.killed is None or not unknown:
        found.append("proves nothing: no call was in flight on a killed agent")
    if facts.outage is None or not tally.within(facts.outage):
        found.append("proves nothing: no call was made while etcd was away")
    if not facts.newcomers:
        found.append("proves nothing: no agent was replaced")
    found += [
        f"proves nothing: {agent_id} at {url} answered no call"
        for agent_id, url in facts.newcomers
        if not tally.used(agent_id, url)
    ]
    return found


def _lost_to_kill(call: Ended, killed: Killed | None) -> bool:
    """True if the call was in flight on the killed process as that died."""
    return (
        killed is not None
        and call.agent_id == killed.agent_id
        and call.started_at <= killed.at + _KILL_SLACK_S
        and 0 <= call.ended_at - killed.at <= _KILL_SLACK_S
    )
