"""One line per event, through whatever logging the application has set up."""

from __future__ import annotations

import logging

import pytest
import structlog
from structlog.testing import capture_logs

from agent_reach.errors import AgentNotFound
from agent_reach.events import BreakerChanged, CallEnded, CallServed, Event, RegistryChanged
from agent_reach.observability.logs import LogObserver

CALL = {
    "request_id": "r1",
    "trace_id": "t1",
    "from_agent": "chat-1",
    "target_capability": "x.y.v1",
    "agent_id": "kb-1",
    "attempt": 2,
    "elapsed_ms": 12.3456,
}


def test_a_call_is_one_readable_line_with_its_fields_on_the_record(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    LogObserver().on_event(CallEnded(**CALL, outcome="ok"))
    (record,) = caplog.records
    assert record.name == "agent_reach.calls"
    assert record.getMessage().startswith(
        "call request_id=r1 trace_id=t1 from_agent=chat-1 target_capability=x.y.v1"
    )
    assert "elapsed_ms=12.346 outcome=ok" in record.getMessage()
    assert record.__dict__["agent_id"] == "kb-1"


@pytest.mark.parametrize(
    ("event", "level"),
    [
        (CallEnded(**CALL, outcome="ok"), logging.INFO),
        # Whoever called is given the error; what to make of it is theirs to say.
        (CallEnded(**CALL, outcome="RemoteError"), logging.INFO),
        (CallServed(**CALL, outcome="InvalidPayload"), logging.INFO),
        (CallServed(**CALL, outcome="ValueError", error=ValueError("x")), logging.ERROR),
        (CallServed(**CALL, outcome="InvalidResult"), logging.ERROR),
        (CallServed(**CALL, outcome="ok"), logging.INFO),
        (RegistryChanged(address="etcd://h:1", status="lost"), logging.WARNING),
        (RegistryChanged(address="etcd://h:1", status="connected"), logging.INFO),
        (
            BreakerChanged(agent_id="a", capability="x.y.v1", before="closed", after="open", reason="r"),
            logging.WARNING,
        ),
        (
            BreakerChanged(agent_id="a", capability="x.y.v1", before="open", after="closed", reason="r"),
            logging.INFO,
        ),
    ],
)
def test_trouble_is_a_warning_and_the_rest_is_information(
    event: Event, level: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    LogObserver().on_event(event)
    assert [record.levelno for record in caplog.records] == [level]


def test_the_applications_level_is_respected(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    LogObserver().on_event(CallEnded(**CALL, outcome="ok"))
    assert not caplog.records


def test_where_the_application_set_up_no_logging_only_trouble_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    """structlog's own default prints everything to stdout; a library must not. Python's last resort is stderr."""
    root = logging.getLogger()
    handlers, root.handlers = root.handlers, []
    try:
        LogObserver().on_event(CallEnded(**CALL, outcome="RemoteError"))
        assert capsys.readouterr() == ("", "")
        LogObserver().on_event(RegistryChanged(address="etcd://h:1", status="lost"))
    finally:
        root.handlers = handlers
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("registry lost address=etcd://h:1")


def test_a_handlers_traceback_goes_along_but_not_that_of_a_nested_call(caplog: pytest.LogCaptureFixture) -> None:
    try:
        raise ValueError("what the handler raised")
    except ValueError as raised:
        LogObserver().on_event(CallServed(**CALL, outcome="ValueError", error=raised))
    assert "Traceback (most recent call last)" in caplog.text
    caplog.clear()
    try:
        raise AgentNotFound("nobody offers it")
    except AgentNotFound as raised:
        LogObserver().on_event(CallServed(**CALL, outcome="AgentNotFound", error=raised))
    assert "served" in caplog.text
    assert "Traceback" not in caplog.text


def test_an_application_that_configured_structlog_gets_events_through_its_processors() -> None:
    structlog.configure(wrapper_class=structlog.stdlib.BoundLogger)
    logging.getLogger("agent_reach.calls").setLevel(logging.INFO)
    try:
        with capture_logs() as lines:
            LogObserver().on_event(CallEnded(**CALL, outcome="ok"))
    finally:
        structlog.reset_defaults()
        logging.getLogger("agent_reach.calls").setLevel(logging.NOTSET)
    assert lines[0]["event"] == "call"
    assert lines[0]["request_id"] == "r1"


def test_a_structlog_set_up_without_standard_logging_gets_every_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Its own filter decides; the standard logger's level says nothing there."""
    structlog.configure(
        processors=[structlog.processors.KeyValueRenderer()],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(),
    )
    try:
        LogObserver().on_event(CallEnded(**CALL, outcome="ok"))
        LogObserver().on_event(CallServed(**CALL, outcome="ValueError", error=ValueError("x")))
    finally:
        structlog.reset_defaults()
    out = capsys.readouterr().out
    assert "request_id='r1'" in out
    assert "outcome='ValueError'" in out
    assert "exc_info=ValueError('x')" in out


def test_the_end_of_trouble_is_told_as_loudly_as_its_beginning(caplog: pytest.LogCaptureFixture) -> None:
    """Where only warnings are seen, the last word must not stay "lost"."""
    caplog.set_level(logging.WARNING)
    observer = LogObserver()
    for status in ("connected", "lost", "connected", "connected"):
        observer.on_event(RegistryChanged(address="etcd://h:1", status=status))
    assert [record.getMessage().split()[1] for record in caplog.records] == ["lost", "connected"]
