"""The error a call ends with: what happened, to whom, and what to do next."""

from __future__ import annotations

from typing import Any, TypeAlias, assert_never

from agent_reach.errors import (
    AgentNotFound,
    Attempt,
    ConfigError,
    ContextLost,
    DeadlineExceeded,
    Forbidden,
    HopLimitExceeded,
    InvalidPayload,
    InvalidReply,
    NoHealthyAgent,
    OutcomeUnknown,
    Overloaded,
    ProtocolError,
    ReachError,
    RemoteError,
    Unauthorized,
)
from agent_reach.routing.outcomes import (
    Cancelled,
    LostAnswer,
    Outcome,
    Rejected,
    Succeeded,
    Unreadable,
    Unsent,
    executed,
    label,
)

__all__ = [
    "Call",
    "add_reason",
    "all_fail",
    "attempt_of",
    "context_lost",
    "deadline_passed",
    "failed",
    "gone",
    "none_admitted",
    "not_found",
    "tier_full",
]

Call: TypeAlias = dict[str, Any]
"""The keywords that every error of a call carries: capability, request_id, attempts."""

_BY_TYPE: dict[str, type[ReachError]] = {
    "Unauthorized": Unauthorized,
    "Forbidden": Forbidden,
    "ProtocolError": ProtocolError,
    "HopLimitExceeded": HopLimitExceeded,
    "ContextLost": ContextLost,
}
# The agent itself ended the handler: some of it has run.
_CUT_SHORT = {(504, "DeadlineExceeded"), (503, "NotStarted")}
_BY_STATUS: dict[int, type[ReachError]] = {401: Unauthorized, 403: Forbidden}


def not_found(
    call: Call,
    *,
    namespace: str,
    near: tuple[str, ...],
    pinned: str | None,
    known: int,
    stale_s: float | None = None,
) -> AgentNotFound:
    """Nobody offers it, or the instance asked for doesn't."""
    capability = call["capability"]
    if pinned is not None:
        text = f"agent {pinned!r} doesn't offer {capability} in namespace {namespace!r}"
        text += f"; {known} other instance(s) do: call without agent_id=" if known else ", nor does any other"
    else:
        text = f"nobody offers {capability} in namespace {namespace!r}"
        text += (
            f". Did you mean {' or '.join(near)}?" if near else ". Is the agent running? wait_for() waits for it"
        )
    if stale_s is not None:
        text += f" (as known {stale_s:.0f} s ago; the registry is away since)"
    return AgentNotFound(text, near=near, **call)


def gone(call: Call, text: str) -> AgentNotFound:
    """It was offered when the call began, and is no longer."""
    return AgentNotFound(f"{text}. Nothing more was tried", **call)


def none_admitted(call: Call, *, known: int, retry_after_s: float | None, busy: bool) -> ReachError:
    """It is offered, but no instance takes a call now: they are at their limit (`busy`), or shut out."""
    capability = call["capability"]
    when = "" if retry_after_s is None else f"; the first may be tried again in {retry_after_s:.1f} s"
    if busy:
        text = f"all {known} instance(s) of {capability} are at their limit{when}. {_what_ran(call)}"
        return Overloaded(text, retry_after_s=retry_after_s, **call)
    text = f"{capability} is offered by {known} instance(s), but all are shut out after failures{when}"
    return NoHealthyAgent(text, retry_after_s=retry_after_s, **call)


def all_fail(call: Call, *, in_a_row: int, waited_s: float) -> NoHealthyAgent:
    """Whatever the instances depend on is down."""
    text = (
        f"the last {in_a_row} calls of {call['capability']} failed, whichever instance they went to; waited "
        f"{waited_s:g} s for one to succeed. {_what_ran(call)}"
    )
    return NoHealthyAgent(text, **call)


def tier_full(call: Call, tier: str, limit: int) -> Overloaded:
    """This client has as many calls of the tier in flight as may be."""
    text = (
        f"{call['capability']} had to wait too long: this client has {limit} calls of tier {tier!r} in flight, as "
        f"many as may be (BulkheadConfig.per_tier). {_what_ran(call)}"
    )
    return Overloaded(text, **call)


def context_lost(call: Call, owner: str | None, *, pinned: str | None) -> ReachError:
    """The conversation's instance is gone, or not the one asked for, and the caller wants no other."""
    if pinned not in (None, owner):
        text = f"agent {owner!r} holds this conversation, so agent_id={pinned!r} and require_context=True exclude"
        return ConfigError(f"{text} each other: leave one of them out. {_what_ran(call)}", **call)
    text = (
        f"agent {owner!r} held this conversation and is gone, and require_context=True wants no other. "
        f"{_what_ran(call)}; begin a new conversation, or call without require_context"
    )
    return ContextLost(text, **call)


def add_reason(error: ReachError, reason: str) -> None:
    """Say in the message why nothing more was tried."""
    error.message = f"{error.message} ({reason})"


def deadline_passed(call: Call, *, phase: str, total_s: float, last: Outcome | None) -> DeadlineExceeded:
    """The time was up before an answer came."""
    where = {"pick": "before the first attempt", "backoff": "before the next attempt"}.get(
        phase, f"in phase {phase}"
    )
    text = f"{call['capability']} had no answer within {total_s:.3g} s; the time was up {where}"
    if last is not None:
        text += f" ({_say(last)})"
    return DeadlineExceeded(f"{text}. {_what_ran(call)}; give it more with timeout=", phase=phase, **call)


def failed(call: Call, outcome: Outcome, *, agent_id: str, idempotent: bool) -> ReachError:
    """Translate the outcome of the last attempt."""
    match outcome:
        case Rejected():
            return _rejected(call, outcome, agent_id, idempotent)
        case Unsent():
            return _unsent(call, outcome, agent_id)
        case LostAnswer():
            return _lost(call, outcome, agent_id, idempotent)
        case Unreadable():
            text = f"{agent_id} answered {call['capability']} with something unreadable: {outcome.detail}"
            return InvalidReply(text, **call)
        case Succeeded() | Cancelled():
            raise AssertionError(f"{outcome} is no failure")
        case _:
            assert_never(outcome)


def _lost(call: Call, outcome: LostAnswer, agent_id: str, idempotent: bool) -> ReachError:
    if not idempotent:
        return _outcome_unknown(call, agent_id, outcome.detail)
    if outcome.timed_out:
        text = f"{call['capability']} had no answer in time from {agent_id} ({outcome.detail})"
        return DeadlineExceeded(text, phase="answer", **call)
    text = f"{agent_id} took {call['capability']} and never answered ({outcome.detail}); no attempt is left"
    return NoHealthyAgent(text, **call)


def _outcome_unknown(call: Call, agent_id: str, detail: str) -> OutcomeUnknown:
    text = (
        f"{call['capability']} was sent to {agent_id} and its answer lost ({detail}). It isn't idempotent, so it "
        "was not repeated: check there whether it was done, or declare it idempotent=True if repeating does no harm"
    )
    return OutcomeUnknown(text, agent_id=agent_id, **call)


def _unsent(call: Call, outcome: Unsent, agent_id: str) -> ReachError:
    if outcome.local:
        text = f"{call['capability']} could not be sent from this process ({outcome.detail}). {_what_ran(call)}"
        return Overloaded(text, **call) if outcome.phase == "pool" else ProtocolError(text, **call)
    text = f"no instance of {call['capability']} could be reached; last {agent_id}: {outcome.detail}"
    return NoHealthyAgent(f"{text}. {_what_ran(call)}", **call)


def _rejected(call: Call, outcome: Rejected, agent_id: str, idempotent: bool) -> ReachError:
    error, capability = outcome.error, call["capability"]
    said = f"{agent_id} refused {capability}: {error.message}"
    if 300 <= outcome.status < 400:
        return ProtocolError(
            f"{agent_id} answered {capability} with {error.message}; is its registered url right?", **call
        )
    if outcome.status >= 500 and not outcome.enveloped and not idempotent:
        # Something between us and the agent answered; whether the agent ran is not known.
        return _outcome_unknown(
            call, agent_id, f"HTTP {outcome.status} from a proxy or a server that isn't reach/1"
        )
    if error.type == "InvalidResult":
        return InvalidReply(f"{agent_id} could not encode the answer of {capability}: {error.message}", **call)
    cut_short = error.executed and (outcome.status, error.type) in _CUT_SHORT
    if cut_short and not idempotent:
        return _outcome_unknown(call, agent_id, error.message)
    if error.type == "DeadlineExceeded" and outcome.status == 504:
        text = f"{capability} didn't end on {agent_id} within the time of an attempt: {error.message}"
        return DeadlineExceeded(text if error.executed else said, phase="remote", **call)
    # What ran and failed is the handler's error, also where a nested call of its own gave it one of our types.
    return _remote_error(call, outcome, agent_id) if error.executed else _refused(call, outcome, agent_id, said)


def _refused(call: Call, outcome: Rejected, agent_id: str, said: str) -> ReachError:
    """The agent itself, or whatever answered in its place, refused before anything ran."""
    error = outcome.error
    if error.type == "InvalidPayload" or outcome.status in (413, 415, 422):
        return InvalidPayload(
            f"{error.message} (refused by {agent_id}; nothing ran)", problems=error.problems, **call
        )
    if error.type == "Overloaded" or outcome.status == 429 or outcome.state == "draining":
        return Overloaded(f"{said}. {_what_ran(call)}", retry_after_s=outcome.retry_after_s, **call)
    if error.type in ("UnknownCapability", "Misdirected"):
        return NoHealthyAgent(f"{said}. Its registry record is out of date", **call)
    if error.type == "NotStarted":
        return NoHealthyAgent(said, **call)
    known = _BY_TYPE.get(error.type) or _BY_STATUS.get(outcome.status)
    return known(said, **call) if known is not None else _remote_error(call, outcome, agent_id)


def _remote_error(call: Call, outcome: Rejected, agent_id: str) -> RemoteError:
    error = outcome.error
    return RemoteError(
        f"{call['capability']} failed on {agent_id}: {error.type}: {error.message}",
        agent_id=agent_id,
        remote_type=error.type,
        remote_message=error.message,
        status=outcome.status,
        **call,
    )


def _what_ran(call: Call) -> str:
    """The sentence that a caller acts on: it must be true of every attempt, not only of the last."""
    if any(attempt.executed for attempt in call["attempts"]):
        return "An earlier attempt may have been executed"
    return "Nothing was executed"


def _say(outcome: Outcome) -> str:
    match outcome:
        case Rejected():
            return f"the last attempt got {outcome.status} {outcome.error.type}: {outcome.error.message}"
        case Unsent() | LostAnswer() | Unreadable():
            return f"the last attempt: {outcome.detail}"
        case Succeeded() | Cancelled():
            return "an attempt ended"
        case _:
            assert_never(outcome)


def attempt_of(number: int, agent_id: str, url: str, outcome: Outcome, elapsed_s: float) -> Attempt:
    """Build the record of one attempt; details are cut, since some come from peers."""
    name, detail = label(outcome)
    return Attempt(number, agent_id, url, name, detail[:300], elapsed_s, executed(outcome))
