"""The latest decisions, kept in memory: who was chosen, out of whom, and why.

Noting one must cost next to nothing, so what is kept are tuples of what the decision read; they become words and
scores only when somebody asks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from agent_reach.config import ScoringConfig
from agent_reach.model import AgentInfo
from agent_reach.routing.breaker import BreakerState
from agent_reach.routing.instance import Candidate
from agent_reach.routing.stats import faded

__all__ = ["CandidateSeen", "Decision", "DecisionLog"]

_KEPT = 1000
# Of more than these only the first are noted; a decision among 10,000 looks at two of them.
_SEEN = 16


@dataclass(frozen=True, slots=True)
class CandidateSeen:
    """An instance as the decision saw it. Latency and seconds of calls in flight so far in seconds; `excluded` says
    why it couldn't be chosen ("" if it could), `for_s` for how much longer, if that is known.
    """

    agent_id: str
    latency_s: float
    waiting_s: float
    in_flight: int
    weight: float
    breaker: str
    excluded: str
    for_s: float | None

    def __str__(self) -> str:
        if self.excluded:
            until = "" if self.for_s is None else f" for {self.for_s:.1f} s more"
            return f"{self.agent_id}: out, {self.excluded}{until}"
        latency = f"latency {self.latency_s * 1000:.1f} ms" if self.latency_s else "latency unknown"
        return (
            f"{self.agent_id}: {latency}, {self.in_flight} in flight, "
            f"weight {self.weight:g}, breaker {self.breaker}"
        )


@dataclass(frozen=True, slots=True)
class Decision:
    """One attempt's choice. `at`: seconds on the client's monotonic clock; `attempt`: 1-based; `rule`: what
    decided; `age_s`: how old the knowledge was, None if nothing had been proved yet; `seen`: who there was, 16 at
    the most.
    """

    at: float
    request_id: str
    capability: str
    attempt: int
    chosen: str
    rule: str
    age_s: float | None
    seen: tuple[CandidateSeen, ...]

    def __str__(self) -> str:
        age = "" if self.age_s is None else f", knowledge {self.age_s:.1f} s old"
        head = f"{self.capability} attempt {self.attempt} -> {self.chosen} ({self.rule}{age}) [{self.request_id}]"
        return "\n".join([head, *(f"  {seen}" for seen in self.seen)])


class _Seen(NamedTuple):
    """What was read of one candidate, in the order of `_look`."""

    candidate: Candidate
    info: AgentInfo
    latency_s: float
    latency_at: float
    failed_s: float
    failed_at: float
    failed_decay_s: float
    began: float | None
    in_flight: int
    busy_until: float
    avoid_until: float
    full: bool
    admits: bool
    state: BreakerState
    until: float
    reason: str


_Raw: TypeAlias = tuple[float, str, str, int, str, str, float | None, list[tuple[Any, ...]]]


class DecisionLog:
    """Bounded: the latest thousand. `age_s` tells how old the client's knowledge is, in seconds."""

    __slots__ = ("_age_s", "_decay_s", "_noted")

    def __init__(self, age_s: Callable[[], float | None], config: ScoringConfig) -> None:
        self._age_s = age_s
        self._decay_s = config.decay_s
        self._noted: deque[_Raw] = deque(maxlen=_KEPT)

    def note(
        self,
        now: float,
        request_id: str,
        capability: str,
        attempt: int,
        chosen: str,
        rule: str,
        candidates: Sequence[Candidate],
    ) -> None:
        """Keep what a decision was made of, before it changes anything."""
        looked = [_look(candidate, now) for candidate in candidates[:_SEEN]]
        self._noted.append((now, request_id, capability, attempt, chosen, rule, self._age_s(), looked))

    def latest(self, capability: str | None = None) -> tuple[Decision, ...]:
        """Return what is kept, the newest last; of one capability, or of all."""
        return tuple(self._told(raw) for raw in self._noted if capability is None or raw[2] == capability)

    def _told(self, raw: _Raw) -> Decision:
        at, request_id, capability, attempt, chosen, rule, age_s, looked = raw
        seen = tuple(self._candidate(_Seen(*values), at) for values in looked)
        return Decision(at, request_id, capability, attempt, chosen, rule, age_s, seen)

    def _candidate(self, seen: _Seen, now: float) -> CandidateSeen:
        excluded, until = _why_out(seen, now)
        return CandidateSeen(
            agent_id=seen.info.agent_id,
            latency_s=max(
                faded(seen.latency_s, seen.latency_at, now, self._decay_s),
                faded(seen.failed_s, seen.failed_at, now, seen.failed_decay_s),
            ),
            waiting_s=0.0 if seen.began is None else now - seen.began,
            in_flight=seen.in_flight,
            weight=seen.info.weight,
            breaker=seen.state.value,
            excluded=excluded,
            for_s=None if until is None else max(0.0, until - now),
        )


def _look(candidate: Candidate, now: float) -> tuple[Any, ...]:
    instance, learnt = candidate.instance, candidate.learnt
    latency, breaker, began = learnt.latency, instance.breaker, learnt.began
    return (
        candidate,
        instance.info,
        latency.mean_s,
        latency.observed_at,
        latency.failed_s,
        latency.failed_at,
        latency.failed_decay_s,
        began[len(began) // 2] if began else None,
        instance.in_flight,
        learnt.busy_until,
        instance.avoid_until,
        candidate.full,
        breaker.available(now),
        breaker.state,
        breaker.until,
        breaker.reason,
    )


def _why_out(seen: _Seen, now: float) -> tuple[str, float | None]:
    """Why it couldn't be chosen, and until when; ("", None) if it could."""
    if not seen.admits:
        # While its probe is out nobody knows for how long.
        return f"breaker {seen.state.value}: {seen.reason}", seen.until if now < seen.until else None
    if seen.busy_until > now:
        return "it said that it is overloaded", seen.busy_until
    if seen.full:
        return f"{seen.in_flight} calls of ours are in flight, as many as it gets", None
    if seen.avoid_until > now:
        return "asked last: it drains, or another answers at its address", seen.avoid_until
    return "", None
