"""THE decisions of one call: where to, how long, again or not, and how it ends.

Drive it like this, with sockets or with an event heap:

    while True:
        match session.next(now):
            case Send() as send:  session.record(outcome of the attempt, now)
            case Wait(seconds):   wait
            case Return(reply):   done
            case Raise(error):    failed

Between a `Send` and its `record` the session holds one permit (a breaker permit and a place in the
instance's in-flight count); it never holds two.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from agent_reach.errors import Attempt, ReachError
from agent_reach.routing import backoff, ejection, failures, outcomes
from agent_reach.routing.breaker import BreakerPermit, BreakerState, Transition, Verdict
from agent_reach.routing.choosing import Chooser
from agent_reach.routing.instance import Candidate, Instance
from agent_reach.routing.outcomes import Cancelled, Outcome, Rejected, Succeeded, Unsent
from agent_reach.routing.router import Router
from agent_reach.routing.steps import CallPlan, Raise, Return, Send, Step, Wait

__all__ = ["CallSession"]

# How long an instance that drains, or at whose address another one answered, comes after all others. It is gone
# from the registry sooner (alibaba/dubbo: 30 s).
_AVOID_S = 30.0
# How long an instance is taken at its word that it is overloaded. Longer than most deadlines, and short enough that
# a lone instance with a wrong Retry-After doesn't stay dark.
_LONGEST_BUSY_S = 60.0


@dataclass(frozen=True, slots=True)
class _InFlight:
    """The permit: what must be given back when the attempt ends."""

    send: Send
    breaker: BreakerPermit
    at: float


class CallSession:
    """One call. Not reusable, not shared between tasks."""

    __slots__ = (
        "_attempts",
        "_charged",
        "_chooser",
        "_config",
        "_end",
        "_in_flight",
        "_last",
        "_place_wait_until",
        "_plan",
        "_resume_at",
        "_rng",
        "_router",
        "_transitions",
    )

    def __init__(
        self,
        plan: CallPlan,
        router: Router,
    ) -> None:
        self._plan = plan
        self._router = router
        self._config = router.config
        self._rng = router.rng
        self._chooser = Chooser(self._config.ejection, router.scorer, router.rng, plan.preferred)
        self._attempts: list[Attempt] = []
        # Attempts that cost a peer something, or went to one that was tried before.
        self._charged = 0
        self._resume_at = plan.started
        self._place_wait_until: float | None = None
        self._last: Outcome | None = None
        self._in_flight: _InFlight | None = None
        self._end: Return | Raise | None = None
        self._transitions: list[tuple[str, Transition]] = []

    @property
    def last(self) -> Outcome | None:
        """How the latest attempt ended."""
        return self._last

    @property
    def attempts(self) -> tuple[Attempt, ...]:
        """What was tried so far."""
        return tuple(self._attempts)

    def take_transitions(self) -> list[tuple[str, Transition]]:
        """Return the breaker changes (agent id, transition) since the last call of this method."""
        changed, self._transitions = self._transitions, []
        return changed

    def next(self, now: float) -> Step:
        """Say what to do at `now`. After an end, the same end again."""
        if self._in_flight is not None:
            raise RuntimeError("record the outcome of the attempt before asking for the next step")
        if self._end is not None:
            return self._end
        if now >= self._plan.deadline:
            return self._raise(self._deadline_error("backoff" if self._attempts else "pick"))
        if now < self._resume_at:
            return Wait(self._resume_at - now)
        candidates = self._candidates()
        if not candidates:
            return self._raise(self._nobody_offers())
        candidate = self._chooser.choose(candidates, now)
        if candidate is None:
            return self._nobody_admits(candidates, now)
        return self._send(candidate, now)

    def record(self, outcome: Outcome, now: float, send: Send | None = None) -> None:
        """Take in how the attempt ended, and give its permit back."""
        flight = self._in_flight
        if flight is None or (send is not None and send is not flight.send):
            raise RuntimeError("no attempt is under way")
        self._in_flight = None
        self._last = outcome
        send = flight.send
        elapsed_s = now - flight.at
        candidate = send.candidate
        self._learn(flight, outcome, elapsed_s, now)
        self._plan.allowance.give_back(outcomes.unspent(outcome, send.retry_allowance))
        self._attempts.append(
            failures.attempt_of(send.number, candidate.agent_id, candidate.url, outcome, elapsed_s)
        )
        if isinstance(outcome, Succeeded):
            self._end = Return(outcome.reply, self.attempts)
        elif isinstance(outcome, Cancelled):
            self._end = Raise(ReachError("the caller cancelled this call", **self._call()))
        else:
            self._again_or_fail(candidate, outcome, now)

    # --- sending -------------------------------------------------------------------------------------------

    def _candidates(self) -> Sequence[Candidate]:
        candidates = self._router.lookup(self._plan.capability).candidates
        if self._plan.pinned is None:
            return candidates
        return [c for c in candidates if c.agent_id == self._plan.pinned]

    def _send(self, candidate: Candidate, now: float) -> Send:
        permit, transition = candidate.instance.breaker.admit(now)
        if transition is not None:
            self._transitions.append((candidate.agent_id, transition))
        candidate.instance.in_flight += 1
        candidate.learnt.in_flight += 1
        last = self._is_last(candidate)
        send = Send(
            candidate,
            len(self._attempts) + 1,
            self._timeout_s(candidate, now, last=last),
            # Of a purse that siblings share, even the last attempt leaves them half.
            self._plan.allowance.lend(last=last and self._plan.own_purse),
        )
        self._in_flight = _InFlight(send, permit, now)
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

    # --- learning ------------------------------------------------------------------------------------------

    def _learn(self, flight: _InFlight, outcome: Outcome, elapsed_s: float, now: float) -> None:
        candidate = flight.send.candidate
        instance = candidate.instance
        instance.in_flight -= 1
        candidate.learnt.in_flight -= 1
        attempt_s = self._config.timeouts.of(candidate.capability.timeout)
        verdict = outcomes.verdict(outcome, waited_s=elapsed_s, attempt_s=attempt_s)
        if verdict is Verdict.SUCCESS:
            candidate.latency.observe(elapsed_s, now)
        elif verdict is Verdict.FAILURE:
            booked_s = max(elapsed_s, self._config.scoring.failure_latency_s)
            candidate.latency.observe(booked_s, now, failed=True)
        transition = instance.breaker.record(
            flight.breaker, verdict, now, self._rng, lambda: self._may_shut_out(instance, now)
        )
        if transition is not None:
            self._transitions.append((candidate.agent_id, transition))
            if transition.after is BreakerState.CLOSED:
                instance.warm_from = now
        self._hear(candidate, outcome, now)

    def _hear(self, candidate: Candidate, outcome: Outcome, now: float) -> None:
        """Take in what the instance says of itself."""
        instance = candidate.instance
        match outcome:
            case Succeeded():
                state, instance.load = outcome.reply.state, outcome.reply.load
                candidate.learnt.busy_until = 0.0
            case Rejected():
                state, instance.load = outcome.state, outcome.load or instance.load
                if outcome.retry_after_s is not None:
                    candidate.learnt.busy_until = now + min(outcome.retry_after_s, _LONGEST_BUSY_S)
            case _:
                return
        if state == "draining" or _misplaced(outcome):
            instance.avoid_until = now + _AVOID_S

    def _may_shut_out(self, instance: Instance, now: float) -> bool:
        candidates = self._router.lookup(self._plan.capability).candidates
        return ejection.may_shut_out(instance, candidates, now, self._config.ejection)

    # --- again, or the end ---------------------------------------------------------------------------------

    def _again_or_fail(self, candidate: Candidate, outcome: Outcome, now: float) -> None:
        idempotent = candidate.capability.idempotent
        if not outcomes.worth_retrying(outcome, idempotent=idempotent):
            self._fail(candidate, outcome)
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
        if not self._plan.allowance.take():
            self._fail(candidate, outcome).starved = True
            return
        if elsewhere and not outcomes.executed(outcome):
            return
        self._resume_at = now + backoff.delay_s(self._charged, self._plan.retry, self._rng)
        if self._resume_at >= self._plan.deadline:
            self._fail(candidate, outcome)

    def _nobody_admits(self, candidates: Sequence[Candidate], now: float) -> Step:
        """All are full, busy, probed or shut out: wait if that can end in time, else say so."""
        times = [candidate.admits_at(now) for candidate in candidates]
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


def _misplaced(outcome: Outcome) -> bool:
    """True if something else than the instance meant answers at its address, or it no longer offers this."""
    return isinstance(outcome, Rejected) and not outcome.error.executed and outcome.status in (404, 421)


def _costs_nothing(outcome: Outcome) -> bool:
    """True if the attempt cost no peer anything, so that the next one needs no leave: nothing listened there,
    or the wrong one did, or it is leaving.
    """
    if isinstance(outcome, Unsent):
        return not outcome.local
    leaving = isinstance(outcome, Rejected) and not outcome.error.executed and outcome.state == "draining"
    return leaving or _misplaced(outcome)
