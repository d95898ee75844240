"""What all baselines share: the loop of attempts, so that each file shows only its own rules.

The loop is the same for all, and the same as Agent-Reach's: one index, the capability's tier for each attempt (the
last one may use all that is left of a total that the caller named), `CallPlan.of`'s total deadline, no attempt and
no pause past it. What differs is whom to ask, what to learn of the answer, and whether and when to ask again.

A baseline keeps what it learnt by agent id and incarnation, for each capability apart, as the projects that they
are taken from keep it for each service. Of the index's own instances it changes nothing.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Generic, TypeVar

from agent_reach.config import ReachConfig
from agent_reach.errors import Attempt, ReachError
from agent_reach.routing import failures
from agent_reach.routing.index import Change, Index
from agent_reach.routing.instance import Candidate
from agent_reach.routing.outcomes import Cancelled, Outcome, Succeeded
from agent_reach.routing.steps import CallPlan, Raise, Return, Send, Step, Wait
from agent_reach.testing.simulation.algorithms import CallRequest

__all__ = ["Baseline", "BaselineSession", "Rules", "Stats"]


class Stats:
    """What is known of one instance; `in_flight` counts this client's calls of the capability to it."""

    __slots__ = ("in_flight", "incarnation")

    def __init__(self) -> None:
        self.incarnation = ""
        self.in_flight = 0


S = TypeVar("S", bound=Stats)


class Rules(ABC, Generic[S]):
    """One algorithm's rules, and what it learnt, for one capability of one client. Times are virtual seconds."""

    max_attempts: ClassVar[int]

    def __init__(self, rng: random.Random, zone: str | None) -> None:
        self.rng = rng
        self.zone = zone
        self._stats: dict[str, S] = {}

    def of(self, candidate: Candidate, now: float) -> S:
        """Return what is known of an instance; a restarted one is new."""
        info = candidate.instance.info
        known = self._stats.get(info.agent_id)
        if known is None or known.incarnation != info.incarnation:
            known = self._stats[info.agent_id] = self.fresh(now)
            known.incarnation = info.incarnation
        return known

    @abstractmethod
    def fresh(self, now: float) -> S:
        """Return what is known of an instance that nothing is known of."""

    @abstractmethod
    def pick(self, call: BaselineSession, candidates: Sequence[Candidate], now: float) -> Candidate | None:
        """Choose among `candidates`, of which there is at least one; None if none of them is to be asked."""

    @abstractmethod
    def learn(self, call: BaselineSession, stats: S, outcome: Outcome, elapsed_s: float, now: float) -> None:
        """Take in how an attempt ended that took `elapsed_s`."""

    @abstractmethod
    def retry_in_s(self, call: BaselineSession, candidate: Candidate, outcome: Outcome, now: float) -> float | None:
        """Seconds until the call asks again after this failure, which it has already learnt; None ends it."""

    def nobody_in_s(self, call: BaselineSession) -> float | None:
        """Seconds until the call asks again after `pick` chose nobody; None ends it."""
        return None

    def is_last(self, call: BaselineSession, candidate: Candidate) -> bool:
        """True if the attempt that begins isn't repeated when it times out."""
        return len(call.attempts) + 1 >= self.max_attempts

    def before_change(self, candidates: Sequence[Candidate], now: float) -> None:
        """Do what is due before the index changes at `now`."""
        return


class Baseline:
    """A client that decides by `rules`, one set of them for each capability that it calls."""

    def __init__(
        self,
        rules: Callable[[random.Random, str | None], Rules[Any]],
        rng: random.Random,
        zone: str | None = None,
    ) -> None:
        self.config = ReachConfig()
        self.index = Index(self.config)
        self._make = rules
        self._rng = rng
        self._zone = zone
        self._rules: dict[str, Rules[Any]] = {}

    def apply(self, change: Change, now: float) -> None:
        """Take in that an instance came, changed or went."""
        for capability, rules in self._rules.items():
            rules.before_change(self.index.lookup(capability).candidates, now)
        self.index.apply(change, now)

    def rules_of(self, capability: str) -> Rules[Any]:
        """Return the rules of one capability, with what they learnt."""
        rules = self._rules.get(capability)
        if rules is None:
            rules = self._rules[capability] = self._make(self._rng, self._zone)
        return rules

    def open(self, request: CallRequest) -> BaselineSession | None:
        """Begin a call; None if nobody is known that offers it."""
        candidates = self.index.lookup(request.capability).candidates
        if not candidates:
            return None
        plan = CallPlan.of(
            request.capability,
            request.request_id,
            candidates,
            started=request.started,
            timeout_s=request.timeout_s,
            left_s=float("inf") if request.left_s is None else request.left_s,
            retry=self.config.retry,
            timeouts=self.config.timeouts,
            allowance=request.allowance,
            pinned=None,
            preferred=(),
        )
        return BaselineSession(plan, self, self.rules_of(request.capability))


class BaselineSession:
    """One call of a baseline, driven as `agent_reach.routing.session.CallSession` is.

    `attempts` are those that ended, `tried` whom they were sent to. For rules that count otherwise: `charged`
    counts the attempts that count against the limit, `backoffs` the pauses that grew, `nacked` says that a refusal
    was repeated at once.
    """

    __slots__ = (
        "_client",
        "_end",
        "_flight",
        "_last",
        "_resume_at",
        "_rules",
        "attempts",
        "backoffs",
        "charged",
        "nacked",
        "plan",
        "tried",
    )

    def __init__(self, plan: CallPlan, client: Baseline, rules: Rules[Any]) -> None:
        self.plan = plan
        self.attempts: list[Attempt] = []
        self.tried: list[str] = []
        self.charged = 0
        self.backoffs = 0
        self.nacked = False
        self._client = client
        self._rules = rules
        self._flight: tuple[Send, Stats, float] | None = None
        self._resume_at = plan.started
        self._last: Outcome | None = None
        self._end: Return | Raise | None = None

    def candidates(self) -> Sequence[Candidate]:
        """Who offers the capability now."""
        return self._client.index.lookup(self.plan.capability).candidates

    def next(self, now: float) -> Step:
        """Say what to do at `now`."""
        if self._flight is not None:
            raise RuntimeError("record the outcome of the attempt before asking for the next step")
        if self._end is not None:
            return self._end
        if now >= self.plan.deadline:
            return self._deadline_passed()
        if now < self._resume_at:
            return Wait(self._resume_at - now)
        candidates = self.candidates()
        if not candidates:
            text = f"no instance of {self.plan.capability} is left"
            return self._raise(failures.gone(self._call(), text))
        candidate = self._rules.pick(self, candidates, now)
        if candidate is None:
            return self._nobody(len(candidates), now)
        return self._send(candidate, now)

    def record(self, outcome: Outcome, now: float, send: Send | None = None) -> None:
        """Take in how the attempt ended."""
        if self._flight is None or (send is not None and send is not self._flight[0]):
            raise RuntimeError("no attempt is under way")
        sent, stats, at = self._flight
        self._flight = None
        self._last = outcome
        candidate = sent.candidate
        elapsed_s = now - at
        stats.in_flight -= 1
        self.attempts.append(
            failures.attempt_of(sent.number, candidate.agent_id, candidate.url, outcome, elapsed_s)
        )
        self._rules.learn(self, stats, outcome, elapsed_s, now)
        match outcome:
            case Succeeded():
                self._end = Return(outcome.reply, tuple(self.attempts))
            case Cancelled():
                self._end = Raise(ReachError("the caller cancelled this call", **self._call()))
            case _:
                delay_s = self._rules.retry_in_s(self, candidate, outcome, now)
                if delay_s is None or now + delay_s >= self.plan.deadline:
                    self._fail(candidate, outcome)
                else:
                    self._resume_at = now + delay_s

    def _send(self, candidate: Candidate, now: float) -> Send:
        stats = self._rules.of(candidate, now)
        stats.in_flight += 1
        timeout_s = self.plan.deadline - now
        if not (self.plan.explicit_timeout and self._rules.is_last(self, candidate)):
            timeout_s = min(timeout_s, self._client.config.timeouts.of(candidate.capability.timeout))
        send = Send(candidate, len(self.attempts) + 1, timeout_s, retry_allowance=0)
        self.tried.append(candidate.agent_id)
        self._flight = send, stats, now
        return send

    def _nobody(self, known: int, now: float) -> Step:
        delay_s = self._rules.nobody_in_s(self)
        if delay_s is None or now + delay_s >= self.plan.deadline:
            error = failures.none_admitted(self._call(), known=known, retry_after_s=None, busy=False)
            return self._raise(error)
        self._resume_at = now + delay_s
        return Wait(delay_s)

    def _fail(self, candidate: Candidate, outcome: Outcome) -> None:
        idempotent = candidate.capability.idempotent
        self._raise(failures.failed(self._call(), outcome, agent_id=candidate.agent_id, idempotent=idempotent))

    def _deadline_passed(self) -> Raise:
        total_s = self.plan.deadline - self.plan.started
        phase = "backoff" if self.attempts else "pick"
        error = failures.deadline_passed(self._call(), phase=phase, total_s=total_s, last=self._last)
        return self._raise(error)

    def _raise(self, error: ReachError) -> Raise:
        self._end = Raise(error)
        return self._end

    def _call(self) -> failures.Call:
        return {
            "capability": self.plan.capability,
            "request_id": self.plan.request_id,
            "attempts": tuple(self.attempts),
        }
