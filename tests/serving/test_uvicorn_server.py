"""Serving on real sockets: addresses, restarts, and an end that is bounded and leaves nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest

from agent_reach.config import ServingConfig
from agent_reach.errors import ConfigError
from agent_reach.handlers import register_agent, specs_of
from agent_reach.ports import SystemClock
from agent_reach.serving.asgi import ReachApp
from agent_reach.serving.drain import drain
from agent_reach.serving.signals import stop_signals
from agent_reach.serving.uvicorn_server import UvicornServer
from tests.serving.driver import envelope


@register_agent("a.echo.v1")
async def echo(text: str = "hi") -> str:
    return text


def make_app(*handlers: Any) -> ReachApp:
    app = ReachApp(
        agent_id="kb-1",
        incarnation="i-1",
        namespace="prod",
        specs=specs_of(handlers or [echo]),
        config=ServingConfig(max_body_bytes=64 * 1024),
        hop_limit=16,
        clock=SystemClock(),
        emit=lambda event: None,
    )
    app.start()
    return app


async def post(port: int, body: Any = None, host: str = "127.0.0.1", **options: Any) -> httpx.Response:
    async with httpx.AsyncClient(trust_env=False, timeout=10) as client:
        return await client.post(f"http://{host}:{port}/invoke", json=body or envelope(), **options)


async def test_port_0_takes_a_free_one_and_calls_are_answered() -> None:
    server = UvicornServer(make_app(), "127.0.0.1:0")
    await server.start()
    try:
        assert (server.host, server.port > 0) == ("127.0.0.1", True)
        response = await post(server.port, envelope(payload={"text": "x"}))
        assert response.json()["data"] == "x"
        assert "server" not in response.headers
    finally:
        await server.stop(1.0)


async def test_ipv6_in_brackets() -> None:
    try:
        server = UvicornServer(make_app(), "[::1]:0")
        await server.start()
    except ConfigError as error:
        pytest.skip(f"no IPv6 here: {error}")
    try:
        assert server.host == "::1"
        assert (await post(server.port, host="[::1]")).status_code == 200
    finally:
        await server.stop(1.0)


async def test_a_taken_port_is_refused_with_what_to_do() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ConfigError) as caught:
            await UvicornServer(make_app(), f"127.0.0.1:{port}").start()
    assert str(caught.value) == (
        f"listen=127.0.0.1:{port} is taken (another process listens there); "
        "choose another port, or 0 for a free one"
    )


@pytest.mark.parametrize(
    "listen",
    ["", "9101", ":9101", "localhost", "127.0.0.1:", "127.0.0.1:x", "127.0.0.1:70000", "::1:9101", "http://a:1"],
)
def test_a_bad_address_is_refused_when_the_server_is_made(listen: str) -> None:
    with pytest.raises(ConfigError, match="must be host:port"):
        UvicornServer(object(), listen)


@pytest.mark.parametrize(
    ("listen", "reason"), [("nowhere.invalid:0", "can't be found"), ("192.0.2.1:0", "can't be bound")]
)
async def test_an_address_that_is_not_ours_is_refused(listen: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        await UvicornServer(make_app(), listen).start()


async def test_a_missing_uvicorn_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(ConfigError, match=r"pip install 'agent-reach\[standard\]'"):
        await UvicornServer(make_app(), "127.0.0.1:0").start()


async def test_the_same_port_serves_again_after_a_stop_though_connections_linger() -> None:
    server = UvicornServer(make_app(), "127.0.0.1:0")
    await server.start()
    async with httpx.AsyncClient(trust_env=False) as client:
        await client.post(f"http://127.0.0.1:{server.port}/invoke", json=envelope())
        await server.stop(1.0)
        again = UvicornServer(make_app(), f"127.0.0.1:{server.port}")
        await again.start()
        assert (await client.post(f"http://127.0.0.1:{again.port}/invoke", json=envelope())).status_code == 200
        await again.stop(1.0)


async def test_stop_lets_open_answers_end() -> None:
    entered, go = asyncio.Event(), asyncio.Event()

    @register_agent("a.slow.v1")
    async def slow() -> str:
        entered.set()
        await go.wait()
        return "done"

    server = UvicornServer(make_app(slow), "127.0.0.1:0")
    await server.start()
    calling = asyncio.ensure_future(post(server.port, envelope("a.slow.v1")))
    await asyncio.wait_for(entered.wait(), 5)
    stopping = asyncio.ensure_future(server.stop(5.0))
    async with asyncio.timeout(5):
        while True:  # until nobody is accepted any more
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", server.port)
            except OSError:
                break
            writer.close()
            await asyncio.sleep(0.01)
    go.set()
    assert (await calling).json()["data"] == "done"
    await stopping


async def test_stop_is_bounded_when_an_answer_never_comes() -> None:
    entered = asyncio.Event()

    @register_agent("a.hang.v1")
    async def hang() -> None:
        entered.set()
        await asyncio.Event().wait()

    server = UvicornServer(make_app(hang), "127.0.0.1:0")
    await server.start()
    calling = asyncio.ensure_future(post(server.port, envelope("a.hang.v1", ttl_ms=60_000)))
    await asyncio.wait_for(entered.wait(), 5)
    began = asyncio.get_running_loop().time()
    await server.stop(0.0)
    assert asyncio.get_running_loop().time() - began < 2.5
    with pytest.raises(httpx.TransportError):
        await calling


class Deaf:
    """A handler that neither ends nor lets itself be cancelled, until it is let go."""

    def __init__(self) -> None:
        self.entered = asyncio.Event()
        self.let_go = asyncio.Event()

    async def hang(self) -> None:
        self.entered.set()
        while not self.let_go.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await self.let_go.wait()


@pytest.mark.parametrize("timeout_s", [0.0, 0.5])
async def test_stop_takes_no_longer_than_it_says_whatever_the_app_does(timeout_s: float) -> None:
    before, deaf = asyncio.all_tasks(), Deaf()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await deaf.hang()

    server = UvicornServer(app, "127.0.0.1:0")
    await server.start()
    _, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
    await asyncio.wait_for(deaf.entered.wait(), 5)
    began = asyncio.get_running_loop().time()
    await server.stop(timeout_s)
    assert asyncio.get_running_loop().time() - began < timeout_s + 0.6
    with pytest.raises(OSError, match=r"\d"):
        await asyncio.open_connection("127.0.0.1", server.port)
    writer.close()
    deaf.let_go.set()
    await asyncio.wait(asyncio.all_tasks() - before)


async def test_a_server_that_had_to_be_cancelled_accepts_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    server = UvicornServer(make_app(), "127.0.0.1:0")
    await server.start()

    async def never(sockets: Any = None) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(server._server, "shutdown", never)
    began = asyncio.get_running_loop().time()
    await server.stop(0.1)
    assert asyncio.get_running_loop().time() - began < 0.6
    with pytest.raises(OSError, match=r"\d"):
        await asyncio.open_connection("127.0.0.1", server.port)


async def refuses(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return True
    writer.close()
    return False


async def test_a_start_that_fails_inside_uvicorn_leaves_no_port_open(monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(self: Any, sockets: Any = None) -> None:
        raise ValueError("startup broke")

    monkeypatch.setattr("uvicorn.Server.startup", broken)
    server = UvicornServer(make_app(), "127.0.0.1:0")
    # The error is kept as long as the port is looked at, and with it the frames that hold the socket.
    with pytest.raises(ValueError, match="startup broke") as caught:
        await server.start()
    assert server.port
    assert await refuses(server.port)
    del caught


async def test_a_cancelled_start_stays_cancelled_though_uvicorn_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    async def slow_and_broken(self: Any, sockets: Any = None) -> None:
        while not self.should_exit:
            await asyncio.sleep(0)
        raise ValueError("startup broke")

    monkeypatch.setattr("uvicorn.Server.startup", slow_and_broken)
    server = UvicornServer(make_app(), "127.0.0.1:0")
    starting = asyncio.ensure_future(server.start())
    await asyncio.sleep(0)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert await refuses(server.port)


async def test_a_stop_in_which_uvicorn_fails_closes_everything_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def broken(sockets: Any = None) -> None:
        raise ValueError("shutdown broke")

    server = UvicornServer(make_app(), "127.0.0.1:0")
    await server.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
    await reader.readline()
    monkeypatch.setattr(server._server, "shutdown", broken)
    with pytest.raises(ValueError, match="shutdown broke"):
        await server.stop(0.1)
    assert await refuses(server.port)
    async with asyncio.timeout(5):
        with contextlib.suppress(ConnectionError):
            await reader.read()  # ends, as the connection was cut
    writer.close()


async def test_a_whole_drain_ends_in_its_time_though_a_handler_hangs() -> None:
    before, deaf = asyncio.all_tasks(), Deaf()

    @register_agent("a.hang.v1")
    async def hang() -> None:
        await deaf.hang()

    async def withdraw() -> None: ...

    app = make_app(hang)
    server = UvicornServer(app, "127.0.0.1:0")
    await server.start()
    calling = asyncio.ensure_future(post(server.port, envelope("a.hang.v1", ttl_ms=60_000)))
    await asyncio.wait_for(deaf.entered.wait(), 5)
    began = asyncio.get_running_loop().time()
    await drain(
        app=app,
        withdraw=withdraw,
        stop_server=server.stop,
        clock=SystemClock(),
        config=ServingConfig(drain_s=1.0, linger_s=0.0),
        hurry=asyncio.Event(),
    )
    assert asyncio.get_running_loop().time() - began < 1.5
    deaf.let_go.set()
    await asyncio.wait(asyncio.all_tasks() - before)
    # Its caller was told that the agent stopped and cut it, and not left to a broken connection.
    assert (await calling).status_code == 503
    assert calling.result().json()["error"]["executed"]


async def test_stop_is_safe_twice_and_before_start_and_leaves_no_task() -> None:
    before = asyncio.all_tasks()
    server = UvicornServer(make_app(), "127.0.0.1:0")
    await server.stop(1.0)
    await server.start()
    await post(server.port)
    await server.stop(1.0)
    await server.stop(1.0)
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == before
    with pytest.raises(OSError, match=r"\d"):
        await asyncio.open_connection("127.0.0.1", server.port)


async def test_the_hosts_signals_and_logging_are_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    root = list(logging.getLogger().handlers)
    server = UvicornServer(make_app(), "127.0.0.1:0")
    await server.start()
    assert {number: signal.getsignal(number) for number in handlers} == handlers
    assert logging.getLogger().handlers == root
    assert [logging.getLogger(name).handlers for name in ("uvicorn", "uvicorn.access")] == [[], []]
    await server.stop(1.0)


async def test_a_caller_that_hangs_up_cancels_the_handler() -> None:
    entered, cancelled = asyncio.Event(), asyncio.Event()

    @register_agent("a.hang.v1")
    async def hang() -> None:
        entered.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    server = UvicornServer(make_app(hang), "127.0.0.1:0")
    await server.start()
    try:
        calling = asyncio.ensure_future(post(server.port, envelope("a.hang.v1")))
        await asyncio.wait_for(entered.wait(), 5)
        calling.cancel()
        await asyncio.wait_for(cancelled.wait(), 5)
    finally:
        await server.stop(1.0)


async def test_a_body_past_the_bound_is_refused_and_the_next_connection_is_served() -> None:
    server = UvicornServer(make_app(), "127.0.0.1:0")
    await server.start()
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        head = b"POST /invoke HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        head += b"transfer-encoding: chunked\r\n\r\n"
        writer.write(head + b"10000\r\n" + b" " * 0x10000 + b"\r\n10\r\n" + b" " * 16 + b"\r\n")
        await writer.drain()
        answer = await asyncio.wait_for(reader.read(), 10)
        assert answer.startswith(b"HTTP/1.1 413")
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["type"] == "PayloadTooLarge"
        writer.close()
        assert (await post(server.port)).status_code == 200
    finally:
        await server.stop(1.0)


async def test_headers_past_the_bound_are_refused() -> None:
    server = UvicornServer(make_app(), "127.0.0.1:0")
    await server.start()
    try:
        response = await post(server.port, headers={"x-large": "x" * 200_000})
        assert response.status_code in (400, 431)
    except httpx.TransportError:
        pass  # closed while the header was still being sent: refused as well
    finally:
        await server.stop(1.0)


async def test_mounted_in_fastapi_behind_middleware_on_a_real_socket() -> None:
    from fastapi import FastAPI, Request

    app = make_app()

    @contextlib.asynccontextmanager
    async def lifespan(host: FastAPI) -> AsyncIterator[None]:
        app.start()
        yield
        await app.stop()

    host = FastAPI(lifespan=lifespan)

    @host.middleware("http")
    async def tag(request: Request, call_next: Any) -> Any:
        response = await call_next(request)
        response.headers["x-host"] = "yes"
        return response

    host.mount("/agents", app)
    server = UvicornServer(host, "127.0.0.1:0")
    await server.start()
    try:
        async with httpx.AsyncClient(trust_env=False) as client:
            response = await client.post(f"http://127.0.0.1:{server.port}/agents/invoke", json=envelope())
        assert (response.json()["data"], response.headers["x-host"]) == ("hi", "yes")
    finally:
        await server.stop(1.0)


async def test_the_host_applications_access_log_survives_serving() -> None:
    """uvicorn's own logging set-up would take its handlers away for the whole process."""
    log, handler = logging.getLogger("uvicorn.access"), logging.NullHandler()
    log.addHandler(handler)
    try:
        server = UvicornServer(make_app(), "127.0.0.1:0")
        await server.start()
        await server.stop(0.0)
        assert handler in log.handlers
        assert log.propagate
    finally:
        log.removeHandler(handler)


async def test_a_signal_handler_that_the_application_gave_the_loop_is_back_afterwards() -> None:
    loop, told = asyncio.get_running_loop(), []
    before = signal.getsignal(signal.SIGTERM)
    loop.add_signal_handler(signal.SIGTERM, told.append, "application")
    try:
        stop, hurry = asyncio.Event(), asyncio.Event()
        with stop_signals(stop, hurry):
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.wait_for(stop.wait(), 5)
        assert told == []
        os.kill(os.getpid(), signal.SIGTERM)
        async with asyncio.timeout(5):
            while not told:
                await asyncio.sleep(0)
    finally:
        loop.remove_signal_handler(signal.SIGTERM)
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def signal_of_the_process(number: signal.Signals, told: list[str]) -> Iterator[None]:
    """A handler of the application, from before any agent served."""
    before = signal.signal(number, lambda *_: told.append("application"))
    try:
        yield
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_one_signal_stops_every_agent_of_the_loop_and_a_second_hurries_them(number: signal.Signals) -> None:
    told: list[str] = []
    (stop_a, hurry_a), (stop_b, hurry_b) = [(asyncio.Event(), asyncio.Event()) for _ in range(2)]
    with signal_of_the_process(number, told):
        with stop_signals(stop_a, hurry_a), stop_signals(stop_b, hurry_b):
            os.kill(os.getpid(), number)
            async with asyncio.timeout(5):
                await stop_a.wait()
                await stop_b.wait()
            assert not hurry_a.is_set()
            assert not hurry_b.is_set()
            os.kill(os.getpid(), number)
            async with asyncio.timeout(5):
                await hurry_a.wait()
                await hurry_b.wait()
        os.kill(os.getpid(), number)
        await asyncio.sleep(0)
    assert told == ["application"]


@pytest.mark.parametrize("first_in_leaves_first", [True, False])
async def test_the_last_agent_to_leave_puts_back_what_was_there(first_in_leaves_first: bool) -> None:
    told: list[str] = []
    events = [(asyncio.Event(), asyncio.Event()) for _ in range(2)]
    with signal_of_the_process(signal.SIGTERM, told):
        serving = [stop_signals(*one) for one in events]
        for one in serving:
            one.__enter__()
        leaves, stays = (0, 1) if first_in_leaves_first else (1, 0)
        serving[leaves].__exit__(None, None, None)
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(events[stays][0].wait(), 5)
        assert not events[leaves][0].is_set()
        assert told == []
        serving[stays].__exit__(None, None, None)
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(0)
    assert told == ["application"]
