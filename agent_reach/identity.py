"""Who this process is and where it meets the others: arguments first, then the environment, then defaults."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace

from agent_reach.addresses import parse_listen
from agent_reach.errors import ConfigError
from agent_reach.model import check_agent_id, check_namespace, check_url

__all__ = ["Identity", "identify"]


@dataclass(frozen=True, slots=True)
class Identity:
    """The settled identity."""

    agent_id: str
    name: str
    namespace: str
    registry: str | None
    listen: str | None
    advertise: str | None
    zone: str | None
    # True if nobody chose the id, so that a forked worker may take another.
    generated: bool = False

    def for_child(self) -> Identity:
        """The identity of a forked copy: a generated id is drawn anew, a chosen one stays."""
        return replace(self, agent_id=_generate(self.name)) if self.generated else self


def _generate(stem: str) -> str:
    return f"{stem}-{secrets.token_hex(4)}"


def identify(
    *,
    agent_id: str | None,
    name: str | None,
    default_name: str,
    namespace: str | None,
    registry: str | None,
    listen: str | None,
    advertise: str | None,
    zone: str | None,
    environ: Mapping[str, str] | None = None,
) -> Identity:
    """Settle every value that was left open. Raises ConfigError naming the argument or variable at fault."""
    env = os.environ if environ is None else environ

    def given(value: str | None, variable: str) -> str | None:
        return value if value is not None else env.get(f"AGENT_REACH_{variable}") or None

    wanted_id = given(agent_id, "AGENT_ID")
    stem = name or default_name
    settled_listen = given(listen, "LISTEN")
    if settled_listen is not None:
        parse_listen(settled_listen)
    for argument, value in (("agent_id", wanted_id), ("name", name), ("zone", zone)):
        if value is not None and not isinstance(value, str):
            raise ConfigError(f"{argument}={value!r} must be text; were handlers= or registry= meant?")
    try:
        check_agent_id(stem)
    except ValueError as error:
        raise ConfigError(f"name={stem!r} can't begin an agent id: {error}") from None
    try:
        settled_id = check_agent_id(wanted_id or _generate(stem))
        settled_namespace = check_namespace(given(namespace, "NAMESPACE") or "default")
        settled_advertise = given(advertise, "ADVERTISE")
        if settled_advertise is not None:
            settled_advertise = check_url(settled_advertise)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return Identity(
        agent_id=settled_id,
        name=stem if name or not wanted_id else wanted_id,
        namespace=settled_namespace,
        registry=given(registry, "REGISTRY"),
        listen=settled_listen,
        advertise=settled_advertise,
        zone=given(zone, "ZONE"),
        generated=wanted_id is None,
    )
