"""`ReachClient` on an in-memory registry: the whole way of a call without a socket."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from pydantic import BaseModel

from agent_reach import (
    AgentIdInUse,
    AgentNotFound,
    CallContext,
    ClientNotOpen,
    ConfigError,
    DeadlineExceeded,
    InvalidPayload,
    InvalidReply,
    MemoryRegistry,
    NoHealthyAgent,
    OutcomeUnknown,
    Overloaded,
    ProtocolError,
    ReachClient,
    ReachConfig,
    RegistryConfig,
    RegistryUnavailable,
    RemoteError,
    RetryConfig,
    Risk,
    SchemaConflict,
    Unauthorized,
    register_agent,
)
from agent_reach.context import current_call
from agent_reach.events import BreakerChanged, CallEnded, CallServed, ContractClash, Event
from agent_reach.ports import Answer, BadAnswer, DialRequest, DialResult, MaybeExecuted, NeverSent
from agent_reach.testing import ManualClock
from tests.registry.support import eventually
from tests.routing.world import CAPABILITY, agent


@register_agent(CAPABILITY, idempotent=True)
async def retrieve(query: str, limit: int = 5) -> list[str]:
    """Find articles."""
    return [f"{query} {n}" for n in range(limit)]


@register_agent("echo.context.v1")
async def echo_context(ctx: CallContext) -> dict[str, Any]:
    return {
        "request_id": ctx.request_id,
        "trace_id": ctx.trace_id,
        "from_agent": ctx.from_agent,
        "hop": ctx.hop,
        "context_id": ctx.context_id,
        "metadata": dict(ctx.metadata),
        "time_left_s": ctx.time_left_s,
        "key": ctx.idempotency_key,
    }


@register_agent("always.fails.v1")
async def fails(secret: str = "") -> None:
    raise KeyError(f"no such customer {secret}")


class Seen:
    """An observer that keeps what it is told."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def on_event(self, event: Event) -> None:
        self.events.append(event)

    def of(self, kind: type) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


class Script:
    """A dialer that does what the test says, by url host."""

    def __init__(self, act: Callable[[DialRequest], Any]) -> None:
        self.act = act
        self.requests: list[DialRequest] = []
        self.closed = False

    async def send(self, request: DialRequest) -> DialResult:
        self.requests.append(request)
        result = self.act(request)
        return await result if asyncio.iscoroutine(result) else result

    async def aclose(self) -> None:
        self.closed = True


def put(registry: MemoryRegistry, *infos: Any) -> None:
    for info in infos:
        registry.put_raw("default", info.agent_id, info.to_bytes())


def good(request: DialRequest, agent_id: str = "kb-1", **fields: Any) -> Answer:
    import json

    sent = json.loads(request.body)
    body = {"code": 0, "data": "fine", "response_to": sent["request_id"], "agent_id": sent["target_agent"]}
    return Answer(200, {}, json.dumps(body | fields).encode())


# --- the main way --------------------------------------------------------------------------------------------


async def test_a_call_finds_the_agent_and_brings_its_answer() -> None:
    registry, seen = MemoryRegistry(), Seen()
    async with (
        ReachClient("kb-1", handlers=[retrieve], registry=registry, observers=[seen]),
        ReachClient("chat-1", registry=registry, observers=[seen]) as reach,
    ):
        reply = await reach.call(CAPABILITY, {"query": "flood", "limit": 2})
    assert reply.data == ["flood 0", "flood 1"]
    assert (reply.agent_id, reply.deprecated, reply.stale) == ("kb-1", False, False)
    assert [attempt.outcome for attempt in reply.attempts] == ["ok"]
    (ended,), (served,) = seen.of(CallEnded), seen.of(CallServed)
    assert ended.request_id == served.request_id == reply.request_id
    assert ended.trace_id == served.trace_id
    assert (ended.outcome, served.outcome, ended.agent_id, served.from_agent) == ("ok", "ok", "kb-1", "chat-1")


async def test_an_agent_that_comes_later_is_heard_of_at_once_and_one_that_leaves_too() -> None:
    registry = MemoryRegistry()
    async with ReachClient(registry=registry) as reach:
        with pytest.raises(AgentNotFound):
            await reach.call(CAPABILITY, {"query": "x"})
        async with ReachClient("kb-1", handlers=[retrieve], registry=registry):
            assert (await reach.call(CAPABILITY, {"query": "x"})).agent_id == "kb-1"
        await asyncio.wait_for(_until(lambda: not reach.agents()), 5)


async def _until(check: Callable[[], bool]) -> None:
    while not check():
        await asyncio.sleep(0)


async def test_a_model_goes_in_and_a_model_comes_out() -> None:
    class Query(BaseModel):
        query: str
        limit: int = 1

    registry = MemoryRegistry()
    async with ReachClient(handlers=[retrieve], registry=registry) as reach:
        reply = await reach.call(CAPABILITY, Query(query="x"), response_model=list[str])
        assert reply.data == ["x 0"]
        with pytest.raises(InvalidReply, match=r"response_model expects: 0: Input should be a valid integer"):
            await reach.call(CAPABILITY, Query(query="x"), response_model=list[int])


async def test_a_soft_alias_answers_for_the_old_version_and_says_so() -> None:
    @register_agent("knowledge.retrieve.v2", soft_aliases=["v1"])
    async def newer(query: str) -> str:
        return "v2"

    registry = MemoryRegistry()
    async with ReachClient("new", handlers=[newer], registry=registry) as reach:
        reply = await reach.call(CAPABILITY, {"query": "x"})
        assert (reply.data, reply.deprecated) == ("v2", True)
        assert "soft alias" in str(reach.explain(CAPABILITY))
        async with ReachClient("old", handlers=[retrieve], registry=registry):
            reply = await reach.call(CAPABILITY, {"query": "x"})
            assert (reply.agent_id, reply.deprecated) == ("old", False)


async def test_namespaces_never_see_each_other() -> None:
    registry = MemoryRegistry()
    async with (
        ReachClient("kb-1", handlers=[retrieve], registry=registry, namespace="prod"),
        ReachClient("kb-1", handlers=[retrieve], registry=registry, namespace="prod2"),
        ReachClient(registry=registry, namespace="test") as reach,
    ):
        assert reach.agents() == ()


# --- nested calls --------------------------------------------------------------------------------------------


async def test_a_nested_call_carries_trace_hop_context_and_what_time_is_left() -> None:
    registry = MemoryRegistry()
    contexts: list[CallContext] = []

    async with ReachClient("inner", handlers=[echo_context], registry=registry) as inner:

        @register_agent("outer.ask.v1")
        async def ask(ctx: CallContext) -> Any:
            contexts.append(ctx)
            return (await inner.call("echo.context.v1", {}, timeout=20)).data

        async with ReachClient("outer", handlers=[ask], registry=registry):
            reply = await inner.call("outer.ask.v1", {}, timeout=3, context_id="conv", metadata={"team": "blue"})
    outer = contexts[0]
    assert outer.request_id == reply.request_id
    assert reply.data["trace_id"] == outer.trace_id
    assert reply.data["request_id"] != outer.request_id
    assert (outer.hop, reply.data["hop"]) == (1, 2)
    assert reply.data["context_id"] == "conv"
    assert 0 < reply.data["time_left_s"] <= 3
    assert reply.data["metadata"] == {}
    assert current_call.get() is None


async def test_agents_that_call_each_other_in_a_circle_stop_at_the_hop_limit() -> None:
    registry = MemoryRegistry()
    depth = 0
    async with ReachClient("me", registry=registry, config=ReachConfig(hop_limit=5)) as reach:

        @register_agent("circle.turn.v1")
        async def turn() -> None:
            nonlocal depth
            depth += 1
            await reach.call("circle.turn.v1")

        async with ReachClient("c", handlers=[turn], registry=registry):
            with pytest.raises(RemoteError, match="HopLimitExceeded"):
                await reach.call("circle.turn.v1")
        assert depth == 5


async def test_nothing_is_sent_when_the_caller_has_no_time_left() -> None:
    registry, clock = MemoryRegistry(), ManualClock()
    async with ReachClient(handlers=[retrieve], registry=registry) as reach:
        token = current_call.set(
            CallContext(
                request_id="r", trace_id="a" * 32, from_agent="x", capability="a.b.v1", deadline=0.0, now=clock.now
            )
        )
        try:
            with pytest.raises(DeadlineExceeded, match="no time left"):
                await reach.call(CAPABILITY, {"query": "x"})
        finally:
            current_call.reset(token)


# --- errors that a tired person can act on -------------------------------------------------------------------


async def test_a_handlers_error_comes_back_with_type_and_message_and_no_traceback() -> None:
    registry = MemoryRegistry()
    async with ReachClient("kb-1", handlers=[fails], registry=registry) as reach:
        with pytest.raises(RemoteError) as caught:
            await reach.call("always.fails.v1", {"secret": "42"})
    error = caught.value
    assert (error.remote_type, error.remote_message) == ("KeyError", "'no such customer 42'")
    assert str(error) == "always.fails.v1 failed on kb-1: KeyError: 'no such customer 42'"
    assert "Traceback" not in repr(error.__dict__)


async def test_an_unknown_capability_names_near_ones() -> None:
    registry = MemoryRegistry()
    async with ReachClient(handlers=[retrieve], registry=registry) as reach:
        with pytest.raises(AgentNotFound, match=r"Did you mean knowledge\.retrieve\.v1\?") as caught:
            await reach.call("knowledge.retrieve.v2", {})
        assert caught.value.near == (CAPABILITY,)
        assert caught.value.capability == "knowledge.retrieve.v2"
        with pytest.raises(AgentNotFound, match="Is the agent running"):
            await reach.call("weather.report.v1", {})
        with pytest.raises(AgentNotFound, match="agent 'kb-9' doesn't offer"):
            await reach.call(CAPABILITY, {"query": "x"}, agent_id="kb-9")
        with pytest.raises(ConfigError, match="Did you mean 'knowledge.retrieve.v1'"):
            await reach.call("Knowledge.Retrieve", {})


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        ({"query": 1, "limit": "many"}, "query: Input should be a valid string.*limit: Input should be a valid"),
        ({}, "query: Field required"),
        ({"query": "x", "limits": 1}, "limits"),
        ([1, 2], "must be a dict"),
        ("text", "must be a dict"),
        ({1: "x"}, "string keys"),
        ({"query": float("nan")}, "no JSON form"),
        ({"query": object()}, "no JSON form"),
        ({"query": "x" * 9_000_000}, "the limit is"),
    ],
)  # fmt: skip
async def test_a_payload_that_doesnt_fit_says_which_field_and_why(payload: Any, message: str) -> None:
    registry = MemoryRegistry()
    async with ReachClient(handlers=[retrieve], registry=registry) as reach:
        with pytest.raises(InvalidPayload, match=message):
            await reach.call(CAPABILITY, payload)


@pytest.mark.parametrize(
    "keywords",
    [
        {"timeout": 0},
        {"timeout": -1},
        {"timeout": float("inf")},
        {"timeout": "5"},
        {"retry": 3},
        {"metadata": {"a": 1}},
    ],
)
async def test_a_bad_argument_of_call_is_refused_by_name(keywords: Any) -> None:
    async with ReachClient(handlers=[retrieve], registry=MemoryRegistry()) as reach:
        with pytest.raises(ConfigError, match=next(iter(keywords))):
            await reach.call(CAPABILITY, {"query": "x"}, **keywords)


async def test_a_call_outside_async_with_says_what_to_write() -> None:
    reach = ReachClient(registry=MemoryRegistry())
    with pytest.raises(ClientNotOpen, match="async with"):
        await reach.call(CAPABILITY, {})
    with pytest.raises(ClientNotOpen):
        reach.explain(CAPABILITY)
    async with reach:
        with pytest.raises(ClientNotOpen, match="open already"):
            await reach.__aenter__()
    with pytest.raises(ClientNotOpen):
        _ = reach.state


def test_two_event_loops_in_a_row_may_use_one_client() -> None:
    reach = ReachClient("kb-1", handlers=[retrieve], registry=MemoryRegistry())

    async def main() -> str:
        async with reach:
            return (await reach.call(CAPABILITY, {"query": "x"})).agent_id

    assert [asyncio.run(main()), asyncio.run(main())] == ["kb-1", "kb-1"]


async def test_a_second_client_with_the_same_id_is_refused_and_harms_nobody() -> None:
    """R09."""
    registry = MemoryRegistry()
    async with ReachClient("kb-1", handlers=[retrieve], registry=registry) as first:
        with pytest.raises(AgentIdInUse, match="another agent_id"):
            async with ReachClient("kb-1", handlers=[retrieve], registry=registry):
                pass
        assert (await first.call(CAPABILITY, {"query": "x"})).agent_id == "kb-1"
        async with ReachClient(handlers=[retrieve], registry=registry) as other:
            assert other.agent_id != first.agent_id
            assert len(other.agents(CAPABILITY)) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "no registry"),
        ({"registry": "etcd://"}, "etcd"),
        ({"registry": "mysql://x"}, "mysql"),
        ({"registry": "memory://t", "agent_id": "a/b"}, "agent id"),
        ({"registry": "memory://t", "namespace": "../x"}, "namespace"),
        ({"registry": "memory://t", "advertise": "http://0.0.0.0:1"}, "advertise the address"),
        ({"registry": "memory://t", "handlers": [print]}, "register_agent"),
    ],
)
def test_a_bad_argument_of_the_client_is_refused_when_it_is_built(
    arguments: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AGENT_REACH_REGISTRY", raising=False)
    with pytest.raises(ConfigError, match=message):
        ReachClient(**arguments)


async def test_what_is_left_out_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "REGISTRY": "memory://env",
        "NAMESPACE": "prod",
        "AGENT_ID": "kb-7",
        "ZONE": "eu-1/a",
    }.items():
        monkeypatch.setenv(f"AGENT_REACH_{name}", value)
    async with ReachClient(handlers=[retrieve]) as reach:
        (info,) = reach.agents()
    assert (info.agent_id, info.namespace, info.zone) == ("kb-7", "prod", "eu-1/a")


# --- when things break ---------------------------------------------------------------------------------------


async def test_a_dead_instance_is_passed_over_and_the_attempts_tell() -> None:
    registry = MemoryRegistry()
    dead, alive = agent("dead", idempotent=False), agent("alive", idempotent=False)
    put(registry, dead, alive)

    def act(request: DialRequest) -> DialResult:
        return NeverSent("connect", "refused") if dead.endpoint.url in request.url else good(request)

    async with ReachClient(registry=registry, dialer=Script(act)) as reach:
        replies = [await reach.call(CAPABILITY) for _ in range(20)]
    assert {reply.agent_id for reply in replies} == {"alive"}
    assert any(len(reply.attempts) == 2 for reply in replies)


async def test_a_lost_answer_of_a_non_idempotent_call_is_not_repeated() -> None:
    registry = MemoryRegistry()
    put(registry, agent("a", idempotent=False), agent("b", idempotent=False))
    script = Script(lambda request: MaybeExecuted("connection reset"))
    async with ReachClient(registry=registry, dialer=script) as reach:
        with pytest.raises(OutcomeUnknown, match="isn't idempotent, so it was not repeated"):
            await reach.call(CAPABILITY)
    assert len(script.requests) == 1


async def test_a_repeat_keeps_its_request_id_and_counts_its_attempts() -> None:
    import json

    clock = ManualClock()
    registry = MemoryRegistry(clock)
    put(registry, agent("a"), agent("b"))
    script = Script(lambda request: MaybeExecuted("reset"))
    async with ReachClient(registry=registry, dialer=script) as reach:
        call = asyncio.ensure_future(reach.call(CAPABILITY))
        await clock.advance(10)
        with pytest.raises(NoHealthyAgent):
            await call
    sent = [json.loads(request.body) for request in script.requests]
    assert len({envelope["request_id"] for envelope in sent}) == 1
    # Of two retries one went along with the first attempt; its answer was lost, so it must count as spent.
    assert [envelope["attempt"] for envelope in sent] == [1, 2]
    assert [envelope["retry_allowance"] for envelope in sent] == [1, 0]
    assert len({envelope["target_agent"] for envelope in sent[:2]}) == 2


async def test_a_breaker_that_opens_is_told_logged_and_explained() -> None:
    registry, seen = MemoryRegistry(), Seen()
    put(registry, agent("bad"), agent("well"))
    bad = agent("bad").endpoint.url

    def act(request: DialRequest) -> DialResult:
        return MaybeExecuted("reset") if request.url.startswith(bad) else good(request)

    async with ReachClient(registry=registry, dialer=Script(act), observers=[seen]) as reach:
        for _ in range(5):
            with pytest.raises(NoHealthyAgent):
                await reach.call(CAPABILITY, agent_id="bad", retry=RetryConfig(max_attempts=1))
        (opened,) = seen.of(BreakerChanged)
        assert (opened.agent_id, opened.before, opened.after) == ("bad", "closed", "open")
        assert 15 <= opened.retry_in_s <= 30
        explanation = reach.explain(CAPABILITY)
        assert "1 of 2 instances usable" in str(explanation)
        assert "shut out, breaker open: 5 failures in a row, for" in str(explanation)
        assert explanation.risk is Risk.MEDIUM
        route = await reach.resolve(CAPABILITY)
        assert [view.agent_id for view in route.candidates] == ["well"]
        assert (await reach.call(route)).agent_id == "well"


async def test_cancelling_a_call_ends_it_at_once_releases_every_permit_and_repeats_nothing() -> None:
    registry, seen = MemoryRegistry(), Seen()
    put(registry, agent("a"), agent("b"))
    ended = 0

    async def hang() -> DialResult:
        nonlocal ended
        try:
            await asyncio.Event().wait()
        finally:
            ended += 1
        raise AssertionError("never")

    script = Script(lambda request: hang())
    async with ReachClient(registry=registry, dialer=script, observers=[seen]) as reach:
        calls = [asyncio.ensure_future(reach.call(CAPABILITY)) for _ in range(10)]
        await _until(lambda: len(script.requests) == 10)
        instances = reach._knowledge.index.instances.values()
        assert sum(instance.in_flight for instance in instances) == 10
        for call in calls:
            call.cancel()
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        assert all(isinstance(outcome, asyncio.CancelledError) for outcome in outcomes)
        assert sum(instance.in_flight for instance in instances) == 0
        assert all(instance.breaker.counts(1e9) == (0, 0) for instance in instances)
    assert (len(script.requests), ended) == (10, 10)
    assert {event.outcome for event in seen.of(CallEnded)} == {"Cancelled"}


async def test_a_reply_that_isnt_json_is_an_invalid_reply() -> None:
    registry = MemoryRegistry()
    put(registry, agent("a", idempotent=False))
    script = Script(lambda request: Answer(200, {}, b"<html>hello</html>"))
    async with ReachClient(registry=registry, dialer=script) as reach:
        with pytest.raises(InvalidReply, match="a answered .* with something unreadable: HTTP 200: not JSON"):
            await reach.call(CAPABILITY)


async def test_a_result_that_breaks_its_own_contract_is_an_invalid_reply_and_names_the_field() -> None:
    @register_agent("wrong.result.v1")
    async def wrong() -> dict[str, int]:
        return {"count": "many"}  # type: ignore[dict-item]

    async with ReachClient("kb-1", handlers=[wrong], registry=MemoryRegistry()) as reach:
        with pytest.raises(InvalidReply, match="kb-1 could not encode the answer .*count"):
            await reach.call("wrong.result.v1")


async def test_a_nested_error_is_the_handlers_own_failure_to_its_caller() -> None:
    """The caller's payload was fine: it must not be told that it was not."""
    registry = MemoryRegistry()
    async with ReachClient("inner", handlers=[retrieve], registry=registry) as inner:

        @register_agent("outer.ask.v1")
        async def ask() -> Any:
            return (await inner.call(CAPABILITY, {"query": 7})).data

        async with ReachClient("outer", handlers=[ask], registry=registry):
            with pytest.raises(RemoteError, match="query: Input should be a valid string") as caught:
                await inner.call("outer.ask.v1")
    assert caught.value.remote_type == "InvalidPayload"


async def test_no_payload_and_no_answer_ever_appears_in_a_call_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with ReachClient(handlers=[retrieve, fails], registry=MemoryRegistry()) as reach:
        await reach.call(CAPABILITY, {"query": "hunter2"}, metadata={"key": "hunter2"})
        with pytest.raises(RemoteError):
            await reach.call("always.fails.v1", {"secret": "hunter2"})
        with pytest.raises(InvalidPayload):
            await reach.call(CAPABILITY, {"query": "x", "limit": "hunter2"})
    lines = [record.getMessage() for record in caplog.records if record.name.startswith("agent_reach")]
    assert len([line for line in lines if line.startswith(("call ", "served "))]) == 6
    assert not [line for line in lines if "hunter2" in line]


async def test_a_fallback_is_asked_when_all_else_failed_but_not_about_the_callers_own_mistakes() -> None:
    async with ReachClient(registry=MemoryRegistry()) as reach:
        reply = await reach.call(CAPABILITY, fallback=lambda error: [type(error).__name__])
        assert (reply.data, reply.from_fallback, reply.agent_id) == (["AgentNotFound"], True, "")

        async def later(error: Exception) -> str:
            return "later"

        assert (await reach.call(CAPABILITY, fallback=later)).data == "later"
        with pytest.raises(InvalidPayload):
            await reach.call(CAPABILITY, {"x": float("inf")}, fallback=later)


async def test_an_observer_that_fails_fails_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        def on_event(self, event: Event) -> None:
            raise ValueError("observer bug")

    seen = Seen()
    async with ReachClient(handlers=[retrieve], registry=MemoryRegistry(), observers=[Broken(), seen]) as reach:
        await reach.call(CAPABILITY, {"query": "x"})
    assert seen.of(CallEnded)
    assert "observer bug" in caplog.text


# --- the registry away ---------------------------------------------------------------------------------------


async def test_calls_go_on_while_the_registry_is_down_and_say_that_they_are_stale() -> None:
    clock = ManualClock()
    registry = MemoryRegistry(clock)
    put(registry, agent("a"))
    async with ReachClient(registry=registry, dialer=Script(good)) as reach:
        await clock.advance(1)
        assert not (await reach.call(CAPABILITY)).stale
        registry.down("etcd is stopped")
        await clock.advance(60)
        reply = await reach.call(CAPABILITY)
        assert reply.stale
        assert (reach.state.registry, reach.state.connected) == ("stale", False)
        assert "etcd is stopped" in str(reach.state.registry_error)
        assert "stale" in str(reach.explain(CAPABILITY))
        await clock.advance(1000)
        with pytest.raises(RegistryUnavailable, match="etcd is stopped"):
            await reach.call(CAPABILITY)
        registry.up()
        await clock.advance(5)
        assert not (await reach.call(CAPABILITY)).stale


async def test_a_registry_that_isnt_there_at_start_is_named_and_waited_for() -> None:
    clock = ManualClock()
    registry = MemoryRegistry(clock)
    put(registry, agent("a"))
    registry.down("connection refused")
    async with ReachClient(registry=registry, dialer=Script(good)) as reach:
        failing = asyncio.ensure_future(reach.call(CAPABILITY))
        await clock.advance(6)
        with pytest.raises(RegistryUnavailable, match=r"memory://local.*connection refused") as caught:
            await failing
        assert caught.value.capability == CAPABILITY
        waiting = asyncio.ensure_future(reach.call(CAPABILITY))
        await clock.advance(1)
        registry.up()
        await clock.advance(3)
        assert (await waiting).agent_id == "a"


async def test_a_registry_that_isnt_there_fails_the_start_where_that_was_asked_for() -> None:
    clock = ManualClock()
    registry = MemoryRegistry(clock)
    registry.down("connection refused")
    config = ReachConfig(registry=RegistryConfig(on_unavailable="fail"))
    reach = ReachClient(registry=registry, config=config)
    opening = asyncio.ensure_future(reach.__aenter__())
    await clock.advance(6)
    with pytest.raises(RegistryUnavailable, match="connection refused"):
        await opening
    assert "closed" in repr(reach)


async def test_wait_for_returns_as_soon_as_there_is_one_and_names_what_is_missing() -> None:
    clock = ManualClock()
    registry = MemoryRegistry(clock)
    async with ReachClient(registry=registry) as reach:
        waiting = asyncio.ensure_future(reach.wait_for(CAPABILITY, timeout=10))
        await clock.advance(5)
        assert not waiting.done()
        put(registry, agent("a"))
        await clock.settle()
        assert [info.agent_id for info in await waiting] == ["a"]
        missing = asyncio.ensure_future(reach.wait_for("other.thing.v1", timeout=10))
        await clock.advance(11)
        with pytest.raises(AgentNotFound, match="other"):
            await missing


# --- contracts, knowledge, imports ---------------------------------------------------------------------------


async def test_two_contracts_under_one_name_are_warned_of_or_refused_as_set() -> None:
    @register_agent(CAPABILITY)
    async def other(question: int) -> str:
        return ""

    registry, seen = MemoryRegistry(), Seen()
    async with ReachClient("kb-1", handlers=[retrieve], registry=registry):
        async with ReachClient("kb-2", handlers=[other], registry=registry, observers=[seen]):
            (clash,) = seen.of(ContractClash)
            assert (clash.agent_id, clash.other_agent_id) == ("kb-2", "kb-1")
        strict = ReachConfig(registry=RegistryConfig(schema_policy="refuse"))
        with pytest.raises(SchemaConflict, match="give the new contract a new major version, or set"):
            async with ReachClient("kb-3", handlers=[other], registry=registry, config=strict):
                pass


def test_every_public_name_is_there_and_no_other() -> None:
    import agent_reach

    assert set(agent_reach._HOMES) | {"__version__"} == set(agent_reach.__all__)
    for name in agent_reach.__all__:
        assert getattr(agent_reach, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = agent_reach.nonsense


def test_importing_the_package_loads_neither_grpc_nor_uvicorn() -> None:
    code = (
        "import sys, agent_reach; print([m for m in ('grpc', 'pyetcd', 'uvicorn', 'fastapi') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert out.stdout.strip() == "[]"


# --- open, closed, and elsewhere -----------------------------------------------------------------------------


async def test_a_cancelled_close_is_finished_all_the_same_and_may_be_repeated() -> None:
    clock = ManualClock()
    registry = MemoryRegistry(clock)
    reach = ReachClient("kb-1", handlers=[retrieve], registry=registry)
    await reach.__aenter__()
    closing = asyncio.ensure_future(reach.aclose())
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    await reach.aclose()
    assert registry.apps == {}
    assert registry.list("default").records == ()
    async with reach:
        assert (await reach.call(CAPABILITY, {"query": "x"})).agent_id == "kb-1"


async def test_whoever_waits_while_the_client_is_closed_is_told_at_once() -> None:
    registry = MemoryRegistry(ManualClock())
    reach = ReachClient(registry=registry)
    await reach.__aenter__()
    waiting = asyncio.ensure_future(reach.wait_for("other.thing.v1", timeout=1000))
    await asyncio.sleep(0)
    await reach.aclose()
    with pytest.raises(ClientNotOpen, match="closed meanwhile"):
        await waiting


@pytest.mark.parametrize(("idempotent", "expected"), [(True, ClientNotOpen), (False, OutcomeUnknown)])
async def test_calls_that_run_while_the_client_is_closed_are_told_the_truth(
    idempotent: bool, expected: type[Exception]
) -> None:
    registry, closed = MemoryRegistry(), asyncio.Event()
    put(registry, agent("a", idempotent=idempotent))

    async def cut() -> DialResult:
        await closed.wait()
        return MaybeExecuted("connection closed")

    script = Script(lambda request: cut())
    reach = ReachClient(registry=registry, dialer=script)
    await reach.__aenter__()
    call = asyncio.ensure_future(reach.call(CAPABILITY))
    await _until(lambda: len(script.requests) == 1)
    await reach.aclose()
    closed.set()
    with pytest.raises(expected):
        await call


async def test_a_client_is_of_no_use_on_a_second_event_loop() -> None:
    async with ReachClient(handlers=[retrieve], registry=MemoryRegistry()) as reach:

        async def elsewhere() -> None:
            await reach.call(CAPABILITY, {"query": "x"})

        def run() -> None:
            with pytest.raises(ClientNotOpen, match="another process, event loop or thread"):
                asyncio.run(elsewhere())
            with pytest.raises(ClientNotOpen, match="another process, event loop or thread"):
                _ = reach.state

        await asyncio.to_thread(run)


async def test_closing_while_opening_leaves_nothing_behind() -> None:
    for turns in range(40):
        registry = MemoryRegistry(ManualClock())
        reach = ReachClient("kb-1", handlers=[retrieve], registry=registry)
        opening = asyncio.ensure_future(reach.__aenter__())
        for _ in range(turns):
            await asyncio.sleep(0)
        await reach.aclose()
        await asyncio.gather(opening, return_exceptions=True)
        await reach.aclose()
        assert registry.apps == {}, turns
        assert registry.list("default").records == (), turns


async def test_a_client_that_is_opened_again_learns_anew_though_the_store_began_anew() -> None:
    registry = MemoryRegistry()
    put(registry, *(agent(f"a{n}") for n in range(5)))
    reach = ReachClient(registry=registry, dialer=Script(good))
    async with reach:
        assert len(reach.agents()) == 5
    registry.wipe()
    put(registry, agent("b"))
    async with reach:
        assert [info.agent_id for info in reach.agents()] == ["b"]


async def test_each_caller_is_given_an_error_of_its_own() -> None:
    registry = MemoryRegistry(ManualClock())
    registry.fail_next("list", Unauthorized("who are you?"), times=100)
    async with ReachClient(registry=registry) as reach:
        names = [f"a.b.v{n}" for n in range(3)]
        calls = [reach.call(name) for name in names]
        errors = await asyncio.gather(*calls, return_exceptions=True)
    assert [error.capability for error in errors if isinstance(error, Unauthorized)] == names


async def test_each_opening_is_a_new_incarnation() -> None:
    reach = ReachClient("kb-1", handlers=[retrieve], registry=MemoryRegistry())
    seen = set()
    for _ in range(2):
        async with reach:
            seen.add(reach.agents()[0].incarnation)
    assert len(seen) == 2


# --- what a peer may not do to us ----------------------------------------------------------------------------


def error_answer(request: DialRequest, status: int = 503, **changes: Any) -> Answer:
    import json

    sent = json.loads(request.body)
    error = {"type": "Overloaded", "message": "full", "retryable": True, "executed": False}
    body = {"code": status, "response_to": sent["request_id"], "agent_id": sent["target_agent"], "error": error}
    error |= changes.pop("error", {})
    return Answer(status, changes.pop("headers", {}), json.dumps(body | changes).encode())


@pytest.mark.parametrize("changes", [{"response_to": "other"}, {"agent_id": "stranger"}])
async def test_an_error_meant_for_somebody_else_promises_nothing(changes: dict[str, Any]) -> None:
    """`executed: false` of a stranger must not send what isn't idempotent a second time."""
    registry = MemoryRegistry()
    put(registry, agent("a", idempotent=False), agent("b", idempotent=False))
    script = Script(lambda request: error_answer(request, **changes))
    async with ReachClient(registry=registry, dialer=script) as reach:
        with pytest.raises(InvalidReply, match="not what was asked"):
            await reach.call(CAPABILITY)
    assert len(script.requests) == 1


@pytest.mark.parametrize("ms", [10**15, 10**400])
async def test_no_retry_after_is_believed_for_longer_than_a_minute(ms: int) -> None:
    clock = ManualClock()
    registry = MemoryRegistry(clock)
    put(registry, agent("a"))
    answers = [lambda request: error_answer(request, error={"retry_after_ms": ms}), good]
    script = Script(lambda request: answers.pop(0)(request))
    async with ReachClient(registry=registry, dialer=script) as reach:
        call = asyncio.ensure_future(reach.call(CAPABILITY))
        await clock.advance(1)
        with pytest.raises(Overloaded) as caught:
            await call
        assert caught.value.retry_after_s == pytest.approx(60, abs=1)
        await clock.advance(60)
        assert (await reach.call(CAPABILITY)).data == "fine"


async def test_a_bare_503_with_retry_after_is_waited_for() -> None:
    """T05 names it."""
    clock = ManualClock()
    registry = MemoryRegistry(clock)
    put(registry, agent("a"))
    answers: list[Any] = [lambda request: Answer(503, {"retry-after": "2"}, b"<html>"), good]
    script = Script(lambda request: answers.pop(0)(request))
    async with ReachClient(registry=registry, dialer=script) as reach:
        call = asyncio.ensure_future(reach.call(CAPABILITY))
        await clock.advance(1.9)
        assert len(script.requests) == 1
        await clock.advance(0.2)
        assert (await call).data == "fine"


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (Answer(302, {"location": "http://elsewhere"}, b""), ProtocolError),
        (Answer(500, {}, b"Internal Server Error"), OutcomeUnknown),
        (Answer(502, {}, b""), OutcomeUnknown),
        (Answer(404, {}, b"nginx"), RemoteError),
        (Answer(418, {}, b"teapot"), RemoteError),
    ],
)
async def test_what_a_stranger_at_the_address_answers_is_never_called_a_handlers_failure(
    answer: Answer, expected: type[Exception]
) -> None:
    registry = MemoryRegistry()
    put(registry, agent("a", idempotent=False))
    async with ReachClient(registry=registry, dialer=Script(lambda request: answer)) as reach:
        with pytest.raises(expected):
            await reach.call(CAPABILITY, retry=RetryConfig(max_attempts=1))


async def test_an_answer_that_is_too_large_is_not_asked_for_again() -> None:
    registry = MemoryRegistry()
    put(registry, agent("a"), agent("b"))
    script = Script(lambda request: BadAnswer(200, "the answer is larger than 10 bytes", too_large=True))
    async with ReachClient(registry=registry, dialer=script) as reach:
        with pytest.raises(InvalidReply, match="larger than"):
            await reach.call(CAPABILITY)
    assert len(script.requests) == 1


async def test_a_fault_of_this_process_is_tried_once_and_booked_on_nobody() -> None:
    registry = MemoryRegistry()
    put(registry, *(agent(f"a{n}") for n in range(20)))
    script = Script(lambda request: NeverSent("local", "a header can't be encoded", local=True))
    async with ReachClient(registry=registry, dialer=script) as reach:
        for _ in range(10):
            with pytest.raises(ProtocolError, match="from this process"):
                await reach.call(CAPABILITY)
        assert len(script.requests) == 10
        assert "20 of 20 instances usable" in str(reach.explain(CAPABILITY))


@pytest.mark.parametrize(
    "keywords",
    [{"response_model": object()}, {"response_model": "Nope"}, {"fallback": 5}, {"metadata": ["x"]}],
)
async def test_an_argument_of_the_wrong_kind_is_refused_before_anything_is_sent(keywords: dict[str, Any]) -> None:
    registry = MemoryRegistry()
    put(registry, agent("a", idempotent=False))
    script = Script(good)
    async with ReachClient(registry=registry, dialer=script) as reach:
        with pytest.raises(ConfigError, match=next(iter(keywords))):
            await reach.call(CAPABILITY, **keywords)
    assert script.requests == []


async def test_a_payload_that_fails_to_serialise_itself_is_an_invalid_payload() -> None:
    class Odd(BaseModel):
        value: Any

    class Raising(dict[str, Any]):
        def keys(self) -> Any:
            raise RuntimeError("no keys today")

        def __iter__(self) -> Any:
            raise RuntimeError("no keys today")

    async with ReachClient(handlers=[retrieve], registry=MemoryRegistry()) as reach:
        for payload in (Odd(value=object()), Odd(value=b"\xff"), Raising(a=1)):
            with pytest.raises(InvalidPayload, match="no JSON form"):
                await reach.call(CAPABILITY, payload)


@pytest.mark.parametrize(
    "keywords",
    [{"metadata": {"a": "\ud800"}}, {"idempotency_key": "\ud800"}, {"context_id": "x" * 300}, {"timeout": 1e306}],
)
async def test_text_that_cannot_be_sent_is_refused_by_name(keywords: dict[str, Any]) -> None:
    async with ReachClient(handlers=[retrieve], registry=MemoryRegistry()) as reach:
        with pytest.raises(ConfigError, match=next(iter(keywords))):
            await reach.call(CAPABILITY, {"query": "x"}, **keywords)


# --- load ----------------------------------------------------------------------------------------------------


async def test_a_burst_on_a_small_agent_waits_for_places_and_loses_nothing() -> None:
    """500 calls at once, ten at a time: more than ten and their queue would be refused, and a refusal costs."""

    @register_agent("small.work.v1", max_concurrency=10)
    async def work() -> str:
        await asyncio.sleep(0.001)
        return "done"

    registry = MemoryRegistry()
    async with ReachClient(handlers=[work], registry=registry) as reach:
        replies = await asyncio.gather(*(reach.call("small.work.v1", timeout=5) for _ in range(500)))
    assert {reply.data for reply in replies} == {"done"}
    assert {len(reply.attempts) for reply in replies} == {1}


async def test_calls_that_wait_come_before_those_that_come_later() -> None:
    """Loops that call again and again never starve who has been waiting: first come first served."""
    clock = ManualClock()
    registry = MemoryRegistry(clock)
    put(registry, agent("a").model_copy(update={"max_concurrency": 1}))
    order: list[str] = []

    async def answer(request: DialRequest) -> Answer:
        await clock.sleep(0.01)
        return good(request)

    async with ReachClient(registry=registry, dialer=Script(answer)) as reach:

        async def one(name: str) -> None:
            await reach.call(CAPABILITY)
            order.append(name)

        async def again() -> None:
            for _ in range(20):
                await one("loop")

        looping = asyncio.ensure_future(again())
        await clock.settle()
        waiting = [asyncio.ensure_future(one("waiting")) for _ in range(3)]
        await clock.advance(1)
        await asyncio.gather(looping, *waiting)
    assert order[:7].count("waiting") == 3


async def test_a_healthy_instance_is_used_as_soon_as_it_has_room_though_another_is_shut_out() -> None:
    clock = ManualClock()
    registry = MemoryRegistry(clock)
    put(registry, agent("a").model_copy(update={"max_concurrency": 1}), agent("b"))
    release = asyncio.Event()

    async def act(request: DialRequest) -> DialResult:
        if b'"target_agent":"b"' in request.body:
            return MaybeExecuted("reset")
        await release.wait()
        return good(request)

    async with ReachClient(registry=registry, dialer=Script(act)) as reach:
        for _ in range(5):
            with pytest.raises(NoHealthyAgent):
                await reach.call(CAPABILITY, agent_id="b", retry=RetryConfig(max_attempts=1))
        first = asyncio.ensure_future(reach.call(CAPABILITY))
        await clock.settle()
        second = asyncio.ensure_future(reach.call(CAPABILITY, timeout=60))
        await clock.advance(1.5)
        release.set()
        await clock.settle()
        assert first.done()
        assert second.done()


async def test_a_full_capability_leaves_the_others_of_its_agent_alone() -> None:
    clock = ManualClock()
    registry = MemoryRegistry(clock)
    put(registry, agent("a", [CAPABILITY, "other.thing.v1"]))
    full = {"retry_after_ms": 20_000}

    def act(request: DialRequest) -> Answer:
        return good(request) if b"other.thing.v1" in request.body else error_answer(request, error=full)

    async with ReachClient(registry=registry, dialer=Script(act)) as reach:
        call = asyncio.ensure_future(reach.call(CAPABILITY, timeout=1))
        await clock.advance(1)
        with pytest.raises(Overloaded):
            await call
        assert (await reach.call("other.thing.v1")).data == "fine"
        assert "overloaded, for 19" in str(reach.explain(CAPABILITY))


async def test_a_call_refused_locally_has_its_line_too() -> None:
    seen = Seen()
    async with ReachClient(registry=MemoryRegistry(), observers=[seen]) as reach:
        with pytest.raises(InvalidPayload):
            await reach.call(CAPABILITY, {"x": float("nan")})
    assert [event.outcome for event in seen.of(CallEnded)] == ["InvalidPayload"]


async def test_a_chain_of_agents_over_a_failing_leaf_runs_it_three_times_at_the_most() -> None:
    """T05 on real handlers: every hop retries by its own rules, out of one purse."""
    registry, runs = MemoryRegistry(), 0

    @register_agent("chain.leaf.v1", idempotent=True)
    async def leaf() -> None:
        nonlocal runs
        runs += 1
        raise ValueError("down")

    config = ReachConfig(retry=RetryConfig(budget_least=100))
    async with (
        ReachClient("me", registry=registry, config=config) as reach,
        contextlib.AsyncExitStack() as agents,
    ):

        def hop(name: str, below: str) -> Any:
            @register_agent(name, idempotent=True)
            async def forward() -> Any:
                return (await reach.call(below)).data

            return forward

        hops = [hop("chain.b.v1", "chain.leaf.v1"), hop("chain.a.v1", "chain.b.v1")]
        for _ in range(2):
            for handler in (leaf, *hops):
                await agents.enter_async_context(ReachClient(handlers=[handler], registry=registry))
        for root in ("chain.leaf.v1", "chain.b.v1", "chain.a.v1"):
            runs = 0
            with pytest.raises(RemoteError):
                await reach.call(root)
            assert runs == 3


async def test_a_failing_leaf_is_passed_over_however_deep_it_lies() -> None:
    registry = MemoryRegistry()
    async with ReachClient("me", registry=registry) as reach, contextlib.AsyncExitStack() as agents:

        def leaf(works: bool) -> Any:
            @register_agent("deep.leaf.v1", idempotent=True)
            async def run() -> str:
                if not works:
                    raise ValueError("down")
                return "fine"

            return run

        def hop(name: str, below: str) -> Any:
            @register_agent(name, idempotent=True)
            async def forward() -> Any:
                return (await reach.call(below)).data

            return forward

        names = ["deep.leaf.v1", *(f"deep.hop{n}.v1" for n in range(1, 5))]
        hops = [hop(above, below) for below, above in itertools.pairwise(names)]
        for handler in (leaf(True), leaf(False), *hops):
            await agents.enter_async_context(ReachClient(handlers=[handler], registry=registry))
        for name in names:
            assert (await reach.call(name)).data == "fine", name


async def test_an_agent_changes_what_it_says_of_itself_and_keeps_its_entry() -> None:
    registry = MemoryRegistry()
    async with (
        ReachClient("kb", handlers=[echo_context], registry=registry) as kb,
        ReachClient("caller", registry=registry) as caller,
    ):
        await caller.wait_for("echo.context.v1", 5)
        (before,) = registry.list("default").records
        await kb.update(metadata={"model": "large"}, weight=2)
        (after,) = registry.list("default").records
        assert after.lease == before.lease
        await eventually(
            lambda: [(dict(a.metadata), a.weight) for a in caller.agents()] == [({"model": "large"}, 2.0)]
        )
        await kb.update(weight=3)
        await eventually(lambda: caller.agents()[0].weight == 3.0)
        assert caller.agents()[0].metadata == {"model": "large"}, "what isn't given stays"
        for bad in (
            {"weight": 0},
            {"weight": float("nan")},
            {"metadata": {"a": 1}},
            {"metadata": {"a": "x" * 20_000}},
        ):
            with pytest.raises(ConfigError, match="the entry can't be changed so"):
                await kb.update(**bad)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="nothing to serve"):
            await caller.update(weight=2)
