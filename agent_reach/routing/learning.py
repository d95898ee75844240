"""What the outcome of an attempt teaches about the instance that it went to."""

from __future__ import annotations

from dataclasses import dataclass

from agent_reach.routing import ejection, outcomes
from agent_reach.routing.breaker import BreakerPermit, BreakerState, Transition, Verdict
from agent_reach.routing.instance import Instance
from agent_reach.routing.outage import OutageState
from agent_reach.routing.outcomes import Cancelled, LostAnswer, Outcome, Rejected, Succeeded
from agent_reach.routing.router import Router
from agent_reach.routing.steps import CallPlan, Send

__all__ = ["InFlight", "begin", "learn", "misplaced"]

# How long an instance that drains, or at whose address another one answered, comes after all others. It is gone
# from the registry sooner (alibaba/dubbo: 30 s).
_AVOID_S = 30.0
# How long an instance is taken at its word that it is overloaded. Longer than most deadlines, and short enough that
# a lone instance with a wrong Retry-After doesn't stay dark.
_LONGEST_BUSY_S = 60.0


@dataclass(frozen=True, slots=True)
class InFlight:
    """The permit of one attempt: what must be given back when it ends. `load`: calls in flight when it began."""

    send: Send
    breaker: BreakerPermit
    at: float
    load: int


def begin(send: Send, plan: CallPlan, router: Router, now: float) -> tuple[InFlight, Transition | None]:
    """Take a permit for an attempt."""
    candidate = send.candidate
    permit, transition = candidate.instance.breaker.admit(now)
    candidate.instance.in_flight += 1
    candidate.learnt.began.append(now)
    router.begin(plan.tier)
    return InFlight(send, permit, now, len(candidate.learnt.began)), transition


def learn(
    flight: InFlight, outcome: Outcome, plan: CallPlan, router: Router, now: float
) -> tuple[Transition | None, OutageState | None]:
    """Give an attempt's permit back and take in how it ended; return what changed of its breaker and of the
    capability as a whole.
    """
    candidate = flight.send.candidate
    instance, learnt = candidate.instance, candidate.learnt
    instance.in_flight -= 1
    learnt.began.remove(flight.at)
    router.end(plan.tier)
    config, elapsed_s = router.config, now - flight.at
    attempt_s = config.timeouts.of(candidate.capability.timeout)
    verdict = outcomes.verdict(outcome, waited_s=elapsed_s, attempt_s=attempt_s)
    if verdict is Verdict.SUCCESS:
        learnt.latency.observe(elapsed_s, now)
        router.shared(plan.capability).latencies.observe(elapsed_s)
    elif verdict is not Verdict.NEUTRAL:
        learnt.latency.fail(max(elapsed_s, config.scoring.failure_latency_s), now)
    elif _had_it(outcome) and elapsed_s > learnt.latency.at(now):
        # Nobody's fault, but whoever gave up would have had to wait longer still.
        learnt.latency.observe(elapsed_s, now)
        router.shared(plan.capability).latencies.observe(elapsed_s)
    outage, outage_state = router.shared(plan.capability).outage, None
    if verdict is Verdict.SUCCESS:
        outage_state = outage.succeeded(now)
    elif verdict is not Verdict.NEUTRAL:
        outage_state = outage.failed(now, router.rng)
    if verdict is not Verdict.NEUTRAL:
        learnt.success.observe(verdict is Verdict.SUCCESS, now)
    if learnt.limit is not None:
        _teach_limit(flight, outcome, elapsed_s)
    transition = instance.breaker.record(
        flight.breaker,
        verdict,
        now,
        router.rng,
        lambda: _may_shut_out(instance, plan, router, now),
        plan.trip_after,
    )
    if transition is not None and transition.after is BreakerState.CLOSED:
        instance.warm_from = now
        instance.forgive()
    _hear(flight, outcome, now)
    return transition, outage_state


def misplaced(outcome: Outcome) -> bool:
    """True if something else than the instance meant answers at its address, or it no longer offers this."""
    return isinstance(outcome, Rejected) and not outcome.error.executed and outcome.status in (404, 421)


def _had_it(outcome: Outcome) -> bool:
    """True if the instance had the call for all the time, and didn't answer it."""
    match outcome:
        case Cancelled():
            return True
        case LostAnswer():
            return outcome.timed_out
        case Rejected():
            return outcome.error.type == "DeadlineExceeded"
        case _:
            return False


def _hear(flight: InFlight, outcome: Outcome, now: float) -> None:
    """Take in what the instance says of itself."""
    instance, learnt = flight.send.candidate.instance, flight.send.candidate.learnt
    match outcome:
        case Succeeded():
            state = outcome.reply.state
            learnt.load = outcome.reply.load or learnt.load
            learnt.busy_until = 0.0
        case Rejected():
            state = outcome.state
            learnt.load = outcome.load or learnt.load
            if outcome.retry_after_s is not None:
                learnt.busy_until = now + min(outcome.retry_after_s, _LONGEST_BUSY_S)
        case _:
            return
    if state == "draining" or misplaced(outcome):
        instance.avoid_until = now + _AVOID_S


def _teach_limit(flight: InFlight, outcome: Outcome, elapsed_s: float) -> None:
    limit = flight.send.candidate.learnt.limit
    assert limit is not None
    if isinstance(outcome, Succeeded):
        limit.observe(elapsed_s, flight.load)
    elif not isinstance(outcome, Cancelled):
        refused = isinstance(outcome, Rejected) and not outcome.error.executed
        timed_out = getattr(outcome, "timed_out", False)
        if refused or timed_out:
            limit.observe(elapsed_s, flight.load, dropped=True)


def _may_shut_out(instance: Instance, plan: CallPlan, router: Router, now: float) -> bool:
    return ejection.may_shut_out(instance, router.lookup(plan.capability).candidates, now, router.config.ejection)
