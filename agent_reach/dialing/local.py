"""The dialer for agents in this very process: calls their ASGI app, no sockets."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from agent_reach.dialing.encoding import refuse_encoding
from agent_reach.ports import Answer, BadAnswer, DialRequest, DialResult, MaybeExecuted, NeverSent

__all__ = ["LocalDialer"]


class LocalDialer:
    """Implements the `Dialer` port for `local://AGENT_ID/...` urls.

    `apps` maps `local://AGENT_ID` to an ASGI 3 app; it is looked at on every call, so agents may come and go.
    An app meets what a network would show it: its own context variables, a disconnect when the caller is gone,
    and its own event loop, if it has an attribute `loop` that says so. Others run on the caller's.
    """

    def __init__(self, apps: Mapping[str, Any]) -> None:
        self._apps = apps

    async def send(self, request: DialRequest) -> DialResult:
        """POST once and say how far it got; never raises but for cancellation."""
        parts = urlsplit(request.url)
        app = self._apps.get(f"{parts.scheme}://{parts.netloc}")
        if app is None:
            return NeverSent("connect", f"no agent {parts.netloc!r} in this process")
        try:
            scope = _scope(parts.path, parts.query, request.headers)
        except UnicodeEncodeError as error:
            return NeverSent("local", f"a header or the path can't be encoded: {error}", local=True)
        home = getattr(app, "loop", None)
        if home is None or home is asyncio.get_running_loop():
            return await _exchange(app, scope, request)
        return await _on_loop(home, _exchange(app, scope, request), request.timeout_s)

    async def aclose(self) -> None:
        """Nothing to close: the apps belong to their clients."""


async def _exchange(app: Any, scope: Mapping[str, Any], request: DialRequest) -> DialResult:
    """Call `app` on the running loop."""
    exchange = _Exchange(request.body, request.max_reply_bytes)
    # An empty context: what the caller holds in context variables doesn't cross a wire either.
    task = asyncio.get_running_loop().create_task(exchange.run(app, scope), context=contextvars.Context())
    timer = asyncio.ensure_future(asyncio.sleep(request.timeout_s))
    overflow = asyncio.ensure_future(exchange.overflow.wait())
    try:
        await asyncio.wait({task, timer, overflow}, return_when=asyncio.FIRST_COMPLETED)
        return exchange.result(timer_ran_out=not task.done(), timeout_s=request.timeout_s)
    finally:
        exchange.gone.set()
        for waiting in (task, timer, overflow):
            waiting.cancel()


async def _on_loop(
    loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, DialResult], timeout_s: float
) -> DialResult:
    """Do `work` on another thread's event loop; being cancelled here cancels it there."""
    try:
        if not loop.is_running():
            raise RuntimeError("Event loop is not running")
        # Raises as well: the loop may be closed in this very moment.
        future = asyncio.run_coroutine_threadsafe(work, loop)
    except RuntimeError as error:
        work.close()
        return NeverSent("connect", f"the agent's event loop takes no calls: {error}")
    answer = asyncio.wrap_future(future)
    try:
        # Timed on this side as well: that loop may be blocked, or stop before it gets to us.
        await asyncio.wait({answer}, timeout=timeout_s)
        if not answer.done():
            return MaybeExecuted(f"no answer within {timeout_s:g} s", timed_out=True)
        if answer.cancelled():
            return MaybeExecuted("the agent's event loop ended before it answered")
        return answer.result()
    finally:
        if not loop.is_closed():
            answer.cancel()


@dataclass(slots=True)
class _Exchange:
    """One request and what came of it."""

    body: bytes
    max_reply_bytes: int
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    overflow: asyncio.Event = field(default_factory=asyncio.Event)
    delivered: bool = False
    complete: bool = False
    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    reply: bytearray = field(default_factory=bytearray)
    failure: str = "the app ended without an answer"

    async def run(self, app: Any, scope: Mapping[str, Any]) -> None:
        """Call the app; what it raises becomes the result, as a broken connection would."""
        try:
            # Called no earlier than here: a task cancelled before its first step would leave a coroutine behind
            # that nobody awaits.
            await app(scope, self.receive, self.send)
        except Exception as error:  # noqa: BLE001 - the boundary: an app may raise anything
            self.failure = f"{type(error).__name__}: {error}"

    async def receive(self) -> Mapping[str, Any]:
        if not self.delivered:
            self.delivered = True
            return {"type": "http.request", "body": self.body, "more_body": False}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Mapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {
                name.decode("latin-1").lower(): value.decode("latin-1")
                for name, value in message.get("headers", ())
            }
        elif message["type"] == "http.response.body" and not self.overflow.is_set():
            self.reply += message.get("body", b"")
            if len(self.reply) > self.max_reply_bytes:
                self.reply.clear()
                self.overflow.set()
            self.complete = not message.get("more_body", False)

    def result(self, *, timer_ran_out: bool, timeout_s: float) -> DialResult:
        if self.status is None:
            if timer_ran_out:
                return MaybeExecuted(f"no answer within {timeout_s:g} s", timed_out=True)
            return MaybeExecuted(self.failure)
        if self.overflow.is_set():
            return BadAnswer(self.status, f"the answer is larger than {self.max_reply_bytes} bytes", too_large=True)
        if not self.complete:
            if timer_ran_out:
                return MaybeExecuted(f"no complete answer within {timeout_s:g} s", timed_out=True)
            return BadAnswer(self.status, f"the answer is cut off: {self.failure}")
        refused = refuse_encoding(self.status, self.headers)
        return refused or Answer(self.status, self.headers, bytes(self.reply))


def _scope(path: str, query: str, headers: Mapping[str, str]) -> dict[str, Any]:
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode("ascii"),
        "query_string": query.encode("ascii"),
        "root_path": "",
        "headers": [
            (name.lower().encode("latin-1"), value.encode("latin-1"))
            for name, value in {**headers, "accept-encoding": "identity"}.items()
        ],
        "client": None,
        "server": None,
    }
