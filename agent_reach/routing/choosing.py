"""Which candidate gets the next attempt of one call.

In this order: those of a given route; the owner of the conversation; the nearest that are well, unless those
further away are so much quicker; those that are better left alone (they drain, or another answers there); all of
them if too many are shut out; one that is shut out, to see whether it is well again; and at last those where
nothing listened when we looked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agent_reach.routing import ejection
from agent_reach.routing.affinity import Owner, owner_of
from agent_reach.routing.instance import Candidate
from agent_reach.routing.router import Router
from agent_reach.routing.selection import best, in_turn, pick, weighted
from agent_reach.routing.steps import CallPlan

__all__ = ["Choice", "Chooser", "distinct"]


@dataclass(frozen=True, slots=True)
class Choice:
    """The candidate, and by which rule."""

    candidate: Candidate
    rule: str


class Chooser:
    """Remembers which instances a call has tried: one it didn't try yet comes before one that it did."""

    __slots__ = ("_holder", "_plan", "_round", "_router", "_shared", "_tried", "context_lost", "owner")

    def __init__(self, plan: CallPlan, router: Router) -> None:
        self._plan = plan
        self._router = router
        self._shared = router.shared(plan.capability)
        self._tried: set[str] = set()
        # Tried since all were tried last; when nobody else is left, everybody gets another turn.
        self._round: set[str] = set()
        # The agent that holds the conversation, and which of its lives does.
        self.owner: str | None = None
        self._holder: Owner | None = None
        # The agent that held the conversation, if it is gone.
        self.context_lost: str | None = None

    def choose(self, candidates: Sequence[Candidate], now: float) -> Choice | None:
        """Return the instance to send to and note that it is tried; None if nobody takes a call now."""
        choice = self._choose(candidates, now)
        if choice is None and self._round:
            self._round.clear()
            choice = self._choose(candidates, now)
        if choice is not None:
            self._note(choice.candidate)
        return choice

    def choose_untried(self, candidates: Sequence[Candidate], now: float) -> Choice | None:
        """The same among those that this call never tried; for a second copy."""
        chosen = self._nearest(candidates, _Usable(now, self._tried, avoided=False), now)
        if chosen is None:
            return None
        self._note(chosen)
        return Choice(chosen, "second copy")

    def untried(self, candidates: Sequence[Candidate], now: float) -> bool:
        """True if an instance that this call never tried would take it now."""
        usable = _Usable(now, self._tried)
        return any(usable(candidate) for candidate in candidates)

    def find_owner(self, candidates: Sequence[Candidate]) -> None:
        """Find who holds the conversation, if the call is part of one; note if its owner is gone."""
        context_id, pinned = self._plan.context_id, self._plan.pinned
        if context_id is None or not candidates:
            return
        remembered = self._router.contexts.owner(self._plan.capability, context_id)
        if pinned is not None and remembered is not None and remembered[0] != pinned:
            # Asking somebody else in between neither loses the conversation nor moves it.
            self.owner = remembered[0]
            return
        self.owner, self.context_lost = self._router.owner(self._plan.capability, context_id, candidates)
        self._holder = next((owner_of(c) for c in candidates if c.agent_id == self.owner), None)

    def holds(self, candidate: Candidate) -> bool:
        """True if this very process holds the conversation."""
        return self.context_lost is None and owner_of(candidate) == self._holder

    def answered(self, candidate: Candidate) -> None:
        """Remember who holds the conversation from now on: who answered, unless its owner was only passed over."""
        assert self._plan.context_id is not None
        contexts = self._router.contexts
        if self.context_lost is not None or contexts.owner(self._plan.capability, self._plan.context_id) is None:
            contexts.remember(self._plan.capability, self._plan.context_id, candidate)

    def _note(self, candidate: Candidate) -> None:
        self._tried.add(candidate.agent_id)
        self._round.add(candidate.agent_id)
        candidate.learnt.turn = self._router.next_turn()

    def _choose(self, candidates: Sequence[Candidate], now: float) -> Choice | None:
        steady = _Usable(now, self._round, avoided=False)
        if self._plan.preferred or self.owner is not None:
            choice = self._named(candidates, now)
            if choice is not None:
                return choice
        chosen = self._nearest(candidates, steady, now)
        # Looking at all of them is only worth it after one that is shut out was drawn.
        if steady.met_shut_out and ejection.panics(candidates, now, self._router.config.ejection):
            panicking = self._by_strategy(candidates, _Usable(now, self._round, shut_out=True), now)
            if panicking is not None:
                return Choice(panicking, "panic: health ignored")
        if chosen is not None:
            return Choice(chosen, self._plan.strategy)
        chosen = self._by_strategy(candidates, _Usable(now, self._round), now)
        if chosen is not None:
            return Choice(chosen, "avoided, but nobody else is left")
        if self._hurry_probes(candidates, now):
            chosen = self._by_strategy(candidates, _Usable(now, self._round), now)
            if chosen is not None:
                return Choice(chosen, "early probe, as nobody else is left")
        chosen = self._by_strategy(candidates, _Usable(now, self._round, unreachable=True), now)
        return None if chosen is None else Choice(chosen, "unreachable, but nobody else is left")

    def _hurry_probes(self, candidates: Sequence[Candidate], now: float) -> bool:
        """Let those that are shut out be looked at before their time; only by calls that may be repeated."""
        if self._plan.retry.max_attempts < 2:
            return False
        # One that is full or busy would still be due when a call comes that may not be repeated.
        free = _Usable(now, self._round, shut_out=True, unreachable=True)
        return any(
            candidate.capability.idempotent and candidate.instance.breaker.hurry(now)
            for candidate in candidates
            if not candidate.instance.breaker.available(now) and free(candidate)
        )

    def _named(self, candidates: Sequence[Candidate], now: float) -> Choice | None:
        usable = _Usable(now, self._round)
        for wanted, rule in (*((agent_id, "route") for agent_id in self._plan.preferred), (self.owner, "affinity")):
            for candidate in candidates:
                if candidate.agent_id == wanted and usable(candidate):
                    return Choice(candidate, rule)
        return None

    def _nearest(self, candidates: Sequence[Candidate], usable: _Usable, now: float) -> Candidate | None:
        """The best of the nearest ring; of the next one if that one's best is so much cheaper."""
        if self._router.zone is None or self._plan.pinned is not None:
            return self._by_strategy(candidates, usable, now)
        best: Candidate | None = None
        for ring in self._shared.rings(candidates):
            chosen = self._by_strategy(ring, usable, now)
            if chosen is None:
                continue
            if best is None or self._spills(best, chosen, now):
                best = chosen
        return best

    def _spills(self, near: Candidate, far: Candidate, now: float) -> bool:
        """True if a call would take so much longer near by, queues included, that it goes further away."""
        its, others = self._router.scorer.scores((near, far), now)
        spill = self._router.config.locality.spill
        return its.latency_s * self._crowding(near) > spill * others.latency_s * self._crowding(far)

    def _crowding(self, candidate: Candidate) -> float:
        """How many times as many calls as it runs at once it would have with one more; 1 while none would wait."""
        slots = candidate.slots or self._router.config.scoring.assumed_slots
        return max(1.0, (candidate.instance.in_flight + 1) / slots)

    def _by_strategy(self, candidates: Sequence[Candidate], usable: _Usable, now: float) -> Candidate | None:
        router = self._router
        if self._plan.strategy == "round_robin":
            return in_turn(candidates, usable)
        if self._plan.strategy == "weighted_random":
            return weighted(candidates, usable, router.scorer, now, router.rng)
        return pick(candidates, usable, router.scorer, now, router.rng, router.config.scoring.choices)


def distinct(plan: CallPlan, router: Router, count: int, now: float) -> list[str]:
    """Return the ids of `count` different instances: near ones before far ones, of those the better ones first; who
    is out only fills up.
    """
    candidates, chosen = router.lookup(plan.capability).candidates, list[str]()
    usable = _Usable(now, set(), avoided=False)
    for ring in router.shared(plan.capability).rings(candidates):
        chosen += [c.agent_id for c in _several(plan, router, ring, usable, count - len(chosen), now)]
    left = [c.agent_id for c in candidates if c.agent_id not in chosen]
    return chosen + left[: count - len(chosen)]


def _several(
    plan: CallPlan, router: Router, candidates: Sequence[Candidate], usable: _Usable, count: int, now: float
) -> list[Candidate]:
    if plan.strategy == "single":
        return best(candidates, usable, router.scorer, now, router.rng, count, router.config.scoring.choices)
    chooser, chosen = Chooser(plan, router), list[Candidate]()
    while len(chosen) < count and (choice := chooser.choose_untried(candidates, now)) is not None:
        chosen.append(choice.candidate)
    return chosen


class _Usable:
    """Says whether a candidate may be sent to; `avoided`, `shut_out`, `unreachable` ones only where asked for."""

    __slots__ = ("_avoided", "_except", "_now", "_shut_out", "_unreachable", "met_shut_out")

    def __init__(
        self,
        now: float,
        excluded: set[str],
        *,
        avoided: bool = True,
        shut_out: bool = False,
        unreachable: bool = False,
    ) -> None:
        self._now = now
        self._except = excluded
        self._avoided = avoided
        self._shut_out = shut_out
        self._unreachable = unreachable
        self.met_shut_out = False

    def __call__(self, candidate: Candidate) -> bool:
        if candidate.full or candidate.learnt.busy_until > self._now or candidate.agent_id in self._except:
            return False
        breaker = candidate.instance.breaker
        if not breaker.available(self._now):
            if breaker.unreachable:
                return self._unreachable
            self.met_shut_out = True
            return self._shut_out
        return self._avoided or candidate.instance.avoid_until <= self._now
