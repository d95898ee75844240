"""What every dialer promises, whatever it dials with: one suite, run on each of them.

A stage puts up peers by the way they behave. A behaviour that a stage has no way to show is skipped there.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

import pytest

from agent_reach.dialing.httpx_dialer import HttpxDialer
from agent_reach.dialing.local import LocalDialer
from agent_reach.ports import Answer, BadAnswer, Dialer, DialRequest, MaybeExecuted, NeverSent

Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Stage:
    """Where peers are put up. `seen` holds the requests that reached one; `left` is set when a caller went."""

    def __init__(self) -> None:
        self.dialer: Dialer
        self.seen: list[tuple[Mapping[str, str], bytes]] = []
        self.reached = asyncio.Event()
        self.left = asyncio.Event()

    async def url(self, behaviour: str) -> str:
        peer = getattr(self, behaviour, None)
        if peer is None:
            pytest.skip(f"no way to show {behaviour!r} here")
        return await self.put_up(peer)

    async def put_up(self, peer: Any) -> str:
        raise NotImplementedError

    async def close(self) -> None:
        await self.dialer.aclose()


class HttpStage(Stage):
    """Raw sockets, each connection played by a script."""

    def __init__(self, dialer: Dialer) -> None:
        super().__init__()
        self.dialer = dialer
        self.servers: list[asyncio.Server] = []
        self.writers: set[asyncio.StreamWriter] = set()
        self.tasks: set[asyncio.Task[None]] = set()

    async def put_up(self, peer: Script) -> str:
        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            self.tasks.add(task)
            self.writers.add(writer)
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                await peer(reader, writer)
            writer.close()

        server = await asyncio.start_server(connected, "127.0.0.1", 0)
        self.servers.append(server)
        return f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/invoke"

    async def close(self) -> None:
        await super().close()
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        for server in self.servers:
            server.close()
        for writer in self.writers:
            writer.transport.abort()
        await asyncio.sleep(0)

    async def read(self, reader: asyncio.StreamReader) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        lines = head.decode("latin-1").split("\r\n")[1:-2]
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        body = await reader.readexactly(int(headers.get("content-length", "0")))
        self.seen.append((headers, body))
        self.reached.set()

    def replying(self, raw: bytes, *, then_wait: bool = False) -> Script:
        async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await self.read(reader)
            writer.write(raw)
            await writer.drain()
            if then_wait:
                await reader.read()
                self.left.set()

        return script

    async def nobody(self, *_: Any) -> None: ...

    async def url(self, behaviour: str) -> str:
        if behaviour == "nobody":
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                return f"http://127.0.0.1:{free.getsockname()[1]}/invoke"
        return await super().url(behaviour)

    @property
    def answers(self) -> Script:
        return self.replying(b"HTTP/1.1 200 OK\r\nX-Thing: One\r\ncontent-length: 2\r\n\r\n{}")

    @property
    def answers_in_pieces(self) -> Script:
        return self.replying(
            b'HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\n{"a\r\n4\r\n":1}\r\n0\r\n\r\n'
        )

    @property
    def answers_nothing_much(self) -> Script:
        return self.replying(b"HTTP/1.1 204 No Content\r\n\r\n")

    @property
    def fails(self) -> Script:
        return self.replying(b"HTTP/1.1 503 Unavailable\r\nretry-after: 7\r\ncontent-length: 4\r\n\r\nbusy")

    @property
    def redirects(self) -> Script:
        return self.replying(
            b"HTTP/1.1 307 Temporary Redirect\r\nlocation: http://169.254.169.254/\r\ncontent-length: 0\r\n\r\n"
        )

    @property
    def gzips(self) -> Script:
        body = gzip.compress(b"0" * 1_000_000)
        return self.replying(
            b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: %d\r\n\r\n" % len(body) + body
        )

    @property
    def is_too_large(self) -> Script:
        return self.replying(b"HTTP/1.1 200 OK\r\ncontent-length: 1000000\r\n\r\n" + b"x" * 1_000_000)

    @property
    def is_too_large_in_pieces(self) -> Script:
        async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await self.read(reader)
            writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
            while True:  # for ever: only a caller that stops reading ends it
                writer.write(b"400\r\n" + b"x" * 1024 + b"\r\n")
                await writer.drain()
                await asyncio.sleep(0)

        return script

    @property
    def hangs(self) -> Script:
        return self.replying(b"", then_wait=True)

    @property
    def hangs_mid_answer(self) -> Script:
        return self.replying(b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\n{", then_wait=True)

    @property
    def closes_without_an_answer(self) -> Script:
        return self.replying(b"")

    @property
    def closes_mid_answer(self) -> Script:
        return self.replying(b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\n{")

    @property
    def closes_mid_headers(self) -> Script:
        return self.replying(b"HTTP/1.1 200 OK\r\ncontent-le")

    @property
    def talks_garbage(self) -> Script:
        return self.replying(b"SSH-2.0-OpenSSH_9.6\r\n\r\n")

    async def accepts_and_closes(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async def resets_mid_upload(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(1000)
        sock = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()


class LocalStage(Stage):
    """ASGI apps in this process."""

    def __init__(self) -> None:
        super().__init__()
        self.apps: dict[str, Any] = {}
        self.dialer = LocalDialer(self.apps)

    async def put_up(self, peer: Any) -> str:
        self.apps["local://Peer-1"] = peer
        return "local://Peer-1/invoke"

    async def url(self, behaviour: str) -> str:
        return "local://nobody/invoke" if behaviour == "nobody" else await super().url(behaviour)

    def replying(
        self, status: int, headers: Mapping[str, str], *parts: bytes, then: Any = None, ended: bool = True
    ) -> Any:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            message = await receive()
            self.seen.append(({k.decode(): v.decode() for k, v in scope["headers"]}, message["body"]))
            self.reached.set()
            assert (scope["method"], scope["path"]) == ("POST", "/invoke")
            if status:
                raw = [(name.encode(), value.encode()) for name, value in headers.items()]
                await send({"type": "http.response.start", "status": status, "headers": raw})
            for number, part in enumerate(parts, 1):
                last = ended and number == len(parts)
                await send({"type": "http.response.body", "body": part, "more_body": not last})
            if then is not None:
                await then(receive)

        return app

    async def _until_left(self, receive: Any) -> None:
        try:
            await receive()
        finally:
            self.left.set()

    @property
    def answers(self) -> Any:
        return self.replying(200, {"X-Thing": "One"}, b"{}")

    @property
    def answers_in_pieces(self) -> Any:
        return self.replying(200, {}, b'{"a', b'":1}')

    @property
    def answers_nothing_much(self) -> Any:
        return self.replying(204, {}, b"")

    @property
    def fails(self) -> Any:
        return self.replying(503, {"retry-after": "7"}, b"busy")

    @property
    def redirects(self) -> Any:
        return self.replying(307, {"location": "http://169.254.169.254/"}, b"")

    @property
    def gzips(self) -> Any:
        return self.replying(200, {"content-encoding": "gzip"}, gzip.compress(b"0" * 1_000_000))

    @property
    def is_too_large(self) -> Any:
        return self.replying(200, {}, b"x" * 1_000_000)

    @property
    def is_too_large_in_pieces(self) -> Any:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            while True:
                await send({"type": "http.response.body", "body": b"x" * 1024, "more_body": True})
                await asyncio.sleep(0)

        return app

    @property
    def hangs(self) -> Any:
        return self.replying(0, {}, then=self._until_left)

    @property
    def hangs_mid_answer(self) -> Any:
        return self.replying(200, {}, b"{", ended=False, then=self._until_left)

    @property
    def closes_without_an_answer(self) -> Any:
        return self.replying(0, {})

    @property
    def closes_mid_answer(self) -> Any:
        return self.replying(200, {}, b"{", ended=False)

    @property
    def raises(self) -> Any:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            raise ValueError("an app that leaks its errors")

        return app


@pytest.fixture(params=["httpx", "local"])
async def stage(request: pytest.FixtureRequest) -> AsyncIterator[Stage]:
    made: Stage = HttpStage(HttpxDialer()) if request.param == "httpx" else LocalStage()
    yield made
    await made.close()


def dial(url: str, **changes: Any) -> DialRequest:
    values: dict[str, Any] = {
        "url": url,
        "headers": {"content-type": "application/json", "x-caller": "me"},
        "body": b'{"a":1}',
        "timeout_s": 5.0,
        "connect_timeout_s": 1.0,
        "max_reply_bytes": 64 * 1024,
    }
    return DialRequest(**values | changes)


# --- answered --------------------------------------------------------------------------------------------


async def test_an_answer_comes_with_status_lower_case_headers_and_body(stage: Stage) -> None:
    result = await stage.dialer.send(dial(await stage.url("answers")))
    assert isinstance(result, Answer)
    assert (result.status, result.headers["x-thing"], result.body) == (200, "One", b"{}")


async def test_headers_and_body_arrive_as_given_and_no_compression_is_asked_for(stage: Stage) -> None:
    await stage.dialer.send(dial(await stage.url("answers")))
    ((headers, body),) = stage.seen
    assert body == b'{"a":1}'
    assert (headers["content-type"], headers["x-caller"]) == ("application/json", "me")
    assert headers["accept-encoding"] == "identity"


async def test_an_answer_in_pieces_is_put_together(stage: Stage) -> None:
    result = await stage.dialer.send(dial(await stage.url("answers_in_pieces")))
    assert isinstance(result, Answer)
    assert result.body == b'{"a":1}'


async def test_an_empty_answer_is_an_answer(stage: Stage) -> None:
    result = await stage.dialer.send(dial(await stage.url("answers_nothing_much")))
    assert isinstance(result, Answer)
    assert (result.status, result.body) == (204, b"")


async def test_an_error_status_is_an_answer(stage: Stage) -> None:
    result = await stage.dialer.send(dial(await stage.url("fails")))
    assert isinstance(result, Answer)
    assert (result.status, result.headers["retry-after"], result.body) == (503, "7", b"busy")


async def test_a_redirect_is_handed_back_and_not_followed(stage: Stage) -> None:
    result = await stage.dialer.send(dial(await stage.url("redirects")))
    assert isinstance(result, Answer)
    assert (result.status, result.headers["location"]) == (307, "http://169.254.169.254/")


async def test_an_answer_of_exactly_the_bound_fits(stage: Stage) -> None:
    assert isinstance(await stage.dialer.send(dial(await stage.url("answers"), max_reply_bytes=2)), Answer)
    assert isinstance(await stage.dialer.send(dial(await stage.url("answers"), max_reply_bytes=1)), BadAnswer)


# --- answered, and unusable ------------------------------------------------------------------------------


@pytest.mark.parametrize("behaviour", ["is_too_large", "is_too_large_in_pieces"])
async def test_an_answer_past_the_bound_is_bad_and_is_not_read_on(stage: Stage, behaviour: str) -> None:
    result = await stage.dialer.send(dial(await stage.url(behaviour)))
    assert isinstance(result, BadAnswer)
    assert (result.status, result.detail, result.too_large) == (200, "the answer is larger than 65536 bytes", True)


async def test_a_compressed_answer_is_bad_and_never_unpacked(stage: Stage) -> None:
    result = await stage.dialer.send(dial(await stage.url("gzips")))
    assert isinstance(result, BadAnswer)
    assert "content-encoding 'gzip'" in result.detail


async def test_an_answer_that_is_cut_off_is_bad(stage: Stage) -> None:
    result = await stage.dialer.send(dial(await stage.url("closes_mid_answer")))
    assert isinstance(result, BadAnswer)
    assert (result.status, "cut off" in result.detail) == (200, True)


# --- never sent ------------------------------------------------------------------------------------------


async def test_where_nobody_listens_nothing_was_sent_and_that_is_not_our_fault(stage: Stage) -> None:
    result = await stage.dialer.send(dial(await stage.url("nobody")))
    assert isinstance(result, NeverSent)
    assert (result.phase, result.local, result.timed_out) == ("connect", False, False)


async def test_a_header_that_can_not_be_encoded_is_our_own_fault(stage: Stage) -> None:
    result = await stage.dialer.send(dial(await stage.url("answers"), headers={"x": "\ud800"}))
    assert isinstance(result, NeverSent)
    assert (result.phase, result.local) == ("local", True)
    assert stage.seen == []


# --- maybe executed --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "behaviour",
    ["closes_without_an_answer", "accepts_and_closes", "closes_mid_headers", "talks_garbage", "raises"],
)
async def test_sent_and_no_answer_may_have_been_executed(stage: Stage, behaviour: str) -> None:
    result = await stage.dialer.send(dial(await stage.url(behaviour)))
    assert isinstance(result, MaybeExecuted)
    assert not result.timed_out
    assert result.detail


async def test_a_reset_in_the_middle_of_the_upload_may_have_been_executed(stage: Stage) -> None:
    result = await stage.dialer.send(dial(await stage.url("resets_mid_upload"), body=b"x" * 8_000_000))
    assert isinstance(result, MaybeExecuted)


@pytest.mark.parametrize("behaviour", ["hangs", "hangs_mid_answer"])
async def test_an_answer_that_does_not_come_in_time_may_have_been_executed(stage: Stage, behaviour: str) -> None:
    result = await stage.dialer.send(dial(await stage.url(behaviour), timeout_s=0.1))
    assert isinstance(result, MaybeExecuted)
    assert result.timed_out
    await asyncio.wait_for(stage.left.wait(), 5)


# --- leaving ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("behaviour", ["hangs", "hangs_mid_answer"])
async def test_cancellation_comes_through_and_the_peer_learns_of_it(stage: Stage, behaviour: str) -> None:
    task = asyncio.ensure_future(stage.dialer.send(dial(await stage.url(behaviour))))
    await asyncio.wait_for(stage.reached.wait(), 5)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.wait_for(stage.left.wait(), 5)


async def test_a_dialer_goes_on_after_every_kind_of_failure(stage: Stage) -> None:
    for behaviour in ("nobody", "closes_without_an_answer", "closes_mid_answer", "is_too_large"):
        assert not isinstance(await stage.dialer.send(dial(await stage.url(behaviour))), Answer)
    assert isinstance(await stage.dialer.send(dial(await stage.url("answers"))), Answer)


async def test_a_hundred_at_once(stage: Stage) -> None:
    url = await stage.url("answers")
    results = await asyncio.gather(*(stage.dialer.send(dial(url)) for _ in range(100)))
    assert all(isinstance(result, Answer) for result in results)


async def test_closing_twice_is_fine(stage: Stage) -> None:
    await stage.dialer.send(dial(await stage.url("answers")))
    await stage.dialer.aclose()
    await stage.dialer.aclose()
