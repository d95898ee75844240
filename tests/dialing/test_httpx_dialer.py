"""What is httpx's own: foreign transports, trace events, proxies, event loops, connections."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest

from agent_reach.dialing.httpx_dialer import HttpxDialer
from agent_reach.ports import Answer, BadAnswer, DialRequest, DialResult, MaybeExecuted, NeverSent


def dial(url: str = "http://peer/invoke", **changes: Any) -> DialRequest:
    values: dict[str, Any] = {
        "url": url,
        "headers": {"content-type": "application/json"},
        "body": b"{}",
        "timeout_s": 5.0,
        "connect_timeout_s": 1.0,
        "max_reply_bytes": 1024,
    }
    return DialRequest(**values | changes)


@contextlib.asynccontextmanager
async def peer(
    *, answer: bytes | None = b"{}", headers: str = ""
) -> AsyncIterator[tuple[str, list[int], list[str]]]:
    """An HTTP server with keep-alive: its url, the number of open connections, the heads it saw."""
    open_now = [0]
    heads: list[str] = []
    writers: set[asyncio.StreamWriter] = set()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        open_now[0] += 1
        writers.add(writer)
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                heads.append(head)
                length = int(head.lower().partition("content-length: ")[2].partition("\r\n")[0])
                await reader.readexactly(length)
                if answer is not None:
                    writer.write(
                        f"HTTP/1.1 200 OK\r\ncontent-length: {len(answer)}\r\n{headers}\r\n".encode() + answer
                    )
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            open_now[0] -= 1
            writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/invoke", open_now, heads
    finally:
        server.close()
        for writer in writers:
            writer.transport.abort()
        async with asyncio.timeout(5):
            while open_now[0]:
                await asyncio.sleep(0)


async def with_transport(handler: Callable[[httpx.Request], Any], **changes: Any) -> DialResult:
    async with httpx.AsyncClient(transport=httpx.MockTransport(handler)) as client:
        return await HttpxDialer(client).send(dial(**changes))


# --- foreign transports ----------------------------------------------------------------------------------


async def test_a_mock_transport_answers() -> None:
    result = await with_transport(
        lambda request: httpx.Response(201, headers={"X-A": "b"}, content=request.content)
    )
    assert isinstance(result, Answer)
    assert (result.status, result.headers["x-a"], result.body) == (201, "b", b"{}")


async def test_an_asgi_app_answers_through_httpx() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": scope["path"].encode()})

    async with httpx.AsyncClient(transport=httpx.ASGITransport(app)) as client:
        result = await HttpxDialer(client).send(dial())
    assert isinstance(result, Answer)
    assert result.body == b"/invoke"


NEVER: dict[str, tuple[Exception, NeverSent]] = {
    "refused": (httpx.ConnectError("refused"), NeverSent("connect", "ConnectError: refused")),
    "slow": (httpx.ConnectTimeout(""), NeverSent("connect", "ConnectTimeout", timed_out=True)),
    "pool": (httpx.PoolTimeout(""), NeverSent("pool", "no free connection in time", local=True, timed_out=True)),
    "header": (httpx.LocalProtocolError("bad"), NeverSent("local", "LocalProtocolError: bad", local=True)),
    "scheme": (httpx.UnsupportedProtocol("ftp"), NeverSent("local", "UnsupportedProtocol: ftp", local=True)),
    "url": (httpx.InvalidURL("bad"), NeverSent("local", "InvalidURL: bad", local=True)),
}


@pytest.mark.parametrize("case", NEVER)
async def test_without_trace_events_the_type_tells_what_was_never_sent(case: str) -> None:
    error, expected = NEVER[case]

    def handler(request: httpx.Request) -> httpx.Response:
        raise error

    assert await with_transport(handler) == expected


@pytest.mark.parametrize(
    ("error", "timed_out"),
    [
        (httpx.ReadError("reset"), False),
        (httpx.WriteError("reset"), False),
        (httpx.CloseError("reset"), False),
        (httpx.RemoteProtocolError("garbage"), False),
        (httpx.ProxyError("407"), False),
        (httpx.ReadTimeout(""), True),
        (httpx.WriteTimeout(""), True),
        (TimeoutError("its own"), False),
        (OSError("whatever"), False),
        (KeyError("a bug"), False),
        (RuntimeError("a bug"), False),
    ],
)
async def test_anything_else_may_have_been_executed_and_is_never_raised(error: Exception, timed_out: bool) -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        raise error

    result = await with_transport(handler)
    assert isinstance(result, MaybeExecuted)
    assert result.timed_out is timed_out
    assert type(error).__name__ in result.detail


async def test_a_foreign_transport_that_hangs_without_a_word_may_have_executed() -> None:
    async def handler(request: httpx.Request) -> httpx.Response:
        await asyncio.Event().wait()
        raise AssertionError

    result = await with_transport(handler, timeout_s=0.05)
    assert isinstance(result, MaybeExecuted)
    assert result.timed_out


async def test_the_clients_own_wish_to_follow_redirects_is_overruled() -> None:
    seen: list[str] = []

    def handler(request: httpx.Request) -> httpx.Response:
        seen.append(str(request.url))
        return httpx.Response(302, headers={"location": "http://elsewhere/"})

    async with httpx.AsyncClient(transport=httpx.MockTransport(handler), follow_redirects=True) as client:
        result = await HttpxDialer(client).send(dial(headers={"authorization": "Bearer secret"}))
    assert isinstance(result, Answer)
    assert result.status == 302
    assert seen == ["http://peer/invoke"]


async def test_a_given_client_is_never_closed_by_us_and_a_closed_one_is_our_own_fault() -> None:
    client = httpx.AsyncClient(transport=httpx.MockTransport(lambda request: httpx.Response(200)))
    dialer = HttpxDialer(client)
    assert isinstance(await dialer.send(dial()), Answer)
    await dialer.aclose()
    assert not client.is_closed
    await client.aclose()
    result = await dialer.send(dial())
    assert isinstance(result, NeverSent)
    assert result.local


# --- real connections ------------------------------------------------------------------------------------


@pytest.mark.parametrize("url", ["http://[::1/invoke", "nonsense", "ftp://127.0.0.1/x", "http://\ud800/"])
async def test_an_impossible_url_is_our_own_fault(url: str) -> None:
    dialer = HttpxDialer()
    result = await dialer.send(dial(url))
    await dialer.aclose()
    assert isinstance(result, NeverSent)
    assert (result.phase, result.local) == ("local", True)


@pytest.mark.parametrize("headers", [{"bad name": "x"}, {"x": "a\r\nb: c"}, {"x": "é" * 3 + "\ud800"}])
async def test_a_header_that_breaks_the_rules_is_our_own_fault(headers: dict[str, str]) -> None:
    dialer = HttpxDialer()
    async with peer() as (url, _, heads):
        result = await dialer.send(dial(url, headers=headers))
        await dialer.aclose()
    assert isinstance(result, NeverSent)
    assert (result.phase, result.local) == ("local", True)
    assert heads == []


async def test_a_name_that_does_not_resolve_is_told_apart() -> None:
    dialer = HttpxDialer()
    result = await dialer.send(dial("http://nowhere.invalid/invoke"))
    await dialer.aclose()
    assert isinstance(result, NeverSent)
    assert (result.phase, result.local) == ("dns", False)


async def test_a_failed_handshake_is_told_apart() -> None:
    async def no_tls(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(no_tls, "127.0.0.1", 0)
    dialer = HttpxDialer()
    result = await dialer.send(dial(f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}/invoke"))
    await dialer.aclose()
    server.close()
    assert isinstance(result, NeverSent)
    assert (result.phase, result.local, result.timed_out) == ("tls", False, False)


async def test_the_certificates_are_read_before_the_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    dialer = HttpxDialer()

    def too_late(*_: object, **__: object) -> None:
        raise AssertionError("read within a call's time")

    monkeypatch.setattr(ssl, "create_default_context", too_late)
    result = await dialer.send(dial("http://127.0.0.1:1/invoke"))
    assert isinstance(result, NeverSent)
    assert (result.phase, result.local) == ("connect", False)
    await dialer.aclose()


async def test_a_handshake_that_hangs_was_never_sent_and_leaks_no_connection() -> None:
    open_now = [0]

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        open_now[0] += 1
        with contextlib.suppress(ConnectionError):
            await reader.read()
        writer.close()
        open_now[0] -= 1

    async def until(count: int) -> None:
        async with asyncio.timeout(5):
            while open_now[0] != count:
                await asyncio.sleep(0)

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    url = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}/invoke"
    dialer = HttpxDialer()
    for limits in ({"timeout_s": 0.5}, {"connect_timeout_s": 0.5}):
        result = await dialer.send(dial(url, **limits))
        assert isinstance(result, NeverSent)
        assert (result.phase, result.timed_out, result.local) == ("tls", True, False)
        await until(0)
    task = asyncio.ensure_future(dialer.send(dial(url)))
    await until(1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(0)
    await dialer.aclose()
    server.close()


async def test_proxies_of_the_environment_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", "127.0.0.0/8")
    dialer = HttpxDialer()
    async with peer() as (url, _, _heads):
        result = await dialer.send(dial(url))
        await dialer.aclose()
    assert isinstance(result, Answer)


async def test_connections_are_reused_and_cookies_are_not_kept() -> None:
    dialer = HttpxDialer()
    async with peer(headers="set-cookie: session=secret; path=/\r\n") as (url, open_now, heads):
        for _ in range(3):
            assert isinstance(await dialer.send(dial(url)), Answer)
        assert open_now == [1]
        assert len(heads) == 3
        assert not any("cookie" in head.lower() for head in heads)
        await dialer.aclose()


@pytest.mark.parametrize("how", ["cancelled", "timed out", "too large"])
async def test_an_exchange_that_ends_early_closes_its_connection(how: str) -> None:
    dialer = HttpxDialer()
    async with peer(answer=b"x" * 100_000 if how == "too large" else None) as (url, open_now, heads):
        for number in range(1, 6):
            if how == "cancelled":
                task = asyncio.ensure_future(dialer.send(dial(url)))
                async with asyncio.timeout(5):
                    while len(heads) < number:
                        await asyncio.sleep(0)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            elif how == "timed out":
                assert isinstance(await dialer.send(dial(url, timeout_s=0.3)), MaybeExecuted)
            else:
                assert isinstance(await dialer.send(dial(url)), BadAnswer)
        async with asyncio.timeout(5):
            while open_now[0]:
                await asyncio.sleep(0)
        await dialer.aclose()


async def test_a_full_pool_is_our_own_fault_and_fails_fast() -> None:
    async with peer(answer=None) as (url, _, heads):
        limits = httpx.Limits(max_connections=1)
        async with httpx.AsyncClient(limits=limits, trust_env=False) as client:
            dialer = HttpxDialer(client)
            holding = asyncio.ensure_future(dialer.send(dial(url)))
            async with asyncio.timeout(5):
                while not heads:
                    await asyncio.sleep(0)
            result = await dialer.send(dial(url, connect_timeout_s=0.05))
            holding.cancel()
            await asyncio.gather(holding, return_exceptions=True)
    assert result == NeverSent("pool", "no free connection in time", local=True, timed_out=True)


def test_one_dialer_serves_two_event_loops_in_turn() -> None:
    dialer = HttpxDialer()

    async def main() -> None:
        async with peer() as (url, _, _heads):
            assert isinstance(await dialer.send(dial(url)), Answer)
            await dialer.aclose()

    asyncio.run(main())
    asyncio.run(main())


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_loop_that_ended_without_closing_us_does_not_spoil_the_next() -> None:
    dialer = HttpxDialer()

    async def main(*, close: bool) -> None:
        async with peer() as (url, _, _heads):
            assert isinstance(await dialer.send(dial(url)), Answer)
            if close:
                await dialer.aclose()

    asyncio.run(main(close=False))
    asyncio.run(main(close=True))
    assert len(dialer._own) == 0, "a client outlives its loop"
    gc.collect()


async def test_making_a_dialer_opens_nothing() -> None:
    dialer = HttpxDialer()
    assert len(dialer._own) == 0
    await dialer.aclose()


async def test_a_failure_to_connect_is_told_in_the_systems_words() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
    dialer = HttpxDialer()
    assert await dialer.send(dial(f"http://127.0.0.1:{port}/x")) == NeverSent("connect", "Connection refused")
    assert (await dialer.send(dial("http://nowhere.invalid/x"))).phase == "dns"
    await dialer.aclose()
