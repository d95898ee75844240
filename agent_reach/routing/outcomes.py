"""How an attempt ended, and what that says of the instance and of trying again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias, assert_never

from agent_reach.model import ErrorInfo, LoadReport, ReplyEnvelope
from agent_reach.routing.breaker import Verdict

__all__ = [
    "Cancelled",
    "LostAnswer",
    "Outcome",
    "Rejected",
    "Succeeded",
    "Unreadable",
    "Unsent",
    "brief",
    "executed",
    "label",
    "unspent",
    "verdict",
    "worth_retrying",
]

# A caller that gave an instance less than this (or than the capability's own time, if that is shorter) and
# ran out of time learnt nothing of the instance.
_FAIR_WAIT_S = 1.0


@dataclass(frozen=True, slots=True)
class Succeeded:
    """The handler answered."""

    reply: ReplyEnvelope


@dataclass(frozen=True, slots=True)
class Rejected:
    """The peer answered with an error. `enveloped` False: the answer isn't of reach/1, so all of it is a guess.

    `retry_allowance`: how many of the retries that went along are left; None if it doesn't say.
    """

    status: int
    error: ErrorInfo
    state: str = "accepting"
    load: LoadReport | None = None
    enveloped: bool = True
    retry_allowance: int | None = None

    @property
    def retry_after_s(self) -> float | None:
        """Seconds until the instance wants to be asked again, if it said so."""
        return None if self.error.retry_after_ms is None else self.error.retry_after_ms / 1000


@dataclass(frozen=True, slots=True)
class Unsent:
    """Nothing reached the peer. `local`: this process is at fault, not the peer."""

    phase: str
    detail: str
    local: bool = False
    timed_out: bool = False


@dataclass(frozen=True, slots=True)
class LostAnswer:
    """Sent, and no answer came: it may have been executed."""

    detail: str
    timed_out: bool = False


@dataclass(frozen=True, slots=True)
class Unreadable:
    """An answer came that isn't one of reach/1, or is too large, which it would be elsewhere too (`final`)."""

    detail: str
    final: bool = False


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The caller gave up."""


Outcome: TypeAlias = Succeeded | Rejected | Unsent | LostAnswer | Unreadable | Cancelled


def label(outcome: Outcome) -> tuple[str, str]:
    """Return the outcome's name and detail for people, as in `Attempt`."""
    match outcome:
        case Succeeded():
            return "ok", ""
        case Rejected():
            name = "failed" if outcome.error.executed else "refused"
            return name, f"{outcome.status} {outcome.error.type}: {outcome.error.message}"
        case Unsent():
            return "never_sent", f"{outcome.phase}: {outcome.detail}"
        case LostAnswer():
            return "maybe_executed", outcome.detail
        case Unreadable():
            return "unreadable", outcome.detail
        case Cancelled():
            return "cancelled", ""
        case _:
            assert_never(outcome)


def brief(outcome: Outcome) -> str:
    """The outcome for a log: never a peer's own words, which may repeat the payload."""
    if isinstance(outcome, Rejected):
        return f"{outcome.status} {outcome.error.type[:100]}"
    return label(outcome)[1][:300]


def executed(outcome: Outcome) -> bool:
    """False only if it is certain that nothing ran."""
    match outcome:
        case Unsent():
            return False
        case Rejected():
            return outcome.error.executed
        case Succeeded() | LostAnswer() | Unreadable() | Cancelled():
            return True
        case _:
            assert_never(outcome)


def worth_retrying(outcome: Outcome, *, idempotent: bool) -> bool:
    """True if another attempt may succeed and can do no harm.

    What ran, or may have run, is repeated only for an idempotent capability.
    """
    match outcome:
        case Succeeded() | Cancelled():
            return False
        case Unsent():
            # A request that can't be built here can't be built for another instance either.
            return outcome.phase != "local"
        case Rejected():
            return outcome.error.retryable and (idempotent or not outcome.error.executed)
        case LostAnswer():
            return idempotent
        case Unreadable():
            return idempotent and not outcome.final
        case _:
            assert_never(outcome)


def verdict(outcome: Outcome, *, waited_s: float, attempt_s: float) -> Verdict:
    """Say whose fault it was. `waited_s` is how long we waited, `attempt_s` the capability's own time, in seconds.

    Neutral: cancellation, what the caller did wrong (4xx), faults of this process, "I am full", "I am leaving".
    """
    match outcome:
        case Succeeded():
            return Verdict.SUCCESS
        case Cancelled():
            return Verdict.NEUTRAL
        case Unsent():
            unfair = outcome.local or (outcome.timed_out and _unfair(waited_s, attempt_s))
            return Verdict.NEUTRAL if unfair else Verdict.UNREACHABLE
        case LostAnswer():
            unfair = outcome.timed_out and _unfair(waited_s, attempt_s)
            return Verdict.NEUTRAL if unfair else Verdict.FAILURE
        case Rejected():
            return _verdict_of_rejection(outcome, waited_s, attempt_s)
        case Unreadable():
            return Verdict.FAILURE
        case _:
            assert_never(outcome)


def unspent(outcome: Outcome, lent: int) -> int:
    """How many of the `lent` retries come back. An answer that was lost may have spent them all."""
    match outcome:
        case Succeeded():
            said = outcome.reply.retry_allowance
        case Rejected():
            said = outcome.retry_allowance
            if said is None and not outcome.error.executed:
                return lent
        case Unsent():
            return lent
        case LostAnswer() | Unreadable() | Cancelled():
            return 0
        case _:
            assert_never(outcome)
    return min(lent, said or 0)


def _verdict_of_rejection(outcome: Rejected, waited_s: float, attempt_s: float) -> Verdict:
    if 300 <= outcome.status < 400:
        # Whatever lives there, it isn't the agent that registered.
        return Verdict.FAILURE
    if outcome.status < 500 or not outcome.error.executed:
        return Verdict.NEUTRAL
    if outcome.error.type == "DeadlineExceeded" and _unfair(waited_s, attempt_s):
        return Verdict.NEUTRAL
    return Verdict.FAILURE


def _unfair(waited_s: float, attempt_s: float) -> bool:
    # The callee gives up a twentieth sooner than we do, and clocks are a little off.
    return waited_s < 0.9 * min(_FAIR_WAIT_S, attempt_s)
