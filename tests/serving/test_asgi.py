"""The served agent, request by request: what is refused and how, what runs, how it ends."""

from __future__ import annotations

import asyncio
import gc
import json
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from pydantic import BaseModel, field_validator

from agent_reach.config import ServingConfig
from agent_reach.context import CallContext, current_call
from agent_reach.errors import OutcomeUnknown, Overloaded
from agent_reach.handlers import register_agent
from agent_reach.model import PING
from tests.serving.driver import JSON, Bench, envelope

ran: list[str] = []


@pytest.fixture(autouse=True)
def _nothing_ran() -> None:
    ran.clear()


@register_agent("a.echo.v1", description="Echo.")
async def echo(text: str = "hi") -> str:
    ran.append(text)
    return text


@register_agent("a.idempotent.v1", idempotent=True)
async def fails_safely() -> None:
    raise ValueError("try again")


class Gate:
    """A handler that tells when it was entered and waits to be let go."""

    def __init__(self) -> None:
        self.entered = 0
        self.cancelled = 0
        self.go = asyncio.Event()

    def handler(self, name: str = "a.gate.v1", **options: Any) -> Any:
        @register_agent(name, **options)
        async def gate() -> str:
            self.entered += 1
            try:
                await self.go.wait()
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
            return "through"

        return gate


def raising(error: BaseException, **options: Any) -> Bench:
    @register_agent("a.raise.v1", **options)
    async def handler() -> None:
        raise error

    return Bench([handler])


# --- the good case ---------------------------------------------------------------------------------------


async def test_a_call_is_answered_with_data_and_load() -> None:
    bench = Bench([echo])
    answer = await bench.call(payload={"text": "flood"})
    assert answer.status == 200
    assert answer.headers["content-type"] == "application/json"
    assert "connection" not in answer.headers
    assert answer.json == {
        "code": 0,
        "data": "flood",
        "response_to": "r-1",
        "agent_id": "kb-1",
        "deprecated": False,
        "load": {"in_flight": 0, "queued": 0, "max_concurrency": None},
        "state": "accepting",
        "retry_allowance": 0,
    }
    (event,) = bench.served
    assert (event.outcome, event.request_id, event.target_capability) == ("ok", "r-1", "a.echo.v1")


async def test_the_handler_sees_its_call_by_parameter_and_by_context_variable() -> None:
    seen: list[Any] = []

    @register_agent("a.ctx.v1")
    async def handler(ctx: CallContext) -> float:
        seen.extend([ctx, current_call.get()])
        await bench.clock.sleep(2.0)
        return ctx.time_left_s

    bench = Bench([handler])
    exchange = bench.calling("a.ctx.v1", hop=3, attempt=2, retry_allowance=2, metadata={"k": "v"}, context_id="c")
    await bench.clock.advance(2.0)
    assert exchange.answered is not None
    assert exchange.answered.json["data"] == 3.0
    context = seen[0]
    assert seen[1] is context
    assert (context.hop, context.attempt, context.retry_allowance.left) == (3, 2, 2)
    assert (context.metadata, context.context_id, context.idempotency_key) == ({"k": "v"}, "c", "r-1")
    assert current_call.get() is None


async def test_unknown_envelope_fields_are_ignored() -> None:
    assert (await Bench([echo]).call(newer_field={"a": 1})).status == 200


async def test_a_soft_alias_answers_and_says_deprecated() -> None:
    @register_agent("a.thing.v2", soft_aliases=["v1"])
    async def handler(ctx: CallContext) -> str:
        return ctx.capability

    bench = Bench([handler])
    old, new = await bench.call("a.thing.v1"), await bench.call("a.thing.v2")
    assert (old.json["deprecated"], new.json["deprecated"]) == (True, False)
    assert old.json["data"] == "a.thing.v2"


# --- what is refused, and nothing runs -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_options", "status", "kind"),
    [
        ({"headers": {}}, 415, "UnsupportedMediaType"),
        ({"headers": {"content-type": "text/plain"}}, 415, "UnsupportedMediaType"),
        ({"headers": {"content-type": "application/x-www-form-urlencoded"}}, 415, "UnsupportedMediaType"),
        ({"headers": {**JSON, "content-encoding": "gzip"}}, 415, "UnsupportedMediaType"),
        ({"headers": {**JSON, "origin": "https://evil.example"}}, 403, "Forbidden"),
        ({"headers": {**JSON, "origin": "null"}}, 403, "Forbidden"),
        ({"method": "GET"}, 405, "MethodNotAllowed"),
        ({"method": "OPTIONS"}, 405, "MethodNotAllowed"),
        ({"path": "/"}, 404, "NotFound"),
        ({"path": "/invoke/"}, 404, "NotFound"),
        ({"path": "/../invoke"}, 404, "NotFound"),
        ({"body": b""}, 400, "InvalidPayload"),
        ({"body": b"{"}, 400, "InvalidPayload"),
        ({"body": b"\xff"}, 400, "InvalidPayload"),
        ({"body": b"[" * 100_000}, 400, "InvalidPayload"),
        ({"body": b"[]"}, 400, "InvalidPayload"),
        ({"body": b"{}"}, 400, "ProtocolError"),
        ({"body": b'{"protocol": "reach/1", "payload": {"x": NaN}}'}, 400, "InvalidPayload"),
        ({"body": envelope(protocol="reach/2")}, 400, "ProtocolError"),
        ({"body": envelope(trace_id="short")}, 400, "InvalidPayload"),
        ({"body": envelope(payload=[1])}, 400, "InvalidPayload"),
        ({"body": envelope(ttl_ms=-1)}, 400, "InvalidPayload"),
        ({"body": envelope(hop=17)}, 400, "HopLimitExceeded"),
        ({"body": envelope(ttl_ms=0)}, 504, "DeadlineExceeded"),
        ({"body": envelope(namespace="test")}, 421, "Misdirected"),
        ({"body": envelope(target_agent="kb-2")}, 421, "Misdirected"),
        ({"body": envelope("a.other.v1")}, 404, "UnknownCapability"),
        ({"body": envelope("__class__")}, 404, "UnknownCapability"),
        ({"body": envelope("a.__init__.v1")}, 404, "UnknownCapability"),
        ({"body": envelope(payload={"text": 3})}, 422, "InvalidPayload"),
        ({"body": envelope(payload={"txt": "x"})}, 422, "InvalidPayload"),
    ],
)
async def test_a_wrong_request_gets_a_typed_answer_and_runs_nothing(
    request_options: dict[str, Any], status: int, kind: str
) -> None:
    answer = await Bench([echo]).ask(**request_options)
    assert (answer.status, answer.json["code"]) == (status, status)
    assert answer.error["type"] == kind
    assert answer.error["executed"] is False
    assert answer.json["agent_id"] == "kb-1"
    assert "Traceback" not in answer.body.decode()
    assert ran == []


async def test_the_fields_at_fault_are_listed() -> None:
    bench = Bench([echo])
    answer = await bench.call(payload={"text": 3, "txet": 1})
    assert [field for field, _ in answer.error["problems"]] == ["text", "txet"]
    assert "did you mean 'text'?" in answer.error["message"]
    answer = await bench.ask(envelope(attempt=0))
    assert [field for field, _ in answer.error["problems"]] == ["attempt"]
    assert answer.json["response_to"] == "r-1"


async def test_a_refused_payload_is_told_to_the_caller_and_kept_out_of_the_log() -> None:
    class Card(BaseModel):
        number: str
        limits: dict[str, int] = {}

        @field_validator("number")
        @classmethod
        def check(cls, value: str) -> str:
            raise ValueError(f"card {value} is bad")

    @register_agent("a.pay.v1")
    async def pay(card: Card, amount: int) -> None: ...

    @register_agent("a.whole.v1")
    async def whole(card: Card) -> None: ...

    bench = Bench([pay, whole])
    card = {"number": "4111", "limits": {"of Alice": "x"}}
    answer = await bench.call("a.pay.v1", {"card": card, "amount": "much", "secret": 1})
    assert "card 4111 is bad" in answer.error["message"]
    assert {field for field, _ in answer.error["problems"]} >= {"card.number", "amount", "secret"}
    await bench.call("a.whole.v1", card)
    await bench.call("a.whole.v1", {"secret": 1})
    assert [event.outcome for event in bench.served] == ["InvalidPayload"] * 3
    assert [event.detail for event in bench.served] == [
        "problems with the payload: 4; declared fields at fault: card, amount",
        "problems with the payload: 2; declared fields at fault: number, limits",
        "problems with the payload: 1; declared fields at fault: number",
    ]


async def test_a_result_that_does_not_fit_is_kept_out_of_the_log_too() -> None:
    class Card(BaseModel):
        number: str

        @field_validator("number")
        @classmethod
        def check(cls, value: str) -> str:
            raise ValueError(f"card {value} is bad")

    @register_agent("a.card.v1")
    async def handler() -> Card:
        return {"number": "4111"}  # type: ignore[return-value]

    bench = Bench([handler])
    answer = await bench.call("a.card.v1")
    assert "card 4111 is bad" in answer.error["message"]
    (event,) = bench.served
    assert (event.outcome, "4111" in event.detail) == ("InvalidResult", False)


@pytest.mark.parametrize(
    "field",
    [
        "request_id",
        "trace_id",
        "from_agent",
        "namespace",
        "target_capability",
        "target_agent",
        "idempotency_key",
        "context_id",
    ],
)
@pytest.mark.parametrize("character", ["\n", "\r", "\0", "\x1b", "\x7f", "\x85", "\u2028", "\u202e"])
async def test_nobody_forges_a_log_line_with_an_id(field: str, character: str) -> None:
    bench = Bench([echo])
    # With the id as it should be before and after, at either end of it too.
    for value in (f"kb-1{character}served agent_id=kb-2", f"kb-1{character}", f"{character}kb-1"):
        answer = await bench.call(**{field: value})
        assert (answer.status, answer.error["type"]) == (400, "InvalidPayload")
        assert [name for name, _ in answer.error["problems"]] == [field]
    assert bench.events == []
    assert ran == []


async def test_ids_may_be_written_in_any_language() -> None:
    assert (await Bench([echo]).call(from_agent="чат 1", context_id="会話", idempotency_key="é ü")).status == 200


@pytest.mark.parametrize(
    ("changes", "retryable"),
    [({"target_agent": "kb-2"}, True), ({"target_capability": "a.b.v9"}, True), ({"hop": 99}, False)],
)
async def test_another_instance_is_suggested_only_where_it_may_help(changes: Any, retryable: bool) -> None:
    assert (await Bench([echo]).ask(envelope(**changes))).error["retryable"] is retryable


async def test_content_type_may_carry_a_charset_and_any_case() -> None:
    headers = {"content-type": "Application/JSON; charset=utf-8"}
    assert (await Bench([echo]).ask(headers=headers)).status == 200


@pytest.mark.parametrize("length", ["999999999", "10", "9" * 5000, "-1", None])
async def test_a_body_past_the_bound_is_refused_whatever_its_length_says(length: str | None) -> None:
    bench = Bench([echo], config=ServingConfig(max_body_bytes=1024))
    headers = {**JSON, **({} if length is None else {"content-length": length})}
    answer = await bench.ask(headers=headers, chunks=[b" " * 600] * 10)
    assert (answer.status, answer.error["type"]) == (413, "PayloadTooLarge")
    assert answer.headers["connection"] == "close"


async def test_a_large_body_is_not_read_further_than_the_bound() -> None:
    bench = Bench([echo], config=ServingConfig(max_body_bytes=1024))
    reads = 0

    async def receive() -> dict[str, Any]:
        nonlocal reads
        reads += 1
        return {"type": "http.request", "body": b" " * 512, "more_body": True}

    assert (await bench.ask(receive=receive)).status == 413
    assert reads == 3


async def test_a_body_in_pieces_is_read_whole() -> None:
    import json

    body = json.dumps(envelope(payload={"text": "x" * 500})).encode()
    answer = await Bench([echo]).ask(chunks=[body[:7], b"", body[7:]])
    assert answer.json["data"] == "x" * 500


async def test_a_caller_that_leaves_while_sending_gets_nothing_and_runs_nothing() -> None:
    bench = Bench([echo])

    async def receive() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    exchange = bench.begin(receive=receive)
    await exchange.task
    assert exchange.answered is None
    assert ran == []


async def test_an_app_that_was_not_started_says_so_loudly() -> None:
    bench = Bench([echo], started=False)
    answer = await bench.call()
    assert (answer.status, answer.error["type"], answer.error["executed"]) == (503, "NotStarted", False)
    assert "enter the client in the host's lifespan" in answer.error["message"]
    assert answer.json["state"] == "starting"
    bench.app.start()
    assert (await bench.call()).status == 200
    await bench.app.stop()
    assert (await bench.call()).error["type"] == "NotStarted"
    assert ran == ["hi"]


# --- the other routes ------------------------------------------------------------------------------------


async def test_health_and_ready_tell_alive_from_accepting() -> None:
    bench = Bench([echo], started=False)

    async def statuses() -> tuple[int, int, str]:
        health, ready = [await bench.ask(method="GET", path=path, headers={}) for path in ("/health", "/ready")]
        return health.status, ready.status, ready.json["status"]

    assert await statuses() == (200, 503, "starting")
    bench.app.start()
    assert await statuses() == (200, 200, "accepting")
    bench.app.begin_drain()
    assert await statuses() == (200, 503, "draining")
    health = await bench.ask(method="GET", path="/health", headers={})
    assert health.json == {"status": "ok", "agent_id": "kb-1", "incarnation": "i-1", "namespace": "prod"}


async def test_capabilities_shows_contracts_in_full() -> None:
    answer = await Bench([echo]).ask(method="GET", path="/capabilities", headers={})
    (described,) = answer.json["capabilities"]
    assert described["name"] == "a.echo.v1"
    assert described["description"] == "Echo."
    assert (described["idempotent"], described["timeout"]) == (False, "interactive")
    assert len(described["schema_hash"]) == 16
    assert described["input_schema"]["properties"]["text"]["default"] == "hi"
    assert described["output_schema"] == {"type": "string"}


async def test_a_wrong_method_names_the_right_ones() -> None:
    answer = await Bench([echo]).ask(method="POST", path="/health")
    assert (answer.status, answer.headers["allow"]) == (405, "GET, HEAD")


@pytest.mark.parametrize(
    ("path", "root_path"),
    [("/agents/invoke", "/agents"), ("/invoke", "/agents"), ("/invoke", "/invoke"), ("/invoke/invoke", "/invoke")],
)
async def test_a_prefix_may_or_may_not_be_part_of_the_path(path: str, root_path: str) -> None:
    assert (await Bench([echo]).ask(path=path, root_path=root_path)).status == 200


# --- handlers that fail ----------------------------------------------------------------------------------


async def test_a_failing_handler_tells_type_and_message_and_keeps_the_traceback_here() -> None:
    bench = raising(ValueError("no such article"))
    answer = await bench.call("a.raise.v1", request_id="r-77")
    assert (answer.status, answer.json["code"]) == (500, 500)
    assert answer.error == {
        "type": "ValueError",
        "message": "no such article",
        "retryable": False,
        "executed": True,
        "problems": [],
    }
    assert "Traceback" not in answer.body.decode()
    (event,) = bench.served
    assert (event.outcome, event.detail, event.request_id) == ("ValueError", "", "r-77")
    assert event.error is not None
    assert event.error.__traceback__ is not None


async def test_a_failure_is_retryable_only_where_the_capability_is_idempotent() -> None:
    answer = await Bench([fails_safely]).call("a.idempotent.v1")
    assert (answer.error["retryable"], answer.error["executed"]) == (True, True)


async def test_a_handler_whose_task_the_application_cancels_has_failed_and_isnt_run_again() -> None:
    """A "cancel job" of its own, or a cancel of itself: it ran, so what isn't idempotent must not run twice."""
    runs: list[asyncio.Task[Any]] = []

    @register_agent("a.job.v1")
    async def job(itself: bool = False) -> None:
        task = asyncio.current_task()
        assert task is not None
        runs.append(task)
        if itself:
            task.cancel()
        await asyncio.Event().wait()

    for payload in ({}, {"itself": True}):
        runs.clear()
        bench = Bench([job])
        exchange = bench.begin(envelope("a.job.v1", payload=payload))
        await bench.clock.settle()
        runs[0].cancel()
        await exchange.task
        answer = exchange.answered
        assert answer is not None
        assert (answer.status, answer.error["type"], answer.error["executed"]) == (500, "CancelledError", True)
        assert len(runs) == 1


async def test_what_a_handler_left_running_makes_calls_of_its_own_when_it_has_ended() -> None:
    """Its deadline and its retries were the caller's, who has the answer and is gone."""
    left: list[CallContext] = []

    @register_agent("a.leave.v1")
    async def leave(ctx: CallContext) -> bool:
        left.append(ctx)
        return ctx.serving.over

    assert (await Bench([leave]).call("a.leave.v1")).json["data"] is False
    assert left[0].serving.over


async def test_the_answer_says_how_many_of_the_retries_that_came_along_are_left() -> None:
    @register_agent("a.spend.v1")
    async def spend(ctx: CallContext, fail: bool = False) -> None:
        ctx.retry_allowance.take()
        if fail:
            raise ValueError("all the same")

    for payload in ({}, {"fail": True}):
        answer = await Bench([spend]).call("a.spend.v1", payload=payload, retry_allowance=5)
        assert answer.json["retry_allowance"] == 4


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no")


@pytest.mark.parametrize(
    ("error", "kind", "retryable"),
    [
        (asyncio.CancelledError("mine"), "CancelledError", True),
        (SystemExit(3), "SystemExit", True),
        (GeneratorExit(), "GeneratorExit", True),
        (TimeoutError(), "TimeoutError", True),
        (Unprintable(), "Unprintable", True),
        (ValueError("\ud800"), "ValueError", True),
        # The hop next to the fault has retried already.
        (Overloaded("nested"), "Overloaded", False),
        (OutcomeUnknown("nested", agent_id="x"), "OutcomeUnknown", False),
    ],
)
async def test_whatever_a_handler_raises_is_an_answer(error: BaseException, kind: str, retryable: bool) -> None:
    bench = raising(error, idempotent=True)
    answer = await bench.call("a.raise.v1")
    assert (answer.status, answer.error["type"], answer.error["executed"]) == (500, kind, True)
    assert answer.error["retryable"] is retryable
    assert (await bench.call("a.raise.v1")).status == 500
    assert bench.app.in_flight == 0


async def test_a_sync_handler_that_exits_is_an_answer_too() -> None:
    @register_agent("a.exit.v1")
    def handler() -> None:
        sys.exit(1)

    answer = await Bench([handler]).call("a.exit.v1")
    assert (answer.status, answer.error["type"]) == (500, "SystemExit")


def test_ctrl_c_in_a_handler_stops_the_process_as_it_should() -> None:
    async def main() -> None:
        await raising(KeyboardInterrupt()).call("a.raise.v1")

    complaints: list[str] = []

    async def listening() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, about: complaints.append(about["message"]))
        await main()

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(listening())
    gc.collect()  # asyncio complains of an exception that nobody asked for when its task is collected
    assert complaints == []


async def test_a_long_message_is_cut() -> None:
    answer = await raising(ValueError("x" * 100_000)).call("a.raise.v1")
    assert len(answer.error["message"]) == 2000


async def test_a_validator_that_breaks_is_a_failure_before_execution() -> None:
    class Body(BaseModel):
        n: int

        @field_validator("n")
        @classmethod
        def broken(cls, value: int) -> int:
            raise KeyError(value)

    @register_agent("a.body.v1")
    async def handler(body: Body) -> None:
        ran.append("body")

    answer = await Bench([handler]).call("a.body.v1", {"n": 1})
    assert (answer.status, answer.error["type"], answer.error["executed"]) == (500, "KeyError", False)
    assert ran == []


@pytest.mark.parametrize("result", [float("nan"), object(), {"a": float("inf")}])
async def test_a_result_without_a_json_form_is_an_invalid_reply(result: Any) -> None:
    @register_agent("a.bad.v1", idempotent=True)
    async def handler():  # type: ignore[no-untyped-def]
        return result

    answer = await Bench([handler]).call("a.bad.v1")
    assert (answer.status, answer.error["type"]) == (500, "InvalidResult")
    assert (answer.error["executed"], answer.error["retryable"]) == (True, False)


async def test_a_result_past_the_bound_is_an_invalid_reply() -> None:
    @register_agent("a.big.v1")
    async def handler() -> str:
        return "x" * 2000

    answer = await Bench([handler], config=ServingConfig(max_body_bytes=1024)).call("a.big.v1")
    assert (answer.status, answer.error["type"]) == (500, "InvalidResult")
    assert "2002 bytes, the limit is 1024" in answer.error["message"]


# --- time and leaving ------------------------------------------------------------------------------------


async def test_a_handler_is_cancelled_when_the_callers_time_is_up() -> None:
    gate = Gate()
    bench = Bench([gate.handler(idempotent=True)])
    exchange = bench.calling("a.gate.v1", ttl_ms=1500)
    await bench.clock.advance(1.4)
    assert exchange.answered is None
    await bench.clock.advance(0.2)
    assert exchange.answered is not None
    assert (exchange.answered.status, exchange.answered.error["type"]) == (504, "DeadlineExceeded")
    assert (exchange.answered.error["executed"], exchange.answered.error["retryable"]) == (True, True)
    assert exchange.answered.error["message"] == "a.gate.v1 didn't end within the 1.5 s that its caller gave"
    assert gate.cancelled == 1
    assert bench.app.in_flight == 0


async def test_an_absurdly_long_time_is_no_error() -> None:
    assert (await Bench([echo]).call(ttl_ms=10**30)).status == 200


async def test_the_time_runs_while_the_body_arrives() -> None:
    import json

    bench = Bench([echo])
    body = json.dumps(envelope(ttl_ms=1000)).encode()
    parts = [body[:5], body[5:]]

    async def receive() -> dict[str, Any]:
        if len(parts) == 1:
            await bench.clock.sleep(2.0)
        return {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts)}

    exchange = bench.begin(receive=receive)
    await bench.clock.advance(3.0)
    assert exchange.answered is not None
    assert (exchange.answered.status, exchange.answered.error["executed"]) == (504, False)
    assert ran == []


async def test_a_handler_is_cancelled_when_the_caller_hangs_up() -> None:
    gate = Gate()
    bench = Bench([gate.handler()])
    exchange = bench.calling("a.gate.v1")
    await bench.clock.settle()
    exchange.hang_up()
    await bench.clock.settle()
    assert exchange.task.done()
    assert exchange.answered is None
    assert gate.cancelled == 1
    assert [event.outcome for event in bench.served] == ["Disconnected"]


async def test_a_handler_is_cancelled_when_the_server_cancels_the_request() -> None:
    gate = Gate()
    bench = Bench([gate.handler()])
    exchange = bench.calling("a.gate.v1")
    await bench.clock.settle()
    exchange.task.cancel()
    await bench.clock.settle()
    assert exchange.task.cancelled()
    assert gate.cancelled == 1
    assert bench.app.in_flight == 0


@pytest.mark.parametrize("strange", [{"type": "http.request", "body": b"", "more_body": False}, RuntimeError("no")])
async def test_a_middleware_that_hides_disconnects_does_no_harm(strange: Any) -> None:
    import json

    bench = Bench([gate_handler := Gate().handler()])
    del gate_handler
    calls = 0

    async def receive() -> dict[str, Any]:
        nonlocal calls
        calls += 1
        if calls == 1:
            return {"type": "http.request", "body": json.dumps(envelope("a.gate.v1")).encode()}
        if isinstance(strange, Exception):
            raise strange
        return dict(strange)

    exchange = bench.begin(receive=receive)
    await bench.clock.advance(4.9)
    assert exchange.answered is None
    await bench.clock.advance(0.2)
    assert exchange.answered is not None
    assert exchange.answered.status == 504
    assert calls == 2


async def test_a_server_that_raises_on_a_late_answer_is_no_error() -> None:
    bench = Bench([echo])

    async def send(message: Any) -> None:
        raise OSError("connection lost")

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"{}"}

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/invoke",
        "headers": [(b"content-type", b"application/json")],
    }
    await bench.app(scope, receive, send)


async def test_a_sync_handler_past_its_time_keeps_its_place_until_it_ends() -> None:
    go = threading.Event()

    @register_agent("a.slow.v1", max_concurrency=1, queue=0)
    def handler() -> str:
        go.wait(timeout=10)
        return "done"

    bench = Bench([handler])
    exchange = bench.calling("a.slow.v1", ttl_ms=1000)
    await bench.clock.advance(1.1)
    assert exchange.answered is not None
    assert exchange.answered.status == 504
    assert exchange.answered.json["load"]["in_flight"] == 1
    assert (await bench.call("a.slow.v1")).error["type"] == "Overloaded"
    assert bench.app.in_flight == 1
    go.set()
    async with asyncio.timeout(5):
        while bench.app.in_flight:
            await asyncio.sleep(0)
    assert (await bench.call("a.slow.v1")).status == 200


# --- admission, seen from outside ------------------------------------------------------------------------


async def test_past_the_limit_calls_queue_and_then_are_refused_unexecuted() -> None:
    gate = Gate()
    bench = Bench([gate.handler(max_concurrency=2)], config=ServingConfig(queue_factor=1))
    waiting = [bench.calling("a.gate.v1", request_id=f"r-{n}") for n in range(4)]
    await bench.clock.settle()
    assert gate.entered == 2
    refused = await bench.call("a.gate.v1")
    assert (refused.status, refused.error["type"], refused.error["executed"]) == (503, "Overloaded", False)
    assert refused.error["retryable"] is True
    assert refused.error["retry_after_ms"] > 0
    assert refused.json["state"] == "overloaded"
    assert refused.json["load"] == {"in_flight": 2, "queued": 2, "max_concurrency": 2}
    gate.go.set()
    await bench.clock.settle()
    assert [one.answered.status for one in waiting if one.answered] == [200] * 4


async def test_sync_handlers_make_no_more_threads_than_64_without_a_limit_of_their_own() -> None:
    go, lock = threading.Event(), threading.Lock()
    running = most = 0

    @register_agent("a.slow.v1", queue=36)
    def handler() -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        go.wait(timeout=10)
        with lock:
            running -= 1

    bench = Bench([handler])
    exchanges = [bench.calling("a.slow.v1", request_id=f"r-{n}") for n in range(100)]
    await bench.clock.settle()
    refused = await bench.call("a.slow.v1")
    assert (refused.status, refused.error["type"]) == (503, "Overloaded")
    assert refused.json["load"] == {"in_flight": 64, "queued": 36, "max_concurrency": 64}
    go.set()
    async with asyncio.timeout(10):
        await asyncio.gather(*(exchange.task for exchange in exchanges))
    assert {one.answered.status for one in exchanges if one.answered} == {200}
    assert most <= 64


async def test_a_full_capability_does_not_stop_another() -> None:
    gate = Gate()
    bench = Bench([gate.handler(max_concurrency=1, queue=0), echo])
    exchange = bench.calling("a.gate.v1")
    await bench.clock.settle()
    assert (await bench.call("a.echo.v1")).json["state"] == "accepting"
    exchange.hang_up()
    await exchange.task


async def test_work_whose_time_ends_in_the_queue_never_runs() -> None:
    gate = Gate()
    bench = Bench([gate.handler(max_concurrency=1)])
    first = bench.calling("a.gate.v1", ttl_ms=60_000)
    queued = bench.calling("a.gate.v1", ttl_ms=1000)
    await bench.clock.advance(1.1)
    assert queued.answered is not None
    assert (queued.answered.status, queued.answered.error["executed"]) == (504, False)
    assert "when the 1 s that its caller gave were up" in queued.answered.error["message"]
    gate.go.set()
    await bench.clock.settle()
    assert first.answered is not None
    assert gate.entered == 1


# --- dedupe, seen from outside ---------------------------------------------------------------------------


async def test_a_repeat_joins_the_running_call_and_later_gets_its_answer() -> None:
    gate = Gate()
    bench = Bench([gate.handler()])
    both = [bench.calling("a.gate.v1", request_id=f"r-{n}", idempotency_key="k") for n in range(2)]
    await bench.clock.settle()
    gate.go.set()
    await bench.clock.settle()
    late = await bench.call("a.gate.v1", request_id="r-9", idempotency_key="k")
    answers = [one.answered for one in both if one.answered] + [late]
    assert [(answer.json["data"], answer.json["response_to"]) for answer in answers] == [
        ("through", "r-0"),
        ("through", "r-1"),
        ("through", "r-9"),
    ]
    assert gate.entered == 1


async def test_the_default_key_asks_for_no_dedupe() -> None:
    bench = Bench([echo])
    for _ in range(2):
        await bench.call(idempotency_key="r-1")
    assert len(ran) == 2


async def test_a_key_is_its_callers_and_its_capabilitys_own() -> None:
    bench = Bench([echo])
    await bench.call(idempotency_key="k")
    await bench.call(idempotency_key="k", from_agent="chat-2")
    assert len(ran) == 2


async def test_a_remembered_answer_is_forgotten_after_its_time() -> None:
    bench = Bench([echo], config=ServingConfig(dedupe_ttl_s=10))
    await bench.call(idempotency_key="k")
    await bench.clock.advance(9)
    await bench.call(idempotency_key="k")
    assert len(ran) == 1
    await bench.clock.advance(2)
    await bench.call(idempotency_key="k")
    assert len(ran) == 2


async def test_a_key_used_for_another_payload_is_refused() -> None:
    bench = Bench([echo])
    await bench.call(payload={"text": "a"}, idempotency_key="k")
    answer = await bench.call(payload={"text": "b"}, idempotency_key="k")
    assert (answer.status, answer.error["problems"][0][0]) == (422, "idempotency_key")
    assert ran == ["a"]


async def test_one_of_two_joined_callers_may_leave() -> None:
    gate = Gate()
    bench = Bench([gate.handler()])
    first = bench.calling("a.gate.v1", request_id="r-1", idempotency_key="k", ttl_ms=1000)
    second = bench.calling("a.gate.v1", request_id="r-2", idempotency_key="k", ttl_ms=9000)
    await bench.clock.advance(1.1)
    assert first.answered is not None
    assert first.answered.status == 504
    assert gate.cancelled == 0
    gate.go.set()
    await bench.clock.settle()
    assert second.answered is not None
    assert second.answered.json["data"] == "through"


async def test_who_leaves_a_queued_run_to_others_is_not_promised_that_nothing_runs() -> None:
    gate = Gate()
    bench = Bench([gate.handler(max_concurrency=1)])
    first = bench.calling("a.gate.v1", request_id="r-0", ttl_ms=60_000)
    early = bench.calling("a.gate.v1", request_id="r-1", idempotency_key="k", ttl_ms=1000)
    later = bench.calling("a.gate.v1", request_id="r-2", idempotency_key="k", ttl_ms=2000)
    await bench.clock.advance(1.1)
    assert early.answered is not None
    assert (early.answered.status, early.answered.error["executed"]) == (504, True)
    await bench.clock.advance(1.0)
    assert later.answered is not None
    assert (later.answered.status, later.answered.error["executed"]) == (504, False)
    gate.go.set()
    await first.task
    assert gate.entered == 1


async def test_the_last_joined_caller_to_leave_cancels_and_a_repeat_runs_anew() -> None:
    gate = Gate()
    bench = Bench([gate.handler()])
    both = [bench.calling("a.gate.v1", request_id=f"r-{n}", idempotency_key="k") for n in range(2)]
    await bench.clock.settle()
    both[0].hang_up()
    await bench.clock.settle()
    assert gate.cancelled == 0
    both[1].hang_up()
    await bench.clock.settle()
    assert gate.cancelled == 1
    gate.go.set()
    assert (await bench.call("a.gate.v1", request_id="r-5", idempotency_key="k")).status == 200
    assert gate.entered == 2


async def test_a_repeat_that_comes_while_a_cancelled_run_cleans_up_runs_anew() -> None:
    entered = 0
    cleaned = asyncio.Event()

    @register_agent("a.tidy.v1")
    async def handler() -> int:
        nonlocal entered
        entered += 1
        if entered == 1:
            try:
                await asyncio.Event().wait()
            finally:
                await cleaned.wait()
        return entered

    bench = Bench([handler])
    first = bench.calling("a.tidy.v1", request_id="r-1", idempotency_key="k")
    await bench.clock.settle()
    first.hang_up()
    await bench.clock.settle()
    second = bench.calling("a.tidy.v1", request_id="r-2", idempotency_key="k")
    await bench.clock.settle()
    assert entered == 1
    cleaned.set()
    await bench.clock.settle()
    assert second.answered is not None
    assert second.answered.json["data"] == 2


async def test_a_repeat_gets_the_result_of_a_sync_handler_that_outlived_its_caller() -> None:
    go = threading.Event()
    runs: list[int] = []

    @register_agent("a.pay.v1")
    def handler() -> str:
        runs.append(1)
        go.wait(timeout=10)
        return "paid"

    bench = Bench([handler])
    first = bench.calling("a.pay.v1", request_id="r-1", idempotency_key="k", ttl_ms=1000)
    await bench.clock.advance(1.1)
    assert first.answered is not None
    assert first.answered.status == 504
    second = bench.calling("a.pay.v1", request_id="r-2", idempotency_key="k", ttl_ms=9000)
    go.set()
    await asyncio.wait_for(second.task, 5)
    assert second.answered is not None
    assert second.answered.json["data"] == "paid"
    assert runs == [1]


# --- draining and stopping -------------------------------------------------------------------------------


async def test_while_draining_calls_are_answered_and_told() -> None:
    bench = Bench([echo])
    bench.app.begin_drain()
    answer = await bench.call()
    assert (answer.status, answer.json["state"], answer.headers["connection"]) == (200, "draining", "close")


async def test_wait_idle_waits_for_what_runs() -> None:
    gate = Gate()
    bench = Bench([gate.handler()])
    assert await bench.app.wait_idle(0.0)
    exchange = bench.calling("a.gate.v1")
    await bench.clock.settle()
    assert bench.app.in_flight == 1
    short = asyncio.ensure_future(bench.app.wait_idle(1.0))
    long = asyncio.ensure_future(bench.app.wait_idle(4.0))
    await bench.clock.advance(1.1)
    assert short.result() is False
    gate.go.set()
    await bench.clock.settle()
    assert long.result() is True
    assert exchange.task.done()


async def test_stop_cancels_the_rest_and_says_what_had_begun() -> None:
    gate = Gate()
    bench = Bench([gate.handler(max_concurrency=1)])
    running, queued = [bench.calling("a.gate.v1", request_id=f"r-{n}") for n in range(2)]
    await bench.clock.settle()
    await bench.app.stop()
    await bench.clock.settle()
    assert running.answered is not None
    assert queued.answered is not None
    assert (running.answered.status, running.answered.error["executed"]) == (503, True)
    assert (queued.answered.status, queued.answered.error["executed"]) == (503, False)
    assert gate.cancelled == 1
    assert bench.app.in_flight == 0


async def test_stop_is_not_held_up_by_a_thread_that_hangs() -> None:
    go = threading.Event()

    @register_agent("a.hang.v1")
    def handler() -> None:
        go.wait(timeout=30)

    bench = Bench([handler])
    exchange = bench.calling("a.hang.v1")
    await bench.clock.settle()
    async with asyncio.timeout(5):
        await bench.app.stop()
        await exchange.task
    go.set()


async def test_a_second_stop_does_not_wait_again_for_what_ignores_its_cancellation() -> None:
    entered, let_go = asyncio.Event(), asyncio.Event()

    @register_agent("a.deaf.v1")
    async def deaf() -> None:
        entered.set()
        while not let_go.is_set():
            try:
                await let_go.wait()
            except asyncio.CancelledError:
                continue

    bench = Bench([deaf])
    exchange = bench.calling("a.deaf.v1")
    await entered.wait()
    try:
        await bench.app.stop(0.01)
        async with asyncio.timeout(5):
            await bench.app.stop(60.0)
    finally:
        let_go.set()
    await exchange.task


class Upload:
    """A request whose body arrives when it is told to."""

    def __init__(self) -> None:
        self.reading, self.arrived = asyncio.Event(), asyncio.Event()

    async def receive(self) -> dict[str, Any]:
        if self.reading.is_set():
            await asyncio.Event().wait()
        self.reading.set()
        await self.arrived.wait()
        return {"type": "http.request", "body": json.dumps(envelope()).encode(), "more_body": False}


async def test_a_request_whose_body_still_arrives_is_waited_for() -> None:
    bench, upload = Bench([echo]), Upload()
    exchange = bench.begin(receive=upload.receive)
    await upload.reading.wait()
    assert bench.app.in_flight == 1
    bench.app.begin_drain()
    idle = asyncio.ensure_future(bench.app.wait_idle(5.0))
    await bench.clock.settle()
    assert not idle.done()
    upload.arrived.set()
    assert await idle
    await exchange.task
    assert exchange.answered is not None
    assert exchange.answered.json["data"] == "hi"
    assert bench.app.in_flight == 0


@pytest.mark.parametrize("started_again", [False, True])
async def test_a_body_that_arrives_after_the_stop_runs_nothing(started_again: bool) -> None:
    bench, upload = Bench([echo]), Upload()
    exchange = bench.begin(receive=upload.receive)
    await upload.reading.wait()
    await bench.app.stop()
    if started_again:
        bench.app.start()
    upload.arrived.set()
    await exchange.task
    assert exchange.answered is not None
    assert exchange.answered.status == 503
    error = exchange.answered.error
    assert (error["type"], error["executed"], error["retryable"]) == ("NotStarted", False, True)
    assert ran == []


# --- started again ---------------------------------------------------------------------------------------


@register_agent("a.turns.v1", max_concurrency=1)
async def turns() -> str:
    for _ in range(3):
        await asyncio.sleep(0)
    return "done"


async def incarnations(bench: Bench) -> set[str]:
    """Every place where a served agent tells its incarnation."""
    told = [await bench.ask(method="GET", path=path, headers={}) for path in ("/health", "/ready", "/capabilities")]
    ping = (await bench.call(PING)).json["data"]
    return {bench.app.incarnation, *(one["incarnation"] for one in (ping, *(answer.json for answer in told)))}


async def test_an_app_started_again_serves_again_under_another_incarnation() -> None:
    bench = Bench([turns])
    assert await incarnations(bench) == {"i-1"}
    assert (await bench.call("a.turns.v1")).json["data"] == "done"
    seen = {"i-1"}
    for _ in range(2):
        await bench.app.stop()
        assert (await bench.call("a.turns.v1")).status == 503
        bench.app.start()
        now = await incarnations(bench)
        assert len(now) == 1
        assert not now & seen
        seen |= now
        answer = await bench.call("a.turns.v1")
        assert (answer.status, answer.json["data"], answer.json["state"]) == (200, "done", "accepting")


async def test_a_start_without_a_stop_goes_on_as_it_was() -> None:
    gate = Gate()
    bench = Bench([gate.handler()])
    exchange = bench.calling("a.gate.v1")
    await bench.clock.settle()
    bench.app.start()
    assert (bench.app.incarnation, bench.app.in_flight) == ("i-1", 1)
    gate.go.set()
    await exchange.task


@pytest.mark.parametrize("stopped", [True, False])
def test_an_app_may_be_served_by_one_event_loop_after_another(stopped: bool) -> None:
    """Without a stop too: a loop may end under an app, in the midst of a call."""
    gate = Gate()
    bench = Bench([turns, gate.handler(max_concurrency=1)], started=False)
    seen = set()

    async def serve() -> None:
        gate.go = asyncio.Event()
        bench.app.start()
        seen.add(bench.app.incarnation)
        # One call runs and one waits when the loop ends.
        left = [bench.calling("a.gate.v1", request_id=f"r-{n}") for n in range(2)]
        assert (await bench.call("a.turns.v1")).json["data"] == "done"
        assert bench.app.in_flight == len(left)
        if stopped:
            await bench.app.stop()

    for _ in range(3):
        asyncio.run(serve())
    assert len(seen) == 3


async def test_an_app_may_be_made_without_an_incarnation_and_has_one_before_it_starts() -> None:
    one, other = (Bench([echo], started=False, incarnation=None) for _ in range(2))
    assert one.app.incarnation != other.app.incarnation
    before = one.app.incarnation
    one.app.start()
    assert await incarnations(one) == {before}


# --- lifespan and hosts ----------------------------------------------------------------------------------


async def lifespan(app: Any, *phases: str) -> list[dict[str, Any]]:
    messages = [{"type": f"lifespan.{phase}"} for phase in phases]
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return messages.pop(0)

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    await app({"type": "lifespan"}, receive, send)
    return sent


async def test_served_bare_the_lifespan_starts_and_stops_the_app() -> None:
    bench = Bench([echo], started=False)
    sent = await lifespan(bench.app, "startup", "shutdown")
    assert [message["type"] for message in sent] == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
    assert bench.app.state == "stopped"


async def test_a_startup_that_fails_is_told_to_the_server() -> None:
    from agent_reach.serving.asgi import ReachApp
    from agent_reach.testing import ManualClock

    async def broken() -> None:
        raise RuntimeError("etcd is down")

    async def fine() -> None: ...

    app = ReachApp(
        agent_id="kb-1",
        incarnation="i",
        namespace="prod",
        specs=(),
        config=ServingConfig(),
        hop_limit=1,
        clock=ManualClock(),
        emit=lambda event: None,
        on_lifespan=(broken, fine),
    )
    (message,) = await lifespan(app, "startup")
    assert message == {"type": "lifespan.startup.failed", "message": "RuntimeError: etcd is down"}


async def test_a_websocket_is_closed_politely() -> None:
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {"type": "websocket.connect"}

    async def send(message: Any) -> None:
        sent.append(message)

    await Bench([echo]).app({"type": "websocket", "path": "/invoke"}, receive, send)
    assert [message["type"] for message in sent] == ["websocket.close"]


async def test_in_process_errors_look_like_those_on_the_wire() -> None:
    bench = raising(ValueError("x"))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(bench.app), base_url="http://kb") as client:
        response = await client.post("/invoke", json=envelope("a.raise.v1"))
    assert (response.status_code, response.json()["error"]["type"]) == (500, "ValueError")


async def test_mounted_in_fastapi_with_its_own_lifespan() -> None:
    import contextlib

    from fastapi import FastAPI

    bench = Bench([echo], started=False)

    @contextlib.asynccontextmanager
    async def own_lifespan(app: FastAPI) -> AsyncIterator[None]:
        bench.app.start()
        yield
        await bench.app.stop()

    host = FastAPI(lifespan=own_lifespan)
    host.mount("/agents", bench.app)
    transport = httpx.ASGITransport(host)
    async with httpx.AsyncClient(transport=transport, base_url="http://host") as client:
        # ASGITransport runs no lifespan: the app says so instead of answering unregistered.
        response = await client.post("/agents/invoke", json=envelope())
        assert (response.status_code, response.json()["error"]["type"]) == (503, "NotStarted")
        async with own_lifespan(host):
            response = await client.post("/agents/invoke", json=envelope(payload={"text": "x"}))
            assert response.json()["data"] == "x"
            assert (await client.get("/agents/health")).status_code == 200
            assert (await client.get("/agents/nowhere")).json()["error"]["type"] == "NotFound"


async def test_an_observer_of_ours_that_breaks_is_a_500_and_no_exception(caplog: pytest.LogCaptureFixture) -> None:
    from agent_reach.handlers import specs_of
    from agent_reach.serving.asgi import ReachApp
    from agent_reach.testing import ManualClock

    def broken(event: object) -> None:
        raise RuntimeError("no")

    app = ReachApp(
        agent_id="kb-1",
        incarnation="i",
        namespace="prod",
        specs=specs_of([echo]),
        config=ServingConfig(),
        hop_limit=16,
        clock=ManualClock(),
        emit=broken,
    )
    app.start()
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://kb") as client:
        response = await client.post("/invoke", json=envelope())
    assert (response.status_code, response.json()["error"]["type"]) == (500, "InternalError")


def test_serving_in_a_host_does_not_import_uvicorn() -> None:
    code = "import sys, agent_reach.handlers, agent_reach.serving.asgi; assert 'uvicorn' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
