"""Events to log lines, through structlog. The application's logging set-up is respected, never changed.

Where the application has configured structlog, lines go through its processors. Elsewhere they go to the
standard loggers `agent_reach.calls`, `agent_reach.serving` and `agent_reach.registry`: readable text, with the
fields as attributes of the record for a JSON formatter.
"""

from __future__ import annotations

import dataclasses
import logging
import sys
from typing import Any, assert_never

from agent_reach.errors import ReachError
from agent_reach.events import (
    BreakerChanged,
    CallEnded,
    CallServed,
    ContractClash,
    Event,
    OutageChanged,
    RecordSkipped,
    RegistrationChanged,
    RegistryChanged,
)

__all__ = ["LogObserver"]

_GOOD_NEWS = {"connected", "registered", "draining", "withdrawn"}


class LogObserver:
    """One line per call on each side, one per change of state. Never a payload, never a credential."""

    def __init__(self) -> None:
        self._loggers: dict[str, Any] = {}
        # What is known to be in trouble: the end of it is told as loudly as its beginning.
        self._in_trouble: set[tuple[type[Event], str]] = set()

    def on_event(self, event: Event) -> None:
        """Log the event at the level that its kind deserves; costs next to nothing if that level is off."""
        name, level, text = _describe(event)
        if isinstance(event, RegistryChanged | RegistrationChanged):
            level = self._level_of_change(event, level)
        if not self._structlog_configured() and not logging.getLogger(name).isEnabledFor(level):
            return
        fields = {field.name: getattr(event, field.name) for field in dataclasses.fields(event)}
        error = fields.pop("error", None)
        shown = {key: _short(value) for key, value in fields.items() if value is not None and value != ""}
        if error is not None and not isinstance(error, ReachError):
            # An error of a nested call says all there is to say; its traceback would be that of this library.
            shown["exc_info"] = error
        # By name: not every structlog logger has `log(level, …)`.
        getattr(self._logger(name), logging.getLevelName(level).lower())(text, **shown)

    def _level_of_change(self, event: RegistryChanged | RegistrationChanged, level: int) -> int:
        about = event.address if isinstance(event, RegistryChanged) else event.agent_id
        key = (type(event), about)
        if level >= logging.WARNING:
            self._in_trouble.add(key)
        elif key in self._in_trouble:
            self._in_trouble.discard(key)
            return logging.WARNING
        return level

    @staticmethod
    def _structlog_configured() -> bool:
        """True if the application set structlog up: then its own filters decide. Not imported, not configured."""
        structlog = sys.modules.get("structlog")
        return structlog is not None and structlog.is_configured()

    def _logger(self, name: str) -> Any:
        logger = self._loggers.get(name)
        if logger is None:
            # 25 ms to import, and many a process never logs a line at its level.
            import structlog

            if structlog.is_configured():
                logger = structlog.get_logger(name)
            else:
                logger = structlog.wrap_logger(
                    logging.getLogger(name), processors=[_to_record], wrapper_class=structlog.stdlib.BoundLogger
                )
            self._loggers[name] = logger
        return logger


def _describe(event: Event) -> tuple[str, int, str]:
    """Return (logger, level, text)."""
    match event:
        case CallEnded():
            # Whoever called is given the error; what to make of it is theirs to say.
            return "agent_reach.calls", logging.INFO, "call"
        case CallServed():
            bug = event.error is not None or event.outcome == "InvalidResult"
            return "agent_reach.serving", logging.ERROR if bug else logging.INFO, "served"
        case BreakerChanged():
            return "agent_reach.calls", _level(event.after != "open"), f"breaker {event.after}"
        case OutageChanged():
            # Its end is told as loudly as its beginning.
            return "agent_reach.calls", logging.WARNING, f"outage {event.status}"
        case RegistryChanged():
            return "agent_reach.registry", _level(event.status in _GOOD_NEWS), f"registry {event.status}"
        case RegistrationChanged():
            return "agent_reach.registry", _level(event.status in _GOOD_NEWS), f"registration {event.status}"
        case RecordSkipped():
            return "agent_reach.registry", logging.WARNING, "record skipped"
        case ContractClash():
            return "agent_reach.registry", logging.WARNING, "contract clash"
        case _:
            assert_never(event)


def _level(good: bool) -> int:
    return logging.INFO if good else logging.WARNING


def _short(value: Any) -> Any:
    """A value as it may stand in a line: some come from peers or from registry keys, and must not begin lines of
    their own.
    """
    if isinstance(value, float):
        return round(value, 3)
    if isinstance(value, str) and not value.isprintable():
        return "".join(c if c.isprintable() else "?" for c in value)
    return value


def _to_record(_logger: Any, _method: str, event: Any) -> tuple[tuple[str], dict[str, Any]]:
    """Last structlog step: the arguments of the standard logger's method."""
    text, error = event.pop("event"), event.pop("exc_info", None)
    fields = " ".join(f"{key}={value}" for key, value in event.items())
    return (f"{text} {fields}",), {"extra": dict(event), "exc_info": error}
