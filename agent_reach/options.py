"""What `ReachClient.call` takes besides capability and payload, checked before anything is sent."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

from pydantic import PydanticUndefinedAnnotation, PydanticUserError, TypeAdapter

from agent_reach.config import HedgeConfig, Policy, RetryConfig, Strategy
from agent_reach.config.choice import check_strategy
from agent_reach.errors import ConfigError, ReachError

__all__ = ["CallKeywords", "CallOptions", "adapter_of"]


class CallKeywords(TypedDict, total=False):
    """The keywords of `call` that don't change its type; see there."""

    timeout: float | None
    agent_id: str | None
    context_id: str | None
    idempotency_key: str | None
    require_context: bool
    policy: Policy | None
    strategy: Strategy | None
    retry: RetryConfig | None
    hedge: HedgeConfig | Literal[False] | None
    fallback: Callable[[ReachError], Any] | None
    metadata: Mapping[str, str] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CallOptions:
    """What `ReachClient.call` takes besides capability and payload; its docstring gives the meanings."""

    timeout: float | None = None
    agent_id: str | None = None
    context_id: str | None = None
    idempotency_key: str | None = None
    require_context: bool = False
    policy: Policy | None = None
    strategy: Strategy | None = None
    retry: RetryConfig | None = None
    hedge: HedgeConfig | Literal[False] | None = None
    fallback: Callable[[ReachError], Any] | None = None
    response_model: Any = None
    metadata: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        timeout = self.timeout
        # A day: longer is no deadline, and a number without bound would overflow a clock.
        if timeout is not None and not (isinstance(timeout, int | float) and 0 < timeout <= 86_400):
            raise ConfigError(
                f"timeout={timeout!r} must be seconds > 0, a day at most, or None for the capability's own time"
            )
        for name, wanted, example in (
            ("policy", Policy, "Policy.CRITICAL"),
            ("retry", RetryConfig, "RetryConfig(max_attempts=1)"),
            ("hedge", HedgeConfig, "HedgeConfig(), or False for none"),
        ):
            value = getattr(self, name)
            off = name == "hedge" and value is False
            if value is not None and not off and not isinstance(value, wanted):
                raise ConfigError(f"{name}={value!r} must be a {wanted.__name__}, like {example}")
        if self.policy is not None:
            for name in ("strategy", "retry", "hedge"):
                if getattr(self, name) is None:
                    object.__setattr__(self, name, getattr(self.policy, name))
        if self.strategy is not None:
            check_strategy(self.strategy)
        if self.require_context and self.context_id is None:
            raise ConfigError("require_context=True needs context_id=, the conversation whose agent is meant")
        if self.fallback is not None and not callable(self.fallback):
            raise ConfigError(f"fallback={self.fallback!r} must be a function that takes the error")
        if self.metadata is not None and not isinstance(self.metadata, Mapping):
            raise ConfigError(f"metadata={self.metadata!r} must be a dict of text")
        if self.response_model is not None:
            adapter_of(self.response_model)
        for name in ("agent_id", "context_id", "idempotency_key"):
            value = getattr(self, name)
            if value is not None and not (_is_text(value) and 0 < len(value) <= 256):
                raise ConfigError(f"{name}={value!r} must be 1 to 256 characters of text")
        for pair in (self.metadata or {}).items():
            if not all(_is_text(item) for item in pair):
                raise ConfigError(f"metadata= must map text to text; {pair[0]!r} doesn't")

    @property
    def trip_after(self) -> int | None:
        """As `Policy.trip_after`."""
        return None if self.policy is None else self.policy.trip_after


def adapter_of(response_model: Any) -> TypeAdapter[Any]:
    """The checker of an expected answer; raise ConfigError for what is no type, before anything is sent."""
    try:
        return _cached_adapter(response_model)
    except TypeError:  # an annotation that can't be hashed
        return _new_adapter(response_model)


def _new_adapter(response_model: Any) -> TypeAdapter[Any]:
    try:
        adapter: TypeAdapter[Any] = TypeAdapter(response_model)
        # A name that isn't defined yet: pydantic would only say so once the answer is there.
        if not getattr(adapter, "pydantic_complete", True):
            adapter.rebuild()
    except (PydanticUserError, PydanticUndefinedAnnotation, NameError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"response_model={response_model!r} is no type that can be checked: {reason}") from None
    return adapter


_cached_adapter = functools.lru_cache(maxsize=256)(_new_adapter)


def _is_text(value: object) -> bool:
    """True for what UTF-8 can carry: a string without lone surrogates."""
    return isinstance(value, str) and value == value.encode("utf-8", "replace").decode()
