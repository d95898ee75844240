"""Everything that can go wrong, as one tree.

ReachError
 ├─ ConfigError           a declaration, an argument or a setting is wrong; nothing was sent
 ├─ ClientNotOpen         the client was used outside `async with`
 ├─ AgentNotFound         nobody offers the capability
 ├─ NoHealthyAgent        it is offered, but no instance can be used now
 ├─ DeadlineExceeded      the time was up
 ├─ Overloaded            every instance is at its limit
 ├─ RemoteError           the handler failed
 ├─ OutcomeUnknown        sent, not idempotent, and the answer was lost
 ├─ InvalidPayload        the payload doesn't fit the capability
 ├─ InvalidReply          the answer can't be read, or doesn't fit the expected model
 ├─ ProtocolError         the other side doesn't speak reach/1
 ├─ Unauthorized, Forbidden
 ├─ ContextLost           the instance that held the conversation is gone
 ├─ HopLimitExceeded      agents call each other in a circle
 ├─ RegistryUnavailable   etcd can't be reached
 ├─ AgentIdInUse          another live process holds this agent id
 └─ SchemaConflict        two instances mean different contracts by one name

No exception of a dependency leaves the library: adapters translate at their boundary. All of these pickle.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = [
    "AgentIdInUse",
    "AgentNotFound",
    "Attempt",
    "ClientNotOpen",
    "ConfigError",
    "ContextLost",
    "DeadlineExceeded",
    "Forbidden",
    "HopLimitExceeded",
    "InvalidPayload",
    "InvalidReply",
    "NoHealthyAgent",
    "OutcomeUnknown",
    "Overloaded",
    "ProtocolError",
    "ReachError",
    "RegistryUnavailable",
    "RemoteError",
    "SchemaConflict",
    "Unauthorized",
]


@dataclass(frozen=True, slots=True)
class Attempt:
    """One try of a call: where it went and how it ended.

    `outcome` is one of `ok`, `never_sent`, `refused` (answered, nothing ran), `failed` (answered, it ran),
    `maybe_executed` (no answer), `unreadable`, `cancelled`; `detail` says it in words. `elapsed_s` is the time
    that this attempt took, in seconds. `executed` is False only if it is certain that nothing ran.
    """

    number: int
    agent_id: str
    url: str
    outcome: str
    detail: str
    elapsed_s: float
    executed: bool = True

    def __str__(self) -> str:
        text = f"#{self.number} {self.agent_id} at {self.url}: {self.outcome}"
        return f"{text} ({self.detail}) after {self.elapsed_s * 1000:.0f} ms" if self.detail else text


class ReachError(Exception):
    """Root of every error of this library.

    `capability` and `request_id` name the call, `attempts` lists what was tried; they are None and empty
    for an error that belongs to no call.
    """

    def __init__(
        self,
        message: str,
        *,
        capability: str | None = None,
        request_id: str | None = None,
        attempts: tuple[Attempt, ...] = (),
    ) -> None:
        super().__init__(message)
        self.message = message
        self.capability = capability
        self.request_id = request_id
        self.attempts = attempts
        # True if only the call tree's purse of retries stood in the way of another attempt: a hop further up that
        # still has some may repeat the whole.
        self.starved = False

    def __str__(self) -> str:
        if len(self.attempts) < 2:
            return self.message
        return "\n  ".join([self.message, *map(str, self.attempts)])

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.args, self.__dict__.copy())


def _rebuild(cls: type[ReachError], args: tuple[Any, ...], state: Mapping[str, Any]) -> ReachError:
    """Rebuild a pickled error without running its constructor, whose keywords `args` doesn't hold."""
    error = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(state)
    return error


class ConfigError(ReachError, ValueError):
    """A declaration, an argument or a setting is wrong. Nothing was sent; the message says what to write."""


class ClientNotOpen(ReachError):
    """The client was used before `async with` entered it or after it left."""


class AgentNotFound(ReachError):
    """No instance offers the capability. `near` holds offered names that look alike, best first."""

    def __init__(self, message: str, *, near: tuple[str, ...] = (), **call: Any) -> None:
        super().__init__(message, **call)
        self.near = near


class NoHealthyAgent(ReachError):
    """The capability is offered, but every instance is shut out or refused.

    `retry_after_s` is when the first of them may be tried again, in seconds from the error; None if unknown.
    """

    def __init__(self, message: str, *, retry_after_s: float | None = None, **call: Any) -> None:
        super().__init__(message, **call)
        self.retry_after_s = retry_after_s


class DeadlineExceeded(ReachError):
    """The time was up.

    `phase` says in which part: `pick` (before the first attempt), `pool`, `dns`, `connect` or `tls` (before
    anything was sent), `answer` (waiting for it), `remote` (the callee says so) or `backoff` (between attempts).
    """

    def __init__(self, message: str, *, phase: str, **call: Any) -> None:
        super().__init__(message, **call)
        self.phase = phase


class Overloaded(ReachError):
    """Every instance that could be used is at its limit; nothing was executed.

    `retry_after_s` is what the last of them asked for, in seconds; None if it named no time.
    """

    def __init__(self, message: str, *, retry_after_s: float | None = None, **call: Any) -> None:
        super().__init__(message, **call)
        self.retry_after_s = retry_after_s


class RemoteError(ReachError):
    """The handler ran and failed. `remote_type` and `remote_message` are what it raised, `agent_id` where."""

    def __init__(
        self, message: str, *, agent_id: str, remote_type: str, remote_message: str, status: int, **call: Any
    ) -> None:
        super().__init__(message, **call)
        self.agent_id = agent_id
        self.remote_type = remote_type
        self.remote_message = remote_message
        self.status = status


class OutcomeUnknown(ReachError):
    """The request was sent and its answer lost; the capability isn't idempotent, so it wasn't sent again.

    It may have been executed or not: ask `agent_id`, or repeat only if a second execution does no harm.
    """

    def __init__(self, message: str, *, agent_id: str, **call: Any) -> None:
        super().__init__(message, **call)
        self.agent_id = agent_id


class InvalidPayload(ReachError):
    """The payload can't be encoded or doesn't fit the capability's schema; the handler didn't run.

    `problems` holds one (field, reason) pair per fault, as ("limit", "Input should be a valid integer").
    """

    def __init__(self, message: str, *, problems: tuple[tuple[str, str], ...] = (), **call: Any) -> None:
        super().__init__(message, **call)
        self.problems = problems


class InvalidReply(ReachError):
    """The answer isn't readable (not JSON, too large) or doesn't fit the `response_model`."""


class ProtocolError(ReachError):
    """The other side doesn't speak reach/1, or says that we don't."""


class Unauthorized(ReachError):
    """The peer or the registry doesn't know who asks: credentials are missing or wrong."""


class Forbidden(ReachError):
    """The peer or the registry knows who asks and doesn't allow it."""


class ContextLost(ReachError):
    """The instance that held the conversation is gone, and the caller required it."""


class HopLimitExceeded(ReachError):
    """The call tree is deeper than the hop limit; most often two agents call each other in a circle."""


class RegistryUnavailable(ReachError):
    """The registry can't be reached. `endpoints` are the addresses that were tried.

    `retry_after_s`: it isn't asked again before, in seconds from the error; None if unknown.
    """

    def __init__(
        self, message: str, *, endpoints: tuple[str, ...] = (), retry_after_s: float | None = None, **call: Any
    ) -> None:
        super().__init__(message, **call)
        self.endpoints = endpoints
        self.retry_after_s = retry_after_s


class AgentIdInUse(ReachError):
    """Another live process holds this agent id; ours was not registered."""

    def __init__(self, message: str, *, agent_id: str, **call: Any) -> None:
        super().__init__(message, **call)
        self.agent_id = agent_id


class SchemaConflict(ReachError):
    """A live instance offers the same capability under another contract."""
