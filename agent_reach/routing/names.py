"""Capability names: `domain.action.vN`. The name is the contract, so v1 never means v2."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

from agent_reach.errors import ConfigError

__all__ = ["alias_target", "check_capability", "near_names"]

_NAME = re.compile(r"(?:[a-z][a-z0-9_-]*\.){2,}v(?:0|[1-9][0-9]{0,5})")
_VERSION = re.compile(r"v(?:0|[1-9][0-9]{0,5})")
_RULE = (
    "a capability is named domain.action.vN: at least two lower-case segments and a major version, "
    "like 'knowledge.retrieve.v1'"
)
# A record stays small and a log line readable.
_MAX_LENGTH = 200
# How many names are compared letter by letter for a hint.
_COMPARED = 300


def check_capability(name: object) -> str:
    """Return `name` if it keeps the rule; raise ConfigError with the rule and, where one is near, a mended name."""
    if isinstance(name, str) and len(name) <= _MAX_LENGTH and _NAME.fullmatch(name):
        return name
    raise ConfigError(f"{name!r} is no capability name; {_RULE}{_mended(name)}")


def alias_target(capability: str, alias: str) -> str:
    """Return the name that a soft alias of `capability` answers for: ('a.b.v2', 'v1') gives 'a.b.v1'."""
    stem, _, own = capability.rpartition(".")
    if not isinstance(alias, str) or not _VERSION.fullmatch(alias) or alias == own:
        raise ConfigError(f"soft alias {alias!r} of {capability} must be another version of it, like 'v1'")
    return f"{stem}.{alias}"


def near_names(wanted: str, offered: Iterable[str], limit: int = 3) -> tuple[str, ...]:
    """Return up to `limit` offered names that a caller of `wanted` may have meant: other versions first."""
    names = sorted(set(offered))
    stem = wanted.rpartition(".")[0]
    versions = [name for name in names if name.rpartition(".")[0] == stem]
    if len(names) > _COMPARED:
        # Comparing takes 30 us a name, on the event loop; of many, those of the same domain are the likely ones.
        names = [name for name in names if name.partition(".")[0] == wanted.partition(".")[0]][:_COMPARED]
    alike = difflib.get_close_matches(wanted, names, n=limit, cutoff=0.6)
    return tuple(dict.fromkeys([*versions, *alike]))[:limit]


def _mended(name: object) -> str:
    if not isinstance(name, str):
        return ""
    text = re.sub(r"[^a-z0-9._-]+", "_", name.strip().lower()).strip("._-")
    last = text.rpartition(".")[2]
    for candidate in (text, text if _VERSION.fullmatch(last) else f"{text}.v1"):
        if len(candidate) <= _MAX_LENGTH and _NAME.fullmatch(candidate):
            return f". Did you mean {candidate!r}?"
    return ""
