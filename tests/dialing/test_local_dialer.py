"""What is special about calling an agent in the same process."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any

import pytest

from agent_reach import MemoryRegistry, SyncReachClient, register_agent
from agent_reach.dialing.local import LocalDialer
from agent_reach.ports import Answer, BadAnswer, DialRequest, MaybeExecuted, NeverSent

marker: ContextVar[str] = ContextVar("marker", default="unset")


def dial(url: str = "local://kb-1/invoke", *, timeout_s: float = 5.0) -> DialRequest:
    return DialRequest(url, {}, b"{}", timeout_s, 1.0, 1024)


async def _answer(send: Any, body: bytes = b"{}") -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": body})


@pytest.fixture
async def deaf() -> tuple[Any, asyncio.Event, asyncio.Event]:
    """An app that never looks whether its caller is still there."""
    entered, cancelled = asyncio.Event(), asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        entered.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    return app, entered, cancelled


async def test_a_timeout_cancels_an_app_that_does_not_listen_for_disconnects(deaf: Any) -> None:
    app, _, cancelled = deaf
    result = await LocalDialer({"local://kb-1": app}).send(dial(timeout_s=0.05))
    assert isinstance(result, MaybeExecuted)
    await asyncio.wait_for(cancelled.wait(), 5)


async def test_cancellation_cancels_it_too(deaf: Any) -> None:
    app, entered, cancelled = deaf
    task = asyncio.ensure_future(LocalDialer({"local://kb-1": app}).send(dial()))
    await entered.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.wait_for(cancelled.wait(), 5)


async def test_agents_may_come_and_go_and_their_ids_keep_their_case() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await _answer(send)

    apps: dict[str, Any] = {}
    dialer = LocalDialer(apps)
    assert isinstance(await dialer.send(dial("local://KB-1/invoke")), NeverSent)
    apps["local://KB-1"] = app
    assert isinstance(await dialer.send(dial("local://KB-1/invoke")), Answer)
    assert isinstance(await dialer.send(dial("local://kb-1/invoke")), NeverSent)
    apps.clear()
    assert isinstance(await dialer.send(dial("local://KB-1/invoke")), NeverSent)


async def test_the_callers_context_variables_do_not_cross() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await _answer(send, marker.get().encode())

    token = marker.set("of the caller")
    try:
        result = await LocalDialer({"local://kb-1": app}).send(dial())
    finally:
        marker.reset(token)
    assert isinstance(result, Answer)
    assert result.body == b"unset"


async def test_an_app_that_breaks_after_the_head_has_cut_its_answer_off() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise ValueError("midway")

    result = await LocalDialer({"local://kb-1": app}).send(dial())
    assert result == BadAnswer(200, "the answer is cut off: ValueError: midway")


async def test_an_app_that_raises_when_it_is_called_is_a_broken_connection() -> None:
    def app(scope: Any, receive: Any, send: Any) -> None:
        raise ValueError("at once")

    assert await LocalDialer({"local://kb-1": app}).send(dial()) == MaybeExecuted("ValueError: at once")


async def test_a_call_cancelled_before_the_app_began_leaves_nothing_unawaited() -> None:
    """As at the end of a loop, which cancels every task, in whatever state."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await _answer(send)

    before = asyncio.all_tasks()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sending = asyncio.ensure_future(LocalDialer({"local://kb-1": app}).send(dial()))
        await asyncio.sleep(0)  # the exchange has begun, its app hasn't
        for task in asyncio.all_tasks() - before:
            task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
        del sending, task
        gc.collect()
    assert [str(warning.message) for warning in caught] == []


# --- an agent on another event loop -----------------------------------------------------------------------


class OtherLoop:
    """An event loop that runs in a thread of its own."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(timeout=5)


@pytest.fixture
def other() -> Iterator[OtherLoop]:
    other = OtherLoop()
    yield other
    if other.loop.is_running():
        other.stop()
    for task in asyncio.all_tasks(other.loop):
        task.cancel()
    if not other.loop.is_closed():
        other.loop.run_until_complete(asyncio.sleep(0))
        other.loop.close()


class Homed:
    """An app that belongs to a loop; `lets` is what it does before it answers."""

    def __init__(self, loop: asyncio.AbstractEventLoop, lets: Callable[[], Any]) -> None:
        self.loop = loop
        self.lets = lets
        self.entered, self.cancelled = threading.Event(), threading.Event()
        self.heard: list[Any] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.heard += [asyncio.get_running_loop(), (await receive())["body"], marker.get()]
        self.entered.set()
        try:
            await self.lets()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        await _answer(send, b"[1]")


async def _nothing() -> None: ...


async def _for_ever() -> None:
    await asyncio.Event().wait()


async def in_thread(wait: threading.Event) -> None:
    assert await asyncio.to_thread(wait.wait, 5)


async def test_an_app_runs_on_the_loop_it_belongs_to(other: OtherLoop) -> None:
    app = Homed(other.loop, _nothing)
    token = marker.set("of the caller")
    try:
        result = await LocalDialer({"local://kb-1": app}).send(dial())
    finally:
        marker.reset(token)
    assert result == Answer(200, {}, b"[1]")
    assert app.heard == [other.loop, b"{}", "unset"]


async def test_cancellation_crosses_to_the_other_loop(other: OtherLoop) -> None:
    app = Homed(other.loop, _for_ever)
    task = asyncio.ensure_future(LocalDialer({"local://kb-1": app}).send(dial()))
    await in_thread(app.entered)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await in_thread(app.cancelled)


async def test_a_timeout_crosses_to_the_other_loop(other: OtherLoop) -> None:
    app = Homed(other.loop, _for_ever)
    result = await LocalDialer({"local://kb-1": app}).send(dial(timeout_s=0.05))
    assert result == MaybeExecuted("no answer within 0.05 s", timed_out=True)
    await in_thread(app.cancelled)


async def test_a_blocked_loop_does_not_hold_its_callers_up(other: OtherLoop) -> None:
    go = threading.Event()
    other.loop.call_soon_threadsafe(go.wait, 10)
    result = await LocalDialer({"local://kb-1": Homed(other.loop, _nothing)}).send(dial(timeout_s=0.05))
    go.set()
    assert result == MaybeExecuted("no answer within 0.05 s", timed_out=True)


@pytest.mark.parametrize("closed", [True, False])
async def test_a_loop_that_ended_is_a_closed_port(other: OtherLoop, closed: bool) -> None:
    other.stop()
    if closed:
        other.loop.close()
    result = await LocalDialer({"local://kb-1": Homed(other.loop, _nothing)}).send(dial())
    assert isinstance(result, NeverSent)
    assert (result.phase, result.local) == ("connect", False)


async def test_a_loop_that_ends_meanwhile_is_a_lost_answer_and_not_the_callers_cancellation(
    other: OtherLoop,
) -> None:
    app = Homed(other.loop, _for_ever)
    calling = asyncio.ensure_future(LocalDialer({"local://kb-1": app}).send(dial()))
    await in_thread(app.entered)

    def cancel_all() -> None:
        for task in asyncio.all_tasks(other.loop):
            task.cancel()

    other.loop.call_soon_threadsafe(cancel_all)
    assert isinstance(await calling, MaybeExecuted)


def test_an_agent_called_from_the_loops_of_others_keeps_its_limit_and_loses_no_call() -> None:
    running = most = 0

    @register_agent("a.slow.v1", max_concurrency=1, queue=10)
    async def slow() -> str:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.05)
        running -= 1
        return "done"

    registry = MemoryRegistry()
    with (
        SyncReachClient("kb-1", handlers=[slow], registry=registry),
        SyncReachClient("chat-1", registry=registry) as one,
        SyncReachClient("chat-2", registry=registry) as two,
        ThreadPoolExecutor(4) as pool,
    ):
        for client in (one, two):
            client.wait_for("a.slow.v1", timeout=5)
        calls = [pool.submit(client.call, "a.slow.v1", timeout=5.0) for client in (one, two, one, two)]
        assert [call.result(timeout=10).data for call in calls] == ["done"] * 4
    assert most == 1


def test_a_call_given_up_on_another_loop_frees_its_place() -> None:
    entered, cancelled = threading.Event(), threading.Event()

    @register_agent("a.slow.v1", max_concurrency=1, queue=0)
    async def slow(wait: bool) -> str:
        if wait:
            entered.set()
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.set()
        return "done"

    registry = MemoryRegistry()
    with (
        SyncReachClient("kb-1", handlers=[slow], registry=registry),
        SyncReachClient("chat-1", registry=registry) as reach,
    ):
        reach.wait_for("a.slow.v1", timeout=5)
        assert reach._loop is not None
        call = reach._client.call("a.slow.v1", {"wait": True}, timeout=30)
        calling = asyncio.run_coroutine_threadsafe(call, reach._loop)
        assert entered.wait(5)
        calling.cancel()
        assert cancelled.wait(5)
        until = time.monotonic() + 5
        while (loads := one_load(registry)) and time.monotonic() < until:
            time.sleep(0.001)
        assert loads == 0
        assert reach.call("a.slow.v1", {"wait": False}, timeout=5).data == "done"


def one_load(registry: MemoryRegistry) -> int:
    (app,) = registry.apps.values()
    return int(app.in_flight)
