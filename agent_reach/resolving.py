"""From what a client was given as handlers to one spec per capability."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from agent_reach.declarations import MARK, Agent, Declaration, members, takes_self, version_order
from agent_reach.errors import ConfigError
from agent_reach.model import CapabilityInfo
from agent_reach.routing.names import alias_target
from agent_reach.signatures import Signature, label, schema_hash
from agent_reach.specs import HandlerSpec

__all__ = ["specs_of"]


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
        if takes_self(handler):
            raise ConfigError(f"{label(handler)} is a method; pass it bound: instance.{handler.__name__}")
        return _specs(handler, handler, False, declaration), declaration.agent or Agent()
    if inspect.ismethod(handler):
        declaration = _declaration_of(handler, handler)
        owner = handler.__self__ if inspect.isclass(handler.__self__) else type(handler.__self__)
        whole = getattr(owner, MARK, None)
        agent = (whole.agent if isinstance(whole, Declaration) else None) or declaration.agent or Agent()
        return _specs(handler, handler.__func__, True, declaration), agent
    return _resolve_instance(handler, _declaration_of(handler, type(handler)))


def _resolve_instance(instance: Any, declaration: Declaration) -> tuple[list[HandlerSpec], Agent]:
    specs: list[HandlerSpec] = []
    for name, function, skip_first, method in members(type(instance)):
        specs += _specs(getattr(instance, name), function, skip_first, method)
    return specs, declaration.agent or Agent()


def _declaration_of(handler: Any, marked: Any) -> Declaration:
    declaration = getattr(marked, MARK, None)
    if not isinstance(declaration, Declaration):
        raise ConfigError(f"{label(handler)} is no handler: add @register_agent('domain.action.v1') above it")
    return declaration


def _specs(
    bound: Callable[..., Any], function: Callable[..., Any], skip_first: bool, declaration: Declaration
) -> list[HandlerSpec]:
    signature = declaration.read.get((function, skip_first))
    if signature is None:
        if inspect.isasyncgenfunction(function) or inspect.isgeneratorfunction(function):
            raise ConfigError(f"{label(function)} yields; streamed answers aren't supported yet: return a list")
        try:
            signature = Signature.read(function, skip_first=skip_first)
        except NameError as error:
            raise ConfigError(f"{label(function)}: a type hint names what isn't defined: {error}") from error
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
        *((spec.info.name, label(spec.function)) for spec in specs),
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
