"""THE decisions of one call: where to, how long, again or not, and how it ends.

Drive it like this, with sockets or with an event heap:

    while True:
        match session.next(now):
            case Send() as send:  begin the attempt; session.record(its outcome, now, send) when it ended
            case Await(seconds):  wait until an attempt under way ended, or for so long
            case Wait(seconds):   wait
            case Return(reply):   done
            case Raise(error):    failed

Usually one attempt is under way at a time, and `next` is asked again once it was recorded. Where a `Send` names
`hedge_after_s` and the attempt takes longer, `next` is asked in between, and may send a second copy. What is still
under way when the call ends is cancelled and recorded as `Cancelled`.

Between a `Send` and its `record` the session holds a permit: a breaker permit and a place in the counts of calls in
flight.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from agent_reach.errors import Attempt, ReachError
from agent_reach.routing import backoff, failures, outcomes
from agent_reach.routing.breaker import Transition
from agent_reach.routing.choosing import Choice, Chooser
from agent_reach.routing.instance import Candidate
from agent_reach.routing.learning import InFlight, begin, learn, misplaced
from agent_reach.routing.outage import OutageState
from agent_reach.routing.outcomes import Cancelled, Outcome, Rejected, Succeeded, Unsent
from agent_reach.routing.router import Router
from agent_reach.routing.steps import Await, CallPlan, Raise, Return, Send, Step, Wait

__all__ = ["CallSession"]


class CallSession:
    """One call. Not reusable, not shared between tasks."""

    __slots__ = (
        "_attempts",
        "_charged",
        "_chooser",
        "_config",
        "_end",
        "_flights",
        "_hedged",
        "_last",
        "_last_at",
        "_outages",
        "_patient_until",
        "_place_wait_until",
        "_plan",
        "_repeated",
        "_resume_at",
        "_router",
        "_sent",
        "_shared",
        "_transitions",
    )

    def __init__(self, plan: CallPlan, router: Router) -> None:
        self._plan = plan
        self._router = router
        self._config = router.config
        self._shared = router.shared(plan.capability)
        self._chooser = Chooser(plan, router)
        self._attempts: list[Attempt] = []
        self._sent = 0
        # Attempts that cost a peer something, or went to one that was tried before.
        self._charged = 0
        # True once a retry was paid for out of what all calls share.
        self._repeated = False
        self._resume_at = plan.started
        self._place_wait_until: float | None = None
        self._patient_until = min(plan.deadline, plan.started + plan.retry.patience_s)
        self._last: Outcome | None = None
        self._last_at: Candidate | None = None
        self._flights: list[InFlight] = []
        self._hedged = False
        self._end: Return | Raise | None = None
        self._transitions: list[tuple[str, Transition]] = []
        self._outages: list[OutageState] = []

    @property
    def last(self) -> Outcome | None:
        """How the latest attempt ended."""
        return self._last

    @property
    def attempts(self) -> tuple[Attempt, ...]:
        """What was tried so far, in the order in which it ended."""
        return tuple(self._attempts)

    def take_transitions(self) -> list[tuple[str, Transition]]:
        """Return the breaker changes (agent id, transition) since the last call of this method."""
        changed, self._transitions = self._transitions, []
        return changed

    def take_outages(self) -> list[OutageState]:
        """Return what the state of the capability as a whole became since the last call of this method."""
        changed, self._outages = self._outages, []
        return changed

    def next(self, now: float) -> Step:
        """Say what to do at `now`. After an end, the same end again."""
        if self._end is not None:
            return self._end
        if self._flights:
            return self._second_copy(now)
        if now >= self._plan.deadline:
            return self._raise(self._deadline_error("backoff" if self._attempts else "pick"))
        if now < self._resume_at:
            return Wait(self._resume_at - now)
        candidates = self._offering()
        if not candidates:
            return self._raise(self._nobody_offers())
        if not self._sent:
            self._chooser.find_owner(candidates)
        candidates = self._bound_to_owner(candidates)
        if not candidates:
            owner = self._chooser.context_lost or self._chooser.owner
            return self._raise(failures.context_lost(self._call(), owner, pinned=self._plan.pinned))
        wait_s = self._outage_wait_s(now)
        if wait_s > 0:
            if now >= self._patient_until:
                return self._raise(self._outage_error())
            return Wait(min(wait_s, self._patient_until - now), until_place=True)
        if self._router.tier_full(self._plan.tier):
            return self._nobody_admits(candidates, now)
        choice = self._chooser.choose(candidates, now)
        if choice is None:
            return self._nobody_admits(candidates, now)
        return self._send(choice, candidates, now)

    def record(self, outcome: Outcome, now: float, send: Send | None = None) -> None:
        """Take in how an attempt ended, and give its permit back; `send` can be left out if one is under way."""
        flight = self._take_flight(send)
        send, candidate = flight.send, flight.send.candidate
        transition, outage = learn(flight, outcome, self._plan, self._router, now)
        if outage is not None:
            self._outages.append(outage)
        if transition is not None:
            self._transitions.append((candidate.agent_id, transition))
        self._plan.allowance.give_back(outcomes.unspent(outcome, send.retry_allowance))
        if self._end is not None:
            return
        self._last, self._last_at = outcome, candidate
        self._attempts.append(
            failures.attempt_of(send.number, candidate.agent_id, candidate.url, outcome, now - flight.at)
        )
        if isinstance(outcome, Succeeded):
            if self._plan.context_id is not None:
                self._chooser.answered(candidate)
            if self._repeated:
                self._shared.retries.paid_off(now)
            self._end = Return(outcome.reply, self.attempts)
        elif isinstance(outcome, Cancelled):
            self._end = Raise(ReachError("the caller cancelled this call", **self._call()))
        else:
            self._again_or_fail(candidate, outcome, now)

    # --- sending -------------------------------------------------------------------------------------------

    def _offering(self) -> Sequence[Candidate]:
        candidates = self._router.lookup(self._plan.capability).candidates
        if self._plan.pinned is None:
            return candidates
        return [c for c in candidates if c.agent_id == self._plan.pinned]

    def _bound_to_owner(self, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
        """Where nobody else may answer: the owner of the conversation, if it is there."""
        if not self._plan.require_context or self._plan.context_id is None:
            return candidates
        return [candidate for candidate in candidates if self._chooser.holds(candidate)]

    def _candidates(self) -> Sequence[Candidate]:
        return self._bound_to_owner(self._offering())

    def _send(self, choice: Choice, candidates: Sequence[Candidate], now: float) -> Send:
        candidate, plan = choice.candidate, self._plan
        if not self._sent:
            self._shared.call_began(now)
        self._shared.outage.sent(now, self._router.rng)
        self._sent += 1
        self._router.decisions.note(
            now, plan.request_id, plan.capability, self._sent, candidate.agent_id, choice.rule, candidates
        )
        last = self._is_last(candidate)
        send = Send(
            candidate,
            self._sent,
            self._timeout_s(candidate, now, last=last),
            # Of a purse that siblings share, even the last attempt leaves them half.
            plan.allowance.lend(last=last and plan.own_purse),
            None if plan.hedge is None or last or self._hedged else self._hedge_after_s(),
        )
        flight, transition = begin(send, plan, self._router, now)
        self._flights.append(flight)
        if transition is not None:
            self._transitions.append((candidate.agent_id, transition))
        self._place_wait_until = None
        return send

    def _is_last(self, candidate: Candidate) -> bool:
        """True if what runs there isn't repeated, however it ends."""
        spent = self._charged + 1 >= self._plan.retry.max_attempts or self._plan.allowance.left < 1
        return spent or not candidate.capability.idempotent

    def _timeout_s(self, candidate: Candidate, now: float, *, last: bool) -> float:
        left_s = self._plan.deadline - now
        if last and self._plan.explicit_timeout:
            return left_s
        return min(left_s, self._config.timeouts.of(candidate.capability.timeout))

    # --- second copies -------------------------------------------------------------------------------------

    def _hedge_after_s(self) -> float | None:
        hedge, latencies = self._plan.hedge, self._shared.latencies
        if hedge is None or len(latencies) < hedge.min_samples:
            return None
        return max(hedge.least_s, latencies.percentile(hedge.percentile))

    def _second_copy(self, now: float) -> Step:
        """Another copy of an attempt that takes longer than most, where that is wanted and affordable."""
        first, hedge = self._flights[0], self._plan.hedge
        after_s = first.send.hedge_after_s
        if after_s is None or hedge is None or self._hedged or len(self._flights) > 1 or now >= self._plan.deadline:
            return Await()
        # A timer that fires a rounding error early is not asked to fire again for it.
        if now < first.at + after_s - 1e-6:
            return Await(first.at + after_s - now)
        self._hedged = True
        if self._shared.hedges.left(now, hedge.budget_ratio) < 1 or self._router.tier_full(self._plan.tier):
            return Await()
        candidates = self._candidates()
        choice = self._chooser.choose_untried(candidates, now)
        if choice is None or not self._plan.allowance.take():
            return Await()
        self._shared.hedges.spend(now)
        self._charged += 1
        return self._send(choice, candidates, now)

    def _take_flight(self, send: Send | None) -> InFlight:
        for number, flight in enumerate(self._flights):
            if flight.send is send or (send is None and len(self._flights) == 1):
                return self._flights.pop(number)
        raise RuntimeError("no such attempt is under way")

    # --- again, or the end ---------------------------------------------------------------------------------

    def _again_or_fail(self, candidate: Candidate, outcome: Outcome, now: float) -> None:
        idempotent = candidate.capability.idempotent
        if not outcomes.worth_retrying(outcome, idempotent=idempotent):
            self._fail(candidate, outcome)
            return
        if self._flights:
            return
        if now >= self._plan.deadline and isinstance(outcome, Unsent):
            self._raise(self._deadline_error(outcome.phase))
            return
        elsewhere = self._chooser.untried(self._candidates(), now)
        if elsewhere and _costs_nothing(outcome):
            return
        self._charged += 1
        if self._charged >= self._plan.retry.max_attempts:
            self._fail(candidate, outcome)
            return
        if self._plan.allowance.left < 1:
            self._fail(candidate, outcome).starved = True
            return
        if self._outage_wait_s(now) > 0:
            # Whether and when it goes out again is decided then.
            self._plan.allowance.take()
            return
        if self._shared.retries.left(now) < 1:
            failures.add_reason(
                self._fail(candidate, outcome), "not repeated: too many calls of this capability fail"
            )
            return
        self._plan.allowance.take()
        self._shared.retries.spend(now)
        self._repeated = True
        if elsewhere:
            return
        self._resume_at = now + backoff.delay_s(self._charged, self._plan.retry, self._router.rng)
        if self._resume_at >= self._plan.deadline:
            self._fail(candidate, outcome)

    def _nobody_admits(self, candidates: Sequence[Candidate], now: float) -> Step:
        """All are full, busy, probed or shut out: wait if that can end in time, else say so."""
        tier_full = self._router.tier_full(self._plan.tier)
        times = [math.inf] if tier_full else [candidate.admits_at(now) for candidate in candidates]
        free_at = min(times)
        if any(math.isinf(at) for at in times):
            # A place comes free as soon as a call of ours ends. Waiting for that longer than a connect may take
            # would only hide that the instance is too slow for its callers.
            if self._place_wait_until is None:
                self._place_wait_until = now + self._config.timeouts.connect_s
            until = min(self._place_wait_until, free_at, self._plan.deadline)
            if now < until:
                return Wait(until - now, until_place=True)
        if now < free_at < self._plan.deadline:
            return Wait(free_at - now, until_place=True)
        if tier_full:
            return self._raise(failures.tier_full(self._call(), self._plan.tier, self._config.bulkheads.per_tier))
        busy = any(c.full or c.learnt.busy_until > now for c in candidates)
        retry_after_s = free_at - now if now < free_at < math.inf else None
        return self._raise(
            failures.none_admitted(self._call(), known=len(candidates), retry_after_s=retry_after_s, busy=busy)
        )

    def _nobody_offers(self) -> ReachError:
        if self._plan.pinned is not None:
            text = f"agent {self._plan.pinned!r} went away, or never offered {self._plan.capability}"
        elif self._attempts:
            last = self._attempts[-1].detail
            text = f"every instance of {self._plan.capability} went away during the call ({last})"
        else:
            text = f"no instance of {self._plan.capability} is left"
        return failures.gone(self._call(), text)

    def _fail(self, candidate: Candidate, outcome: Outcome) -> ReachError:
        idempotent = candidate.capability.idempotent
        error = failures.failed(self._call(), outcome, agent_id=candidate.agent_id, idempotent=idempotent)
        return self._raise(error).error

    def _outage_wait_s(self, now: float) -> float:
        """How long the call has to wait because all calls of the capability fail; 0 for one that doesn't wait."""
        if self._plan.retry.patience_s <= 0 or self._plan.pinned is not None:
            return 0.0
        return self._shared.outage.wait_s(now)

    def _outage_error(self) -> ReachError:
        """It waited for an outage to end, in vain."""
        in_a_row = self._shared.outage.in_a_row
        if self._last is not None and self._last_at is not None:
            idempotent = self._last_at.capability.idempotent
            error = failures.failed(
                self._call(), self._last, agent_id=self._last_at.agent_id, idempotent=idempotent
            )
            reason = f"not repeated: so did the last {in_a_row} calls, whichever instance they went to"
            failures.add_reason(error, reason)
            return error
        return failures.all_fail(self._call(), in_a_row=in_a_row, waited_s=self._plan.retry.patience_s)

    def _deadline_error(self, phase: str) -> ReachError:
        total_s = self._plan.deadline - self._plan.started
        return failures.deadline_passed(self._call(), phase=phase, total_s=total_s, last=self._last)

    def _raise(self, error: ReachError) -> Raise:
        self._end = Raise(error)
        return self._end

    def _call(self) -> failures.Call:
        return {
            "capability": self._plan.capability,
            "request_id": self._plan.request_id,
            "attempts": self.attempts,
        }


def _costs_nothing(outcome: Outcome) -> bool:
    """True if the attempt cost no peer anything, so that the next one needs no leave: nothing listened there,
    or the wrong one did, or it is leaving.
    """
    if isinstance(outcome, Unsent):
        return not outcome.local
    leaving = isinstance(outcome, Rejected) and not outcome.error.executed and outcome.state == "draining"
    return leaving or misplaced(outcome)
