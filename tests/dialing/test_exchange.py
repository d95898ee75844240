"""What an answer on the wire comes to."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from agent_reach import codec
from agent_reach.dialing.exchange import interpret
from agent_reach.model import Envelope
from agent_reach.ports import Answer, BadAnswer, DialResult, MaybeExecuted, NeverSent
from agent_reach.routing.outcomes import LostAnswer, Outcome, Rejected, Succeeded, Unreadable, Unsent


def of(result: DialResult) -> Outcome:
    return interpret(result, request_id="r1", agent_id="kb-1", wall=1_800_000_000.0)


def answer(status: int, body: Any, **headers: str) -> Answer:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return Answer(status, {name.replace("_", "-"): value for name, value in headers.items()}, raw)


GOOD = {"code": 0, "data": {"x": 1}, "response_to": "r1", "agent_id": "kb-1"}


def test_a_good_answer_succeeds_and_unknown_fields_are_ignored() -> None:
    outcome = of(answer(200, GOOD | {"from_the_future": True, "load": {"in_flight": 3, "new": 1}}))
    assert isinstance(outcome, Succeeded)
    assert outcome.reply.data == {"x": 1}
    assert outcome.reply.load is not None
    assert outcome.reply.load.in_flight == 3


@pytest.mark.parametrize("field", ["response_to", "agent_id"])
def test_an_answer_meant_for_somebody_else_is_unreadable(field: str) -> None:
    assert isinstance(of(answer(200, GOOD | {field: "other"})), Unreadable)


@pytest.mark.parametrize(
    "body",
    [b"", b"<html>", b"\xff\xfe", b"[1]", b'"text"', b'{"code": 0}', b'{"code":0,"agent_id":"kb-1","data":NaN}',
     b"[" * 100_000, b'{"code":"zero","agent_id":"kb-1"}'],
    ids=["empty", "html", "utf16", "list", "string", "no agent", "NaN", "deep", "wrong type"],
)  # fmt: skip
def test_a_200_that_is_no_reach_answer_is_unreadable(body: bytes) -> None:
    assert isinstance(of(answer(200, body)), Unreadable)


def test_an_error_answer_keeps_its_promises() -> None:
    error = {"type": "Overloaded", "message": "full", "retryable": True, "executed": False, "retry_after_ms": 250}
    outcome = of(answer(503, {"code": 503, "agent_id": "kb-1", "error": error, "state": "overloaded"}))
    assert isinstance(outcome, Rejected)
    assert (outcome.error.executed, outcome.retry_after_s, outcome.state) == (False, 0.25, "overloaded")


@pytest.mark.parametrize(
    ("status", "executed", "retryable"),
    [(301, True, True), (307, True, True), (400, False, False), (401, False, False), (404, False, True),
     (421, False, True), (429, False, True), (500, True, True), (502, True, True), (503, True, True)],
)  # fmt: skip
def test_an_error_that_is_no_reach_answer_is_judged_by_its_status(
    status: int, executed: bool, retryable: bool
) -> None:
    outcome = of(answer(status, b"<html>nginx</html>"))
    assert isinstance(outcome, Rejected)
    assert not outcome.enveloped
    assert (outcome.error.executed, outcome.error.retryable) == (executed, retryable)


@pytest.mark.parametrize(
    ("header", "seconds"),
    [("2", 2.0), ("0", 0.0), ("-5", 0.0), ("9999999999", 3600.0), ("nan", None), ("inf", None), ("soon", None),
     ("", None), ("Fri, 15 Jan 2027 08:00:30 GMT", 30.0), ("Fri, 15 Jan 2021 08:00:00 GMT", 0.0),
     ("Fri, 99 Foo", None)],
)  # fmt: skip
def test_retry_after_is_seconds_or_a_date_and_never_absurd(header: str, seconds: float | None) -> None:
    """T05: a naive float parse crashes on dates and sleeps for ever on huge values."""
    outcome = of(answer(429, b"", retry_after=header))
    assert isinstance(outcome, Rejected)
    assert outcome.retry_after_s == (None if seconds is None else pytest.approx(seconds))


def test_the_dialers_other_results_translate_one_to_one() -> None:
    assert of(NeverSent("pool", "full", local=True)) == Unsent("pool", "full", local=True)
    assert of(MaybeExecuted("reset", timed_out=True)) == LostAnswer("reset", timed_out=True)
    assert isinstance(of(BadAnswer(200, "9 MiB")), Unreadable)


def test_the_envelope_on_the_wire_is_what_the_server_reads() -> None:
    from agent_reach.dialing.exchange import OutgoingCall
    from agent_reach.routing.steps import Send
    from tests.routing.world import CAPABILITY, World, agent

    world = World(agent("kb-1"))
    (candidate,) = world.index.lookup(CAPABILITY).candidates
    call = OutgoingCall(
        request_id="r1",
        trace_id="a" * 32,
        from_agent="me",
        namespace="prod",
        target_capability=CAPABILITY,
        payload_json=codec.dumps({"query": 'ü "quoted"', "n": [1, None]}),
        hop=2,
        idempotency_key="k",
        context_id=None,
        metadata={"team": "blue"},
    )
    request = call.attempt(Send(candidate, 3, 1.2345, 1), wall=12.5, connect_timeout_s=9.0, max_reply_bytes=10)
    envelope = Envelope.model_validate(codec.loads(request.body))
    assert envelope.payload == {"query": 'ü "quoted"', "n": [1, None]}
    assert (envelope.ttl_ms, envelope.attempt, envelope.hop, envelope.retry_allowance) == (1173, 3, 2, 1)
    assert (envelope.target_agent, envelope.metadata) == ("kb-1", {"team": "blue"})
    assert request.url.endswith("/invoke")
    assert request.connect_timeout_s == 1.2345
    assert re.fullmatch(f"00-{'a' * 32}-[0-9a-f]{{16}}-01", request.headers["traceparent"])
