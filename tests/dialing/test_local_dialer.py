"""What is special about calling an agent in the same process."""

from __future__ import annotations

import asyncio
from contextvars import ContextVar
from typing import Any

import pytest

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
