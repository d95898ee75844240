"""Declaring what an agent can do: `@register_agent` on functions and classes, `@capability` on methods."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from agent_reach.context import CallContext
from agent_reach.declarations import Agent, Declaration, check_agent, declare, version_order
from agent_reach.errors import ConfigError
from agent_reach.model import CapabilityInfo
from agent_reach.routing.names import alias_target
from agent_reach.signatures import Signature, schema_hash

__all__ = ["HandlerSpec", "capability", "register_agent", "specs_of"]

_H = TypeVar("_H", bound=Callable[..., Any])

# The one attribute that a decorator adds.
_MARK = "__reach_spec__"


@dataclass(frozen=True, slots=True, kw_only=True)
class HandlerSpec:
    """One capability and the code behind it.

    `queue` is the number of waiting places (None: the serving default). `agent_name`, `agent_version`, `weight`
    and `metadata` belong to the agent as a whole and are the same in every spec that `specs_of` returns.
    """

    info: CapabilityInfo
    input_schema: Mapping[str, Any]
    output_schema: Mapping[str, Any]
    queue: int | None = None
    agent_name: str | None = None
    agent_version: str = "1.0.0"
    weight: float = 1.0
    metadata: Mapping[str, str] = field(default_factory=dict)
    function: Callable[..., Any] = field(repr=False)
    signature: Signature = field(repr=False)

    def bind(self, payload: Mapping[str, Any], context: CallContext) -> dict[str, Any]:
        """Turn a payload into keyword arguments.

        Raises InvalidPayload whose `problems` and message name each field at fault; an unknown key is one,
        unless the handler has `**kwargs`.
        """
        return self.signature.bind(payload, context)

    async def invoke(self, arguments: Mapping[str, Any]) -> Any:
        """Run the handler and return its result; what it raises comes through.

        A sync handler runs in a thread of its own with the caller's context variables. Such a thread can't be
        stopped: the first cancellation lets it finish, so that its place counts as taken, the second leaves it.
        """
        if inspect.iscoroutinefunction(self.function):
            return await self.function(**arguments)
        result = await _in_thread(self.function, arguments)
        return await result if inspect.isawaitable(result) else result

    def encode(self, result: Any) -> bytes:
        """Turn a result into JSON by the return annotation. Raises InvalidReply naming the field at fault."""
        return self.signature.encode(result)


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
                raise ConfigError(f"{_named(target)}: name a capability, as @register_agent('domain.action.v1')")
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
            raise ConfigError(f"{_named(target)}: name a capability, as @capability('domain.action.v1')")
        # A method may name its own class, which isn't there yet: the class's decorator looks again.
        _mark(target, declaration, sys._getframe(1).f_locals)
        return target

    return decorate


def specs_of(handlers: Iterable[Any], *, name: str | None = None) -> tuple[HandlerSpec, ...]:
    """Resolve what a client was given: decorated functions, bound methods, instances and classes.

    `name` is the agent's, whatever its handlers say.

    Raises ConfigError for undecorated things, for two handlers of one capability or soft alias, and for
    handlers that say different things of the agent they belong to.
    """
    if isinstance(handlers, str) or not isinstance(handlers, Iterable):
        raise ConfigError(f"handlers={handlers!r} must be a list, like handlers=[retrieve]")
    specs: list[HandlerSpec] = []
    agents: list[Agent] = []
    for handler in handlers:
        found, agent = _resolve(handler)
        specs += found
        agents.append(agent)
    _check_names(specs)
    return _with_agent(specs, agents, name)


def _mark(target: Any, declaration: Declaration, local_names: Mapping[str, Any]) -> None:
    if isinstance(target, staticmethod | classmethod):
        kind = type(target).__name__
        raise ConfigError(f"{_named(target)}: write @{kind} above, the capability's decorator right at the def")
    if not inspect.isfunction(target) or target.__name__ == "<lambda>":
        raise ConfigError(f"{_named(target)} must be a function written with def, or a class")
    if inspect.isasyncgenfunction(target) or inspect.isgeneratorfunction(target):
        raise ConfigError(f"{_named(target)} yields; streamed answers aren't supported yet: return a list")
    if getattr(target, _MARK, None) is not None:
        raise ConfigError(f"{_named(target)} is decorated twice; give all capability names to one decorator")
    skip_first = _takes_self(target)
    # A name that is defined further down in the module: `specs_of` reads it, and a missing one is an error then.
    with contextlib.suppress(NameError):
        declaration.read[target, skip_first] = Signature.read(
            target, skip_first=skip_first, local_names=local_names
        )
    setattr(target, _MARK, declaration)


def _mark_class(target: type, declaration: Declaration, local_names: Mapping[str, Any]) -> None:
    members = list(_members(target))
    if not members:
        raise ConfigError(f"{target.__qualname__} has no method with @capability('domain.action.v1')")
    for _, function, skip_first, method in members:
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
    setattr(target, _MARK, replace(declaration, agent=replace(agent, version=version)))


def _members(cls: type) -> Iterator[tuple[str, Callable[..., Any], bool, Declaration]]:
    """Find the methods with a declaration, in the order written; an override keeps its base's declaration."""
    names = dict.fromkeys(name for base in reversed(cls.__mro__) for name in vars(base))
    for name in names:
        attribute = inspect.getattr_static(cls, name)
        function = _unwrapped(attribute)
        if not inspect.isfunction(function):
            continue
        for base in cls.__mro__:
            declaration = getattr(_unwrapped(vars(base).get(name)), _MARK, None)
            if isinstance(declaration, Declaration):
                yield name, function, not isinstance(attribute, staticmethod), declaration
                break


def _unwrapped(attribute: Any) -> Any:
    return attribute.__func__ if isinstance(attribute, staticmethod | classmethod) else attribute


def _resolve(handler: Any) -> tuple[list[HandlerSpec], Agent]:
    if inspect.isclass(handler):
        declaration = _declaration_of(handler, handler)
        try:
            needed = [
                p.name
                for p in inspect.signature(handler).parameters.values()
                if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
            ]
        except ValueError:
            needed = []  # a built-in __init__ without a signature takes nothing
        if needed:
            raise ConfigError(
                f"{handler.__qualname__} needs {', '.join(needed)} to be built; pass an instance of it as handler"
            )
        return _resolve_instance(handler(), declaration)
    if inspect.isfunction(handler):
        declaration = _declaration_of(handler, handler)
        if _takes_self(handler):
            raise ConfigError(f"{_named(handler)} is a method; pass it bound: instance.{handler.__name__}")
        return _specs(handler, handler, False, declaration), declaration.agent or Agent()
    if inspect.ismethod(handler):
        declaration = _declaration_of(handler, handler)
        owner = handler.__self__ if inspect.isclass(handler.__self__) else type(handler.__self__)
        whole = getattr(owner, _MARK, None)
        agent = (whole.agent if isinstance(whole, Declaration) else None) or declaration.agent or Agent()
        return _specs(handler, handler.__func__, True, declaration), agent
    return _resolve_instance(handler, _declaration_of(handler, type(handler)))


def _resolve_instance(instance: Any, declaration: Declaration) -> tuple[list[HandlerSpec], Agent]:
    specs: list[HandlerSpec] = []
    for name, function, skip_first, method in _members(type(instance)):
        specs += _specs(getattr(instance, name), function, skip_first, method)
    return specs, declaration.agent or Agent()


def _declaration_of(handler: Any, marked: Any) -> Declaration:
    declaration = getattr(marked, _MARK, None)
    if not isinstance(declaration, Declaration):
        raise ConfigError(f"{_named(handler)} is no handler: add @register_agent('domain.action.v1') above it")
    return declaration


def _specs(
    bound: Callable[..., Any], function: Callable[..., Any], skip_first: bool, declaration: Declaration
) -> list[HandlerSpec]:
    signature = declaration.read.get((function, skip_first))
    if signature is None:
        if inspect.isasyncgenfunction(function) or inspect.isgeneratorfunction(function):
            raise ConfigError(f"{_named(function)} yields; streamed answers aren't supported yet: return a list")
        try:
            signature = Signature.read(function, skip_first=skip_first)
        except NameError as error:
            raise ConfigError(f"{_named(function)}: a type hint names what isn't defined: {error}") from error
    doc = (inspect.getdoc(function) or "").partition("\n\n")[0]
    return [
        HandlerSpec(
            info=CapabilityInfo(
                name=name,
                version=declaration.version,
                description=" ".join(
                    (declaration.description if declaration.description is not None else doc).split()
                ),
                idempotent=declaration.idempotent,
                timeout=declaration.timeout,
                max_concurrency=declaration.max_concurrency,
                soft_aliases=declaration.soft_aliases,
                schema_hash=schema_hash(signature.input_schema, signature.output_schema),
            ),
            input_schema=signature.input_schema,
            output_schema=signature.output_schema,
            queue=declaration.queue,
            function=bound,
            signature=signature,
        )
        for name in declaration.names
    ]


def _check_names(specs: Sequence[HandlerSpec]) -> None:
    owners: dict[str, str] = {}
    for name, owner in [
        *((spec.info.name, _named(spec.function)) for spec in specs),
        *(
            (alias_target(spec.info.name, alias), f"soft alias {alias!r} of {spec.info.name}")
            for spec in specs
            for alias in spec.info.soft_aliases
        ),
    ]:
        if name in owners:
            raise ConfigError(f"two handlers answer for {name}: {owners[name]} and {owner}; drop one")
        owners[name] = owner


def _with_agent(specs: Sequence[HandlerSpec], agents: Sequence[Agent], name: str | None) -> tuple[HandlerSpec, ...]:
    """Give every spec the agent-level data of all of them together."""

    def agreed(what: str, values: Iterable[Any]) -> Any:
        stated = list(dict.fromkeys(value for value in values if value is not None))
        if len(stated) > 1:
            advice = "; pass name= to ReachClient" if what == "name" else ""
            raise ConfigError(f"handlers of one agent disagree on {what}: {stated[0]!r} and {stated[1]!r}{advice}")
        return stated[0] if stated else None

    metadata = {
        key: agreed(f"metadata {key!r}", (agent.metadata.get(key) for agent in agents))
        for key in dict.fromkeys(key for agent in agents for key in agent.metadata)
    }
    name = name or agreed("name", (agent.name for agent in agents))
    weight = agreed("weight", (agent.weight for agent in agents))
    version = agreed("version", (agent.version for agent in agents))
    # Without a class that says so, an agent is as new as the newest contract it serves.
    version = version or max((spec.info.version for spec in specs), key=version_order, default="1.0.0")
    return tuple(
        replace(
            spec,
            agent_name=name,
            agent_version=version,
            weight=weight or 1.0,
            metadata=metadata,
        )
        for spec in specs
    )


def _takes_self(function: Callable[..., Any]) -> bool:
    """True for a function written as a method, told by its place in a class and its first parameter."""
    first = next(iter(inspect.signature(function).parameters), "")
    parent = function.__qualname__.rpartition(".")[0]
    return first in ("self", "cls") and bool(parent) and not parent.endswith("<locals>")


async def _in_thread(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """Run `function` in a thread of its own.

    Not in the loop's executor: that has a handful of threads for the whole process, so it would be a second,
    hidden concurrency limit, and the interpreter waits at exit for a thread of it that hangs.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[tuple[bool, Any]] = loop.create_future()
    context = contextvars.copy_context()

    def finish(ended: tuple[bool, Any]) -> None:
        if not done.done():
            done.set_result(ended)

    def work() -> None:
        try:
            ended = True, context.run(function, **arguments)
        except BaseException as error:  # noqa: BLE001 - raised again in the task that waits for it
            ended = False, error
        try:
            loop.call_soon_threadsafe(finish, ended)
        except RuntimeError:
            return  # the loop was closed meanwhile: nobody waits any more

    threading.Thread(target=work, name=f"reach-{_named(function)}", daemon=True).start()
    try:
        ok, value = await asyncio.shield(done)
    except asyncio.CancelledError:
        ok, value = await asyncio.shield(done)
    if ok:
        return value
    raise value


def _named(thing: Any) -> str:
    return str(getattr(thing, "__qualname__", None) or repr(thing))
