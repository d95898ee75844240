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

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from agent_reach.config import ReachConfig
from agent_reach.errors import Attempt, ReachError
from agent_reach.routing import backoff, ejection, failures, outcomes
from agent_reach.routing.breaker import BreakerPermit, BreakerState, Transition, Verdict
from agent_reach.routing.index import Lookup
from agent_reach.routing.instance import Candidate, Instance
from agent_reach.routing.outcomes import Cancelled, Outcome, Rejected, Succeeded, Unsent
from agent_reach.routing.scoring import PeakEwmaScorer
from agent_reach.routing.selection import pick
from agent_reach.routing.steps import CallPlan, Raise, Return, Send, Step, Wait

__all__ = ["CallSession"]

# How long a draining instance is left alone; it is gone from the registry sooner (alibaba/dubbo: 30 s).
_DRAIN_AVOID_S = 30.0
# How long an instance is taken at its word that it is overloaded. Longer than most deadlines, and short enough that
# a lone instance with a wrong Retry-After doesn't stay dark.
_LONGEST_BUSY_S = 60.0
# How often a call that waits for a place in an instance's in-flight count looks again.
_PLACE_POLL_S = 0.02


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
        "_config",
        "_end",
        "_in_flight",
        "_last",
        "_lookup",
        "_place_wait_until",
        "_plan",
        "_resume_at",
        "_rng",
        "_round",
        "_saw_shut_out",
        "_scorer",
        "_transitions",
        "_tried",
    )

    def __init__(
        self,
        plan: CallPlan,
        lookup: Callable[[str], Lookup],
        config: ReachConfig,
        scorer: PeakEwmaScorer,
        rng: random.Random,
    ) -> None:
        self._plan = plan
        self._lookup = lookup
        self._config = config
        self._scorer = scorer
        self._rng = rng
        self._attempts: list[Attempt] = []
        self._charged = 0
        self._tried: set[str] = set()
        self._round: set[str] = set()
        self._resume_at = plan.started
        self._place_wait_until: float | None = None
        self._last: Outcome | None = None
        self._in_flight: _InFlight | None = None
        self._end: Return | Raise | None = None
        self._saw_shut_out = False
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
        candidate = self._choose(candidates, now)
        if candidate is None:
            return self._nobody_admits(candidates, now)
        return self._send(candidate, now)

    def record(self, outcome: Outcome, now: float) -> None:
        """Take in how the attempt ended, and give its permit back."""
        flight = self._in_flight
        if flight is None:
            raise RuntimeError("no attempt is under way")
        self._in_flight = None
        self._last = outcome
        elapsed_s = now - flight.at
        candidate = flight.send.candidate
        self._learn(flight, outcome, elapsed_s, now)
        self._attempts.append(
            failures.attempt_of(flight.send.number, candidate.agent_id, candidate.url, outcome, elapsed_s)
        )
        if isinstance(outcome, Succeeded):
            self._end = Return(outcome.reply, self.attempts)
        elif isinstance(outcome, Cancelled):
            self._end = Raise(ReachError("the caller cancelled this call", **self._call()))
        else:
            self._again_or_fail(candidate, outcome, now)

    # --- choosing ------------------------------------------------------------------------------------------

    def _candidates(self) -> Sequence[Candidate]:
        candidates = self._lookup(self._plan.capability).candidates
        if self._plan.pinned is None:
            return candidates
        return [c for c in candidates if c.agent_id == self._plan.pinned]

    def _choose(self, candidates: Sequence[Candidate], now: float) -> Candidate | None:
        """The best usable candidate: one not tried yet in this round before one that was."""
        for agent_id in self._plan.preferred:
            for candidate in candidates:
                if candidate.agent_id == agent_id and self._usable(candidate, now, healthy=True):
                    return candidate
        chosen = self._choose_fresh(candidates, now)
        if chosen is None and self._round:
            self._round.clear()
            chosen = self._choose_fresh(candidates, now)
        return chosen

    def _choose_fresh(self, candidates: Sequence[Candidate], now: float) -> Candidate | None:
        self._saw_shut_out = False

        def steady(candidate: Candidate) -> bool:
            healthy = self._usable(candidate, now, healthy=True)
            return healthy and candidate.instance.avoid_until <= now

        def healthy(candidate: Candidate) -> bool:
            return self._usable(candidate, now, healthy=True)

        def any_health(candidate: Candidate) -> bool:
            return self._usable(candidate, now, healthy=False)

        chosen = pick(candidates, steady, self._scorer, now, self._rng)
        if chosen is None:
            chosen = pick(candidates, healthy, self._scorer, now, self._rng)
        if self._saw_shut_out and ejection.panics(candidates, now, self._config.ejection):
            chosen = pick(candidates, any_health, self._scorer, now, self._rng)
        return chosen

    def _usable(self, candidate: Candidate, now: float, *, healthy: bool) -> bool:
        instance = candidate.instance
        if instance.in_flight >= instance.limit or instance.busy_until > now:
            return False
        if candidate.agent_id in self._round:
            return False
        if healthy and not instance.breaker.available(now):
            self._saw_shut_out = True
            return False
        return True

    def _send(self, candidate: Candidate, now: float) -> Send:
        permit, transition = candidate.instance.breaker.admit(now)
        if transition is not None:
            self._transitions.append((candidate.agent_id, transition))
        candidate.instance.in_flight += 1
        send = Send(candidate, len(self._attempts) + 1, self._timeout_s(candidate, now), self._plan.allowance.left)
        self._in_flight = _InFlight(send, permit, now)
        self._tried.add(candidate.agent_id)
        self._round.add(candidate.agent_id)
        self._place_wait_until = None
        return send

    def _timeout_s(self, candidate: Candidate, now: float) -> float:
        left_s = self._plan.deadline - now
        last = self._charged + 1 >= self._plan.retry.max_attempts or not candidate.capability.idempotent
        if last and self._plan.explicit_timeout:
            return left_s
        return min(left_s, self._config.timeouts.of(candidate.capability.timeout))

    # --- learning ------------------------------------------------------------------------------------------

    def _learn(self, flight: _InFlight, outcome: Outcome, elapsed_s: float, now: float) -> None:
        candidate = flight.send.candidate
        instance = candidate.instance
        instance.in_flight -= 1
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
        self._hear(instance, outcome, now)

    def _hear(self, instance: Instance, outcome: Outcome, now: float) -> None:
        """Take in what the instance says of itself."""
        match outcome:
            case Succeeded():
                state, instance.load = outcome.reply.state, outcome.reply.load
            case Rejected():
                state, instance.load = outcome.state, outcome.load or instance.load
                if outcome.retry_after_s is not None and not outcome.error.executed:
                    instance.busy_until = now + min(outcome.retry_after_s, _LONGEST_BUSY_S)
            case _:
                return
        if state == "draining":
            instance.avoid_until = now + _DRAIN_AVOID_S

    def _may_shut_out(self, instance: Instance, now: float) -> bool:
        candidates = self._lookup(self._plan.capability).candidates
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
        elsewhere = self._untried_usable(now)
        if elsewhere and _costs_nothing(outcome):
            return
        self._charged += 1
        if self._charged >= self._plan.retry.max_attempts or not self._plan.allowance.take():
            self._fail(candidate, outcome)
            return
        if elsewhere and not outcomes.executed(outcome):
            return
        self._resume_at = now + backoff.delay_s(self._charged, self._plan.retry, self._rng)
        if self._resume_at >= self._plan.deadline:
            self._fail(candidate, outcome)

    def _untried_usable(self, now: float) -> bool:
        """True if an instance that this call never tried would take it now."""

        def usable(candidate: Candidate) -> bool:
            untried = candidate.agent_id not in self._tried
            return untried and self._usable(candidate, now, healthy=True)

        return pick(self._candidates(), usable, self._scorer, now, self._rng) is not None

    def _nobody_admits(self, candidates: Sequence[Candidate], now: float) -> Step:
        """All are full, busy or shut out: wait if that can end in time, else say so."""
        full = [c for c in candidates if c.instance.in_flight >= c.instance.limit]
        if full:
            # A place comes free as soon as a call ends. Waiting longer than a connect may take would only
            # hide that the instance is too slow for its callers.
            if self._place_wait_until is None:
                self._place_wait_until = now + self._config.timeouts.connect_s
            if now < self._place_wait_until:
                return Wait(_PLACE_POLL_S * (0.5 + self._rng.random()))
        free_at = min(max(c.instance.busy_until, self._shut_until(c, now)) for c in candidates)
        if not full and now < free_at < self._plan.deadline:
            return Wait(free_at - now)
        busy = bool(full) or any(c.instance.busy_until > now for c in candidates)
        retry_after_s = free_at - now if free_at > now else None
        return self._raise(
            failures.none_admitted(self._call(), known=len(candidates), retry_after_s=retry_after_s, busy=busy)
        )

    @staticmethod
    def _shut_until(candidate: Candidate, now: float) -> float:
        breaker = candidate.instance.breaker
        return now if breaker.available(now) else max(breaker.until, now)

    def _nobody_offers(self) -> ReachError:
        if self._last is not None and self._attempts:
            text = (
                f"every instance of {self._plan.capability} went away during the call ({self._attempts[-1].detail})"
            )
        else:
            text = f"no instance of {self._plan.capability} is left"
        if self._plan.pinned is not None:
            text = f"agent {self._plan.pinned!r} went away, or never offered {self._plan.capability}"
        return failures.gone(self._call(), text)

    def _fail(self, candidate: Candidate, outcome: Outcome) -> None:
        idempotent = candidate.capability.idempotent
        self._raise(failures.failed(self._call(), outcome, agent_id=candidate.agent_id, idempotent=idempotent))

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
        return True
    return (
        isinstance(outcome, Rejected)
        and not outcome.error.executed
        and (outcome.state == "draining" or outcome.status in (404, 421))
    )
