"""Why a call would go where it goes: the ranking and the exclusions, as data and as text."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from agent_reach.model import LoadReport
from agent_reach.routing import ejection
from agent_reach.routing.instance import Candidate
from agent_reach.routing.outage import OutageState
from agent_reach.routing.router import Router
from agent_reach.routing.scoring import Score

__all__ = ["CandidateView", "Excluded", "Explanation", "Risk", "Route", "explain"]


class Risk(enum.Enum):
    """How likely a call is to fail: LOW two or more usable instances and fresh knowledge; MEDIUM one, or
    stale knowledge; HIGH none, or all calls fail lately.
    """

    LOW = "low"
    MEDIUM = "medium"
    HIGH = "high"


@dataclass(frozen=True, slots=True)
class CandidateView:
    """A usable instance with its score, part by part. `recent`: successes and failures of the breaker's window;
    `avoided`: it is asked only if no other is left.
    """

    agent_id: str
    url: str
    zone: str | None
    score: Score
    breaker: str
    recent: tuple[int, int]
    avoided: bool
    load: LoadReport | None

    def __str__(self) -> str:
        succeeded, failed = self.recent
        recent = f", {failed} of the last {succeeded + failed} calls failed" if failed else ""
        load = f"; says {self.load.in_flight} running, {self.load.queued} queued" if self.load else ""
        last = "; asked last: it drains, or another answers at its address" if self.avoided else ""
        return f"{self.agent_id} at {self.url}: {self.score}; breaker {self.breaker}{recent}{load}{last}"


@dataclass(frozen=True, slots=True)
class Excluded:
    """An instance that no call is sent to now, and why; `for_s`: seconds until that ends, if known."""

    agent_id: str
    url: str
    reason: str
    for_s: float | None

    def __str__(self) -> str:
        until = "" if self.for_s is None else f", for {self.for_s:.1f} s more"
        return f"{self.agent_id} at {self.url}: shut out, {self.reason}{until}"


@dataclass(frozen=True, slots=True)
class Explanation:
    """The candidates of a capability, cheapest first, and those excluded. `print` it.

    `age_s` is how old the knowledge is, in seconds (None: nothing was ever learnt); `stale` if the registry
    can't confirm it. `panic`: so many are shut out that health is ignored. `failing`: so many calls in a row have
    failed, whichever instance they went to, that calls wait for one to succeed; else 0.
    """

    capability: str
    candidates: tuple[CandidateView, ...]
    excluded: tuple[Excluded, ...]
    risk: Risk
    deprecated: bool
    panic: bool
    stale: bool
    age_s: float | None
    failing: int

    def __str__(self) -> str:
        total = len(self.candidates) + len(self.excluded)
        age = "not loaded yet" if self.age_s is None else f"{self.age_s:.1f} s old"
        flags = [f"index {age}{', stale' if self.stale else ''}", f"risk {self.risk.value}"]
        if self.deprecated:
            flags.append("answered by a newer version (soft alias)")
        if self.panic:
            flags.append("panic: health ignored")
        if self.failing:
            flags.append(f"the last {self.failing} calls failed: calls wait for one to succeed")
        lines = [f"{self.capability}: {len(self.candidates)} of {total} instances usable; {'; '.join(flags)}"]
        lines += [f"  {rank}. {view}" for rank, view in enumerate(self.candidates, 1)]
        lines += [f"  -  {gone}" for gone in self.excluded]
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Route(Explanation):
    """An explanation that may be given to `call`: its candidates are then tried first, in this order.

    `owner`: the agent that a conversation belongs to, if one was named; `context_lost`: the one that held it, if it
    is gone. The owner comes first, if it can be used.
    """

    owner: str | None = None
    context_lost: str | None = None

    def __str__(self) -> str:
        text = Explanation.__str__(self)
        if self.context_lost is not None:
            text += f"\n  conversation lost: {self.context_lost} held it and is gone; {self.owner} takes it over"
        elif self.owner is not None:
            text += f"\n  conversation held by {self.owner}"
        return text


def explain(
    capability: str,
    router: Router,
    *,
    context_id: str | None = None,
    now: float,
    stale: bool,
    age_s: float | None,
) -> Route:
    """Rank the candidates as a call at `now` would see them. Reads only."""
    found, scorer = router.lookup(capability), router.scorer
    candidates = found.candidates
    owner, lost = router.owner(capability, context_id, candidates) if context_id is not None else (None, None)
    outage = router.shared(capability).outage if candidates else None
    failing = outage.in_a_row if outage is not None and outage.state is OutageState.DOWN else 0
    panic = bool(candidates) and ejection.panics(candidates, now, router.config.ejection)
    usable: list[CandidateView] = []
    excluded: list[Excluded] = []
    for candidate, score in zip(candidates, scorer.scores(candidates, now), strict=True):
        gone = _why_not(candidate, now, panic=panic)
        if gone is None:
            usable.append(_view(candidate, now, score))
        else:
            excluded.append(gone)
    usable.sort(key=lambda view: (view.agent_id != owner, view.avoided, view.score.cost))
    return Route(
        capability,
        tuple(usable),
        tuple(excluded),
        Risk.HIGH if failing else _risk(sum(not view.avoided for view in usable), stale=stale, panic=panic),
        found.deprecated,
        panic,
        stale,
        age_s,
        failing,
        owner,
        lost,
    )


def _view(candidate: Candidate, now: float, score: Score) -> CandidateView:
    instance = candidate.instance
    return CandidateView(
        candidate.agent_id,
        candidate.url,
        instance.info.zone,
        score,
        instance.breaker.state.value,
        instance.breaker.counts(now),
        instance.avoid_until > now,
        candidate.learnt.load,
    )


def _why_not(candidate: Candidate, now: float, *, panic: bool) -> Excluded | None:
    instance = candidate.instance

    def out(reason: str, until: float | None) -> Excluded:
        return Excluded(candidate.agent_id, candidate.url, reason, None if until is None else max(0.0, until - now))

    if not panic and not instance.breaker.available(now):
        probing = instance.breaker.until <= now
        return out(
            f"breaker {instance.breaker.state.value}: {instance.breaker.reason}",
            None if probing else instance.breaker.until,
        )
    if candidate.learnt.busy_until > now:
        return out("it said that it is overloaded", candidate.learnt.busy_until)
    if instance.in_flight >= candidate.instance_limit:
        return out(f"{instance.in_flight} calls of ours are in flight, as many as one instance gets", None)
    if candidate.full:
        running = candidate.learnt.in_flight
        return out(f"{running} calls of ours are in flight, as many as it runs and queues of this", None)
    return None


def _risk(usable: int, *, stale: bool, panic: bool) -> Risk:
    if usable == 0:
        return Risk.HIGH
    return Risk.MEDIUM if usable == 1 or stale or panic else Risk.LOW
