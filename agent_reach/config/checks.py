"""Is a setting what it must be? Raises ConfigError that names it and says what it may be."""

from __future__ import annotations

import math
import os

from agent_reach.errors import ConfigError

__all__ = ["file", "instance", "number", "whole"]


def number(
    owner: object, name: str, *, above: float = 0.0, least: float | None = None, most: float = math.inf
) -> None:
    """Check that the named setting is a finite number > `above` (or >= `least`) and <= `most`."""
    value = getattr(owner, name)
    low_ok = value_ok = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if value_ok:
        low_ok = value >= least if least is not None else value > above
    if not (value_ok and low_ok and value <= most):
        low = f">= {least:g}" if least is not None else f"> {above:g}"
        high = f" and <= {most:g}" if math.isfinite(most) else ""
        raise ConfigError(f"{type(owner).__name__}.{name} is {value!r}; it must be a number {low}{high}")


def whole(owner: object, name: str, *, least: int) -> None:
    """Check that the named setting is a whole number >= `least`."""
    value = getattr(owner, name)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{type(owner).__name__}.{name} is {value!r}; it must be a whole number >= {least}")


def file(owner: object, name: str) -> None:
    """Check that the named setting is the path of a file, there already or not, in a folder that exists."""
    value = getattr(owner, name)
    if not isinstance(value, str | os.PathLike) or not os.fspath(value):
        raise ConfigError(f"{type(owner).__name__}.{name} is {value!r}; it must be the path of a file")
    if os.path.isdir(value) or not os.path.isdir(os.path.dirname(os.path.abspath(value))):
        raise ConfigError(f"{type(owner).__name__}.{name} is {value!r}; it must be a file in a folder that exists")


def instance(owner: object, name: str, wanted: type, otherwise: str) -> None:
    """Check that the named setting is None or a `wanted`; `otherwise` says what else it may be."""
    value = getattr(owner, name)
    if value is not None and not isinstance(value, wanted):
        raise ConfigError(f"{type(owner).__name__}.{name} is {value!r}; it must be a {wanted.__name__} {otherwise}")
