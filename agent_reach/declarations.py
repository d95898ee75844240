"""What the decorators of `handlers` are told: checked at once, kept on what they decorate, found again there."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from agent_reach.errors import ConfigError
from agent_reach.model import check_agent_id
from agent_reach.routing.names import alias_target, check_capability
from agent_reach.signatures import Signature

__all__ = ["MARK", "Agent", "Declaration", "check_agent", "declare", "members", "takes_self", "version_order"]

# The one attribute that a decorator adds.
MARK = "__reach_spec__"

_TIERS = ("light", "interactive", "write", "heavy", "long")
_SEMVER = re.compile(r"(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)(-[0-9A-Za-z.-]+)?(\+[0-9A-Za-z.-]+)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Agent:
    """What `@register_agent` says of the whole agent; None: it says nothing."""

    name: str | None = None
    version: str | None = None
    weight: float | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Declaration:
    """What a decorator was told.

    `read` holds the signatures that could be read then, by function and whether its first parameter is left out.
    """

    names: tuple[str, ...]
    version: str
    description: str | None
    idempotent: bool
    timeout: str | float
    max_concurrency: int | None
    queue: int | None
    soft_aliases: tuple[str, ...]
    agent: Agent | None = None
    read: dict[tuple[Callable[..., Any], bool], Signature] = field(default_factory=dict)


def declare(
    names: tuple[Any, ...],
    version: Any,
    description: Any,
    idempotent: Any,
    timeout: Any,
    max_concurrency: Any,
    queue: Any,
    soft_aliases: Any,
) -> Declaration:
    """Check what belongs to a capability. Raises ConfigError naming the option and what it may be."""
    if len(names) == 1 and callable(names[0]):
        raise ConfigError("the decorator needs brackets and a name: @register_agent('domain.action.v1')")
    for name in names:
        if check_capability(name).startswith("reach."):
            raise ConfigError(f"{name!r}: the domain 'reach' is the library's own; choose another")
    if not isinstance(version, str) or not _SEMVER.fullmatch(version):
        raise ConfigError(f"version={version!r} must be a semantic version like '1.0.0'")
    if description is not None and not isinstance(description, str):
        raise ConfigError(f"description={description!r} must be text")
    if not isinstance(idempotent, bool):
        raise ConfigError(f"idempotent={idempotent!r} must be True or False")
    if not (timeout in _TIERS if isinstance(timeout, str) else _is_number(timeout) and timeout > 0):
        raise ConfigError(f"timeout={timeout!r} must be one of {', '.join(_TIERS)}, or seconds > 0")
    for option, value, least in (("max_concurrency", max_concurrency, 1), ("queue", queue, 0)):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
            raise ConfigError(f"{option}={value!r} must be a whole number >= {least}, or None")
    if isinstance(soft_aliases, str) or not isinstance(soft_aliases, Iterable):
        raise ConfigError(f"soft_aliases={soft_aliases!r} must be a list, like ['v1']")
    aliases = tuple(soft_aliases)
    for name in names:
        for alias in aliases:
            alias_target(name, alias)
    return Declaration(
        names=names,
        version=version,
        description=description,
        idempotent=idempotent,
        timeout=timeout if isinstance(timeout, str) else float(timeout),
        max_concurrency=max_concurrency,
        queue=queue,
        soft_aliases=aliases,
    )


def check_agent(name: Any, weight: Any, metadata: Any) -> Agent:
    """Check what belongs to the agent. Raises ConfigError naming the option and what it may be."""
    if name is not None:
        try:
            # Agent ids are built from it.
            check_agent_id(name)
        except ValueError as error:
            raise ConfigError(f"name: {error}") from None
    if not _is_number(weight) or weight <= 0:
        raise ConfigError(f"weight={weight!r} must be a number > 0")
    metadata = {} if metadata is None else metadata
    if not isinstance(metadata, Mapping) or not all(
        isinstance(part, str) for pair in metadata.items() for part in pair
    ):
        raise ConfigError("metadata must map strings to strings; numbers and objects have to be written as text")
    return Agent(name=name, weight=None if weight == 1 else float(weight), metadata=dict(metadata))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def version_order(version: str) -> tuple[int, int, int, bool]:
    """Key that sorts semantic versions; a pre-release comes before its release."""
    core, dash, _ = version.partition("+")[0].partition("-")
    major, minor, patch = map(int, core.split("."))
    return major, minor, patch, not dash


def members(cls: type) -> Iterator[tuple[str, Callable[..., Any], bool, Declaration]]:
    """Find the methods with a declaration, in the order written; an override keeps its base's declaration."""
    names = dict.fromkeys(name for base in reversed(cls.__mro__) for name in vars(base))
    for name in names:
        attribute = inspect.getattr_static(cls, name)
        function = _unwrapped(attribute)
        if not inspect.isfunction(function):
            continue
        for base in cls.__mro__:
            declaration = getattr(_unwrapped(vars(base).get(name)), MARK, None)
            if isinstance(declaration, Declaration):
                yield name, function, not isinstance(attribute, staticmethod), declaration
                break


def _unwrapped(attribute: Any) -> Any:
    return attribute.__func__ if isinstance(attribute, staticmethod | classmethod) else attribute


def takes_self(function: Callable[..., Any]) -> bool:
    """True for a function written as a method, told by its place in a class and its first parameter."""
    first = next(iter(inspect.signature(function).parameters), "")
    parent = function.__qualname__.rpartition(".")[0]
    return first in ("self", "cls") and bool(parent) and not parent.endswith("<locals>")
