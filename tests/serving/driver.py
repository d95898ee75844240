"""Drives a `ReachApp` message by message, as an ASGI server would."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from agent_reach.config import ServingConfig
from agent_reach.events import CallServed, Event
from agent_reach.handlers import specs_of
from agent_reach.serving.asgi import ReachApp
from agent_reach.testing import ManualClock

JSON = {"content-type": "application/json"}


def envelope(capability: str = "a.echo.v1", payload: Any = None, **changes: Any) -> dict[str, Any]:
    return {
        "protocol": "reach/1",
        "request_id": "r-1",
        "trace_id": "ab" * 16,
        "from_agent": "chat-1",
        "namespace": "prod",
        "target_capability": capability,
        "target_agent": "kb-1",
        "payload": {} if payload is None else payload,
        "timestamp": 1.0,
        "ttl_ms": 5000,
    } | changes


@dataclass
class Answered:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        return dict(self.json["error"])


@dataclass
class Exchange:
    """One request in the making: `task` is the server's, `hang_up` is the caller's leaving."""

    task: asyncio.Task[None]
    gone: asyncio.Event
    sent: list[Mapping[str, Any]]

    def hang_up(self) -> None:
        self.gone.set()

    @property
    def answered(self) -> Answered | None:
        if not self.sent:
            return None
        start, *parts = self.sent
        headers = {name.decode(): value.decode() for name, value in start["headers"]}
        return Answered(start["status"], headers, b"".join(part.get("body", b"") for part in parts))


@dataclass
class Bench:
    """An app with a clock that is turned by hand, and what it told its observers."""

    handlers: Iterable[Any]
    config: ServingConfig = field(default_factory=ServingConfig)
    clock: ManualClock = field(default_factory=ManualClock)
    events: list[Event] = field(default_factory=list)
    started: bool = True
    hop_limit: int = 16
    incarnation: str | None = "i-1"

    def __post_init__(self) -> None:
        self.app = ReachApp(
            agent_id="kb-1",
            incarnation=self.incarnation,
            namespace="prod",
            specs=specs_of(self.handlers),
            config=self.config,
            hop_limit=self.hop_limit,
            clock=self.clock,
            emit=self.events.append,
        )
        if self.started:
            self.app.start()

    @property
    def served(self) -> list[CallServed]:
        return [event for event in self.events if isinstance(event, CallServed)]

    def begin(
        self,
        body: Any = None,
        *,
        method: str = "POST",
        path: str = "/invoke",
        headers: Mapping[str, str] = JSON,
        root_path: str = "",
        chunks: list[bytes] | None = None,
        receive: Any = None,
    ) -> Exchange:
        """Start a request; `chunks` replaces the encoded body, None among them hangs up."""
        if chunks is None:
            chunks = [
                body if isinstance(body, bytes) else json.dumps(envelope() if body is None else body).encode()
            ]
        left = list(chunks)
        gone = asyncio.Event()
        sent: list[Mapping[str, Any]] = []

        async def default_receive() -> dict[str, Any]:
            if left:
                return {"type": "http.request", "body": left.pop(0), "more_body": bool(left)}
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Mapping[str, Any]) -> None:
            sent.append(message)

        scope = {
            "type": "http",
            "method": method,
            "path": path,
            "root_path": root_path,
            "headers": [(k.encode(), v.encode()) for k, v in headers.items()],
        }
        task = asyncio.ensure_future(self.app(scope, receive or default_receive, send))
        return Exchange(task, gone, sent)

    async def ask(self, body: Any = None, **options: Any) -> Answered:
        exchange = self.begin(body, **options)
        await asyncio.wait_for(exchange.task, 10)
        answered = exchange.answered
        assert answered is not None, "no answer was sent"
        return answered

    async def call(self, capability: str = "a.echo.v1", payload: Any = None, **changes: Any) -> Answered:
        return await self.ask(envelope(capability, payload, **changes))

    def calling(self, capability: str = "a.echo.v1", payload: Any = None, **changes: Any) -> Exchange:
        return self.begin(envelope(capability, payload, **changes))
