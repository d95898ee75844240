"""Declaring what an agent can do: `@register_agent` on functions and classes, `@capability` on methods."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from agent_reach.declarations import MARK, Agent, Declaration, check_agent, declare, members, takes_self
from agent_reach.errors import ConfigError
from agent_reach.resolving import specs_of
from agent_reach.signatures import Signature, label
from agent_reach.specs import HandlerSpec

__all__ = ["HandlerSpec", "capability", "default_name", "register_agent", "specs_of"]

_H = TypeVar("_H", bound=Callable[..., Any])


def register_agent(
    *capabilities: str,
    name: str | None = None,
    version: str = "1.0.0",
    description: str | None = None,
    idempotent: bool = False,
    timeout: str | float = "interactive",
    max_concurrency: int | None = None,
    queue: int | None = None,
    weight: float = 1,
    soft_aliases: Sequence[str] = (),
    metadata: Mapping[str, str] | None = None,
) -> Callable[[_H], _H]:
    """Declare a function as the handler of `capabilities`, or a class whose methods carry `@capability`.

    The decorated object stays what it was. `timeout` is a tier (light, interactive, write, heavy, long) or the
    seconds of one attempt; `description` defaults to the docstring's first paragraph. `name`, `weight` and
    `metadata` belong to the agent; `version` is the contract's on a function and the agent's on a class.

    How a payload becomes arguments: its keys bind to the parameters of the same names. A handler with one
    parameter that is a model or a dict takes the whole payload as that parameter, so callers send the model's
    fields directly, not inside the parameter's name. A parameter annotated `CallContext` is no part of the
    payload; it gets the call's own data.

    A sync handler runs in threads: `max_concurrency` at a time, or 64 without it. Whoever comes then waits in
    the queue, and past that is refused.

    Raises ConfigError with the reason for a wrong declaration.
    """
    declaration = replace(
        declare(capabilities, version, description, idempotent, timeout, max_concurrency, queue, soft_aliases),
        agent=check_agent(name, weight, metadata),
    )
    options_given = bool(
        capabilities or description or idempotent or soft_aliases or timeout != "interactive"
    ) or not (max_concurrency is None and queue is None)

    def decorate(target: _H) -> _H:
        local_names = sys._getframe(1).f_locals
        if inspect.isclass(target):
            if options_given:
                raise ConfigError(
                    f"{target.__qualname__}: a class only takes name, version, weight and metadata; capability "
                    "names and their options belong on its methods, in @capability(...)"
                )
            _mark_class(target, declaration, local_names)
        else:
            if not capabilities:
                raise ConfigError(f"{label(target)}: name a capability, as @register_agent('domain.action.v1')")
            _mark(target, declaration, local_names)
        return target

    return decorate


def capability(
    *capabilities: str,
    version: str = "1.0.0",
    description: str | None = None,
    idempotent: bool = False,
    timeout: str | float = "interactive",
    max_concurrency: int | None = None,
    queue: int | None = None,
    soft_aliases: Sequence[str] = (),
) -> Callable[[_H], _H]:
    """Declare a method as the handler of `capabilities`; the options are those of `register_agent`."""
    declaration = declare(
        capabilities, version, description, idempotent, timeout, max_concurrency, queue, soft_aliases
    )

    def decorate(target: _H) -> _H:
        if not capabilities:
            raise ConfigError(f"{label(target)}: name a capability, as @capability('domain.action.v1')")
        # A method may name its own class, which isn't there yet: the class's decorator looks again.
        _mark(target, declaration, sys._getframe(1).f_locals)
        return target

    return decorate


def _mark(target: Any, declaration: Declaration, local_names: Mapping[str, Any]) -> None:
    if isinstance(target, staticmethod | classmethod):
        kind = type(target).__name__
        raise ConfigError(f"{label(target)}: write @{kind} above, the capability's decorator right at the def")
    if not inspect.isfunction(target) or target.__name__ == "<lambda>":
        raise ConfigError(f"{label(target)} must be a function written with def, or a class")
    if inspect.isasyncgenfunction(target) or inspect.isgeneratorfunction(target):
        raise ConfigError(f"{label(target)} yields; streamed answers aren't supported yet: return a list")
    if getattr(target, MARK, None) is not None:
        raise ConfigError(f"{label(target)} is decorated twice; give all capability names to one decorator")
    skip_first = takes_self(target)
    # A name that is defined further down in the module: `specs_of` reads it, and a missing one is an error then.
    with contextlib.suppress(NameError):
        declaration.read[target, skip_first] = Signature.read(
            target, skip_first=skip_first, local_names=local_names
        )
    setattr(target, MARK, declaration)


def _mark_class(target: type, declaration: Declaration, local_names: Mapping[str, Any]) -> None:
    marked = list(members(target))
    if not marked:
        raise ConfigError(f"{target.__qualname__} has no method with @capability('domain.action.v1')")
    for _, function, skip_first, method in marked:
        if (function, skip_first) not in method.read:
            with contextlib.suppress(NameError):  # as in `_mark`
                method.read[function, skip_first] = Signature.read(
                    # A class isn't bound to its name yet while it is being decorated.
                    function,
                    skip_first=skip_first,
                    local_names={target.__name__: target, **local_names},
                )
    agent = declaration.agent or Agent()
    version = None if declaration.version == "1.0.0" else declaration.version
    setattr(target, MARK, replace(declaration, agent=replace(agent, version=version)))


def default_name(specs: tuple[HandlerSpec, ...]) -> str:
    """The agent's name where none was given: its decorator's, else the domain of its first capability."""
    return (specs[0].agent_name or specs[0].info.name.partition(".")[0]) if specs else "client"
