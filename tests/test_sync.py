"""`SyncReachClient`: the same promises without `await`."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from agent_reach import (
    AgentNotFound,
    CallContext,
    ClientNotOpen,
    ConfigError,
    HedgeConfig,
    MemoryRegistry,
    Policy,
    ReachClient,
    ReachError,
    RemoteError,
    RetryConfig,
    SyncReachClient,
    register_agent,
)
from tests.routing.world import CAPABILITY


@register_agent(CAPABILITY, idempotent=True)
def retrieve(query: str) -> str:
    """Find an article, in a thread."""
    return f"{query} on {threading.current_thread().name}"


def test_it_does_what_the_async_client_does() -> None:
    with SyncReachClient("kb-1", handlers=[retrieve], registry=MemoryRegistry()) as reach:
        reply = reach.call(CAPABILITY, {"query": "x"}, response_model=str)
        assert reply.data.startswith("x on reach-")
        assert [info.agent_id for info in reach.wait_for(CAPABILITY, timeout=1)] == ["kb-1"]
        assert reach.agents() == reach.agents(CAPABILITY)
        assert reach.resolve(CAPABILITY).candidates[0].agent_id == "kb-1"
        assert "kb-1" in str(reach.explain(CAPABILITY))
        assert reach.state.registered
        assert reach.agent_id == "kb-1"
        with pytest.raises(AgentNotFound):
            reach.call("other.thing.v1")


def test_conversations_copies_policies_and_decisions_are_those_of_the_async_client() -> None:
    with (
        SyncReachClient("kb-1", handlers=[retrieve], registry="memory://sync-routing") as first,
        SyncReachClient("kb-2", handlers=[retrieve], registry="memory://sync-routing"),
        SyncReachClient("caller", registry="memory://sync-routing") as reach,
    ):
        deadline = time.monotonic() + 10
        while len(reach.agents(CAPABILITY)) < 2:
            assert time.monotonic() < deadline
        route = reach.resolve(CAPABILITY, context_id="conv")
        keywords: dict[str, Any] = {"context_id": "conv", "policy": Policy.TOOL, "hedge": HedgeConfig()}
        told = {reach.call(CAPABILITY, {"query": "x"}, **keywords).agent_id for _ in range(10)}
        assert told == {route.owner}
        assert {decision.rule for decision in reach.decisions(CAPABILITY)} == {"affinity"}
        assert reach.call(CAPABILITY, {"query": "x"}, strategy="round_robin").agent_id in ("kb-1", "kb-2")
        assert reach.decisions()[-1].rule == "round_robin"
        assert len(reach.decisions()) == 11
        assert first.decisions() == ()
        with pytest.raises(ConfigError, match="require_context"):
            reach.call(CAPABILITY, {"query": "x"}, require_context=True)


def test_fan_out_asks_several_and_returns_their_outcomes() -> None:
    @register_agent("always.fails.v1")
    def fails() -> None:
        raise ValueError("no")

    with (
        SyncReachClient("kb-1", handlers=[retrieve, fails], registry="memory://sync-fan-out"),
        SyncReachClient("kb-2", handlers=[retrieve], registry="memory://sync-fan-out"),
        SyncReachClient("caller", registry="memory://sync-fan-out") as reach,
    ):
        deadline = time.monotonic() + 10
        while len(reach.agents(CAPABILITY)) < 2:
            assert time.monotonic() < deadline
        outcomes = reach.fan_out(CAPABILITY, {"query": "x"}, 5, response_model=str)
        assert sorted(outcome.agent_id for outcome in outcomes) == ["kb-1", "kb-2"]
        assert all(outcome.reply is not None and outcome.reply.data.startswith("x on") for outcome in outcomes)
        (failed,) = reach.fan_out("always.fails.v1", timeout=2, retry=RetryConfig(max_attempts=1))
        assert (failed.ok, failed.agent_id, type(failed.error)) == (False, "kb-1", RemoteError)
        with pytest.raises(ConfigError, match="n=0"):
            reach.fan_out(CAPABILITY, {"query": "x"}, 0)
        with pytest.raises(AgentNotFound):
            reach.fan_out("nobody.offers.v1")


def test_outside_with_it_says_what_to_write_and_it_ends_its_thread() -> None:
    reach = SyncReachClient(registry=MemoryRegistry())
    with pytest.raises(ClientNotOpen, match="with SyncReachClient"):
        reach.call(CAPABILITY)
    before = threading.active_count()
    with reach:
        assert threading.active_count() == before + 1
    assert threading.active_count() == before
    reach.close()
    with pytest.raises(ClientNotOpen):
        _ = reach.state


def test_many_threads_may_call_at_once() -> None:
    with (
        SyncReachClient(handlers=[retrieve], registry=MemoryRegistry()) as reach,
        ThreadPoolExecutor(16) as pool,
    ):
        replies = list(pool.map(lambda n: reach.call(CAPABILITY, {"query": f"q{n}"}).data, range(100)))
    assert [text.split()[0] for text in replies] == [f"q{n}" for n in range(100)]


async def test_a_sync_handler_carries_the_call_on_through_a_sync_client() -> None:
    registry = MemoryRegistry()
    seen: list[CallContext] = []

    @register_agent("inner.see.v1")
    async def see(ctx: CallContext) -> None:
        seen.append(ctx)

    with SyncReachClient("bridge", registry="memory://sync-bridge") as bridge:
        async with ReachClient("inner", handlers=[see], registry="memory://sync-bridge"):

            @register_agent("outer.ask.v1")
            def ask(ctx: CallContext) -> str:
                seen.append(ctx)
                bridge.call("inner.see.v1")
                return "done"

            async with ReachClient("outer", handlers=[ask], registry=registry) as outer:
                await asyncio.to_thread(bridge.wait_for, "inner.see.v1", 5)
                await outer.call("outer.ask.v1")
    first, second = seen
    assert second.trace_id == first.trace_id
    assert (first.hop, second.hop) == (1, 2)


async def test_it_refuses_to_wait_for_itself() -> None:
    with SyncReachClient(registry=MemoryRegistry()) as reach:
        client = reach._client
        caught: list[BaseException] = []

        async def inside() -> None:
            try:
                reach.agents()
            except ReachError as error:
                caught.append(error)

        assert reach._loop is not None
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(inside(), reach._loop))
        assert client.agent_id
    assert "await" in str(caught[0])


def test_after_a_fork_it_says_so_instead_of_hanging() -> None:
    """Its thread stayed with the parent: in the child nothing would ever answer."""
    with SyncReachClient("kb-1", handlers=[retrieve], registry=MemoryRegistry()) as reach:
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                try:
                    reach.call(CAPABILITY, {"query": "x"}, timeout=1)
                    told = "no error"
                except ClientNotOpen as error:
                    told = str(error)
                reach.close()
                os.write(writing, told.encode())
            finally:
                os._exit(0)
        os.close(writing)
        with os.fdopen(reading, "rb") as pipe:
            assert b"before a fork" in pipe.read()
        os.waitpid(child, 0)
        assert reach.call(CAPABILITY, {"query": "x"}).agent_id == "kb-1"


def test_threads_that_call_while_it_is_closed_are_told_so() -> None:
    @register_agent("slow.work.v1")
    async def slow() -> None:
        await asyncio.sleep(30)

    reach = SyncReachClient(handlers=[slow], registry=MemoryRegistry())
    reach.__enter__()
    caught: list[BaseException] = []

    def call() -> None:
        try:
            reach.call("slow.work.v1", timeout=25)
        except ReachError as error:
            caught.append(error)

    threads = [threading.Thread(target=call) for _ in range(5)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 10
    while reach._client._knowledge.index.instances[reach.agent_id].in_flight < 5:
        assert time.monotonic() < deadline
    reach.close()
    for thread in threads:
        thread.join(10)
    assert len(caught) == 5


def test_closing_is_bounded_though_a_handler_ignores_its_cancellation(caplog: pytest.LogCaptureFixture) -> None:
    release = threading.Event()

    @register_agent("deaf.work.v1")
    async def deaf() -> None:
        while not release.is_set():
            try:
                await asyncio.sleep(0.05)
            except asyncio.CancelledError:
                continue

    reach = SyncReachClient(handlers=[deaf], registry=MemoryRegistry())
    reach.__enter__()
    with pytest.raises(ReachError):
        reach.call("deaf.work.v1", timeout=0.1)
    began = time.monotonic()
    reach.close()
    assert time.monotonic() - began < 8
    assert "ignores its cancellation" in caplog.text
    release.set()


def test_any_number_of_threads_may_close_it() -> None:
    for _ in range(20):
        reach = SyncReachClient(registry=MemoryRegistry())
        reach.__enter__()
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda _, reach=reach: reach.close(), range(4)))
