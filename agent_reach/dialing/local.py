"""The dialer for agents in this very process: calls their ASGI app, no sockets."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from agent_reach.ports import Answer, BadAnswer, DialRequest, DialResult, MaybeExecuted, NeverSent

__all__ = ["LocalDialer"]


class LocalDialer:
    """Implements the `Dialer` port for `local://AGENT_ID/...` urls.

    `apps` maps `local://AGENT_ID` to an ASGI 3 app; it is looked at on every call, so agents may come and go.
    An app meets what a network would show it: its own context variables, a disconnect when the caller is gone.
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
        exchange = _Exchange(request.body, request.max_reply_bytes)
        # An empty context: what the caller holds in context variables doesn't cross a wire either.
        task = asyncio.get_running_loop().create_task(
            exchange.run(app(scope, exchange.receive, exchange.send)), context=contextvars.Context()
        )
        timer = asyncio.ensure_future(asyncio.sleep(request.timeout_s))
        overflow = asyncio.ensure_future(exchange.overflow.wait())
        try:
            await asyncio.wait({task, timer, overflow}, return_when=asyncio.FIRST_COMPLETED)
            return exchange.result(timer_ran_out=not task.done(), timeout_s=request.timeout_s)
        finally:
            exchange.gone.set()
            for waiting in (task, timer, overflow):
                waiting.cancel()

    async def aclose(self) -> None:
        """Nothing to close: the apps belong to their clients."""


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

    async def run(self, call: Awaitable[None]) -> None:
        """Run the app; what it raises becomes the result, as a broken connection would."""
        try:
            await call
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
            return BadAnswer(self.status, f"the answer is larger than {self.max_reply_bytes} bytes")
        if not self.complete:
            if timer_ran_out:
                return MaybeExecuted(f"no complete answer within {timeout_s:g} s", timed_out=True)
            return BadAnswer(self.status, f"the answer is cut off: {self.failure}")
        encoding = self.headers.get("content-encoding", "identity").strip().lower()
        if encoding not in ("", "identity"):
            return BadAnswer(
                self.status, f"the answer has content-encoding {encoding!r}; only identity was asked for"
            )
        return Answer(self.status, self.headers, bytes(self.reply))


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
