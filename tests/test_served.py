"""The half that is called: registered once it answers, mounted in a host, drained in order."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI

from agent_reach import (
    AgentNotFound,
    ConfigError,
    HttpxDialer,
    MemoryRegistry,
    ReachClient,
    ReachConfig,
    RegistryConfig,
    SchemaConflict,
    ServingConfig,
    register_agent,
)
from agent_reach.addresses import advertised_url, loopback_url
from agent_reach.ports import SystemClock
from agent_reach.serving.uvicorn_server import UvicornServer
from tests.routing.world import CAPABILITY

CONFIG = ReachConfig(serving=ServingConfig(linger_s=0.0))


@register_agent(CAPABILITY, idempotent=True)
async def retrieve(query: str, wait_s: float = 0.0) -> str:
    """Find an article."""
    await asyncio.sleep(wait_s)
    return f"about {query}"


async def until(check: Callable[[], bool], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not check():
        assert time.monotonic() < deadline, "it never became true"
        await asyncio.sleep(0.01)


async def test_serve_forever_registers_what_answers_and_drains_on_sigterm() -> None:
    registry = MemoryRegistry()
    before = signal.getsignal(signal.SIGTERM)
    async with (
        ReachClient(registry=registry) as reach,
        ReachClient("kb-1", handlers=[retrieve], registry=registry, listen="127.0.0.1:0", config=CONFIG) as kb,
    ):
        serving = asyncio.ensure_future(kb.serve_forever())
        (info,) = await reach.wait_for(CAPABILITY, timeout=10)
        assert info.endpoint.url.startswith("http://127.0.0.1:")
        slow = asyncio.ensure_future(reach.call(CAPABILITY, {"query": "flood", "wait_s": 0.5}))
        await until(lambda: kb._served._app is not None and kb._served._app.in_flight == 1)
        os.kill(os.getpid(), signal.SIGTERM)
        await until(lambda: kb.state.draining)
        await asyncio.wait_for(serving, 10)
        # What ran when the signal came was finished and answered.
        assert (await slow).data == "about flood"
        assert kb.state.registration == "withdrawn"
        assert reach.agents() == ()
    assert signal.getsignal(signal.SIGTERM) is before


async def test_cancelling_serve_forever_closes_its_socket_and_withdraws() -> None:
    registry = MemoryRegistry()
    async with ReachClient(registry=registry) as reach:
        async with ReachClient(handlers=[retrieve], registry=registry, listen="127.0.0.1:0", config=CONFIG) as kb:
            serving = asyncio.ensure_future(kb.serve_forever())
            (info,) = await reach.wait_for(CAPABILITY, timeout=10)
            serving.cancel()
            with pytest.raises(asyncio.CancelledError):
                await serving
        await until(lambda: reach.agents() == ())
        async with httpx.AsyncClient() as client:
            with pytest.raises(httpx.ConnectError):
                await client.get(f"{info.endpoint.url}/health")


async def test_nothing_is_registered_before_invoke_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe meets a server that doesn't accept yet; the entry comes when it does."""
    registry, ready = MemoryRegistry(), asyncio.Event()
    start = UvicornServer.start

    async def late(self: UvicornServer) -> None:
        await start(self)
        app = self._server.config.loaded_app

        async def warming_up(scope: object, receive: object, send: Callable[..., Any]) -> None:
            if ready.is_set():
                await app(scope, receive, send)
                return
            await send({"type": "http.response.start", "status": 502, "headers": []})
            await send({"type": "http.response.body", "body": b"warming up"})

        self._server.config.loaded_app = warming_up

    monkeypatch.setattr(UvicornServer, "start", late)
    async with (
        ReachClient(registry=registry) as reach,
        ReachClient(handlers=[retrieve], registry=registry, listen="127.0.0.1:0"),
    ):
        with pytest.raises(AgentNotFound):
            await reach.wait_for(CAPABILITY, timeout=0.5)
        ready.set()
        await reach.wait_for(CAPABILITY, timeout=10)


@asynccontextmanager
async def hosted(app: FastAPI, port: int) -> AsyncIterator[None]:
    """Run a host application with its own uvicorn."""
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_config=None))
    server.install_signal_handlers = lambda: None  # type: ignore[method-assign]
    task = asyncio.ensure_future(server._serve())
    try:
        await until(lambda: server.started or task.done())
        yield
    finally:
        server.should_exit = True
        await task


def free_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return int(held.getsockname()[1])


async def test_mounted_in_fastapi_it_lives_with_the_hosts_lifespan() -> None:
    """S03: a mounted app gets no lifespan of its own; the host's opens the client, and the entry follows."""
    registry, port, order = MemoryRegistry(), free_port(), []
    agent = ReachClient(handlers=[retrieve], registry=registry, advertise=f"http://127.0.0.1:{port}/agent")

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        order.append("host up")
        async with agent:
            yield
        order.append("host down")

    app = FastAPI(lifespan=lifespan)
    app.mount("/agent", agent.asgi())

    @app.get("/own")
    async def own() -> str:
        return "still mine"

    async with ReachClient(registry=registry) as reach:
        async with hosted(app, port):
            (info,) = await reach.wait_for(CAPABILITY, timeout=10)
            assert info.endpoint.url == f"http://127.0.0.1:{port}/agent"
            assert (await reach.call(CAPABILITY, {"query": "x"})).data == "about x"
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
                assert (await client.get("/own")).json() == "still mine"
                assert (await client.get("/agent/ready")).json()["status"] == "accepting"
        await until(lambda: reach.agents() == ())
    assert order == ["host up", "host down"]


async def test_mounted_without_the_lifespan_it_refuses_loudly(caplog: pytest.LogCaptureFixture) -> None:
    """S03, the other half."""
    agent = ReachClient(handlers=[retrieve], registry=MemoryRegistry(), advertise="http://127.0.0.1:1/agent")
    app = FastAPI()
    app.mount("/agent", agent.asgi())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://host") as client:
        answer = await client.post("/agent/invoke", json={})
        await client.post("/agent/invoke", json={})
    assert answer.status_code == 503
    assert answer.json()["error"]["type"] == "NotStarted"
    # In the host's own log, too, and once.
    assert caplog.text.count("enter the client in the host's lifespan") == 1
    assert "host's lifespan" in answer.json()["error"]["message"]


async def test_served_bare_the_servers_lifespan_opens_and_closes_the_client() -> None:
    registry, port = MemoryRegistry(), free_port()
    agent = ReachClient(handlers=[retrieve], registry=registry, advertise=f"http://127.0.0.1:{port}")
    async with ReachClient(registry=registry) as reach:
        async with hosted(agent.asgi(), port):  # type: ignore[arg-type]
            await reach.wait_for(CAPABILITY, timeout=10)
            assert (await reach.call(CAPABILITY, {"query": "x"})).data == "about x"
        await until(lambda: reach.agents() == ())


async def test_a_mounted_agent_whose_contract_clashes_says_so_in_its_state(
    caplog: pytest.LogCaptureFixture,
) -> None:
    @register_agent(CAPABILITY)
    async def other(question: int) -> int:
        return question

    registry, port = MemoryRegistry(), free_port()
    strict = ReachConfig(registry=RegistryConfig(schema_policy="refuse"))
    agent = ReachClient(
        "late", handlers=[other], registry=registry, advertise=f"http://127.0.0.1:{port}", config=strict
    )
    caplog.set_level(logging.INFO)
    async with (
        ReachClient("kb-1", handlers=[retrieve], registry=registry),
        hosted(agent.asgi(), port),  # type: ignore[arg-type]
    ):
        await until(lambda: agent.state.registration == "refused")
        assert isinstance(agent.state.registry_error, SchemaConflict)
        assert [info.agent_id for info in agent.agents()] == ["kb-1"]
    assert "registration refused" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "start", "message"),
    [
        ({"handlers": [retrieve]}, "serve_forever", "listen='host:port'"),
        ({}, "serve_forever", "nothing to serve"),
        ({}, "asgi", "nothing to serve"),
        ({"handlers": [retrieve]}, "asgi", "advertise="),
    ],
)
async def test_what_is_missing_to_serve_is_named(arguments: dict[str, object], start: str, message: str) -> None:
    async with ReachClient(registry=MemoryRegistry(), **arguments) as reach:

        async def begin() -> None:
            result = getattr(reach, start)()
            if asyncio.iscoroutine(result):
                await result

        with pytest.raises(ConfigError, match=message):
            await begin()


@pytest.mark.parametrize("listen", ["nonsense", ":9101", "127.0.0.1:99999", "::1:9101", 9101, "http://127.0.0.1:1"])
def test_a_bad_listen_is_refused_when_the_client_is_built(listen: Any) -> None:
    with pytest.raises(ConfigError, match="must be host:port"):
        ReachClient(handlers=[retrieve], registry="memory://x", listen=listen)


async def test_a_client_with_listen_serves_from_the_moment_it_is_open_until_it_is_closed() -> None:
    """Nobody has to call serve_forever: that only waits for a signal and drains."""
    registry = MemoryRegistry()
    async with ReachClient(registry=registry) as reach:
        async with ReachClient("kb-1", handlers=[retrieve], registry=registry, listen="127.0.0.1:0") as kb:
            (info,) = await reach.wait_for(CAPABILITY, timeout=10)
            assert kb.state.registered
            assert (await reach.call(CAPABILITY, {"query": "x"})).agent_id == "kb-1"
        assert reach.agents() == ()
        with socket.socket() as probe:
            port = int(info.endpoint.url.rpartition(":")[2])
            assert probe.connect_ex(("127.0.0.1", port)) != 0


async def test_a_taken_port_is_told_when_the_client_is_opened() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        listen = f"127.0.0.1:{held.getsockname()[1]}"
        with pytest.raises(ConfigError, match=f"listen={listen} is taken"):
            async with ReachClient(handlers=[retrieve], registry=MemoryRegistry(), listen=listen):
                pass


async def test_run_refuses_to_start_a_loop_inside_one() -> None:
    with pytest.raises(ConfigError, match="await serve_forever"):
        ReachClient(handlers=[retrieve], registry=MemoryRegistry(), listen="127.0.0.1:0").run()


def test_run_ends_with_one_line_where_it_cannot_serve() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        agent = ReachClient(
            handlers=[retrieve], registry=MemoryRegistry(), listen=f"127.0.0.1:{held.getsockname()[1]}"
        )
        with pytest.raises(SystemExit, match=r"^ConfigError: listen=.* is taken"):
            agent.run()


async def test_handlers_without_an_address_are_refused_on_a_shared_registry() -> None:
    with pytest.raises(ConfigError, match=r"listen='0\.0\.0\.0:9101'"):
        async with ReachClient(handlers=[retrieve], registry="etcd://127.0.0.1:1"):
            pass


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:9101"),
        ("::1", "http://[::1]:9101"),
        ("kb.internal", "http://kb.internal:9101"),
    ],
)
def test_a_listening_address_is_advertised_as_it_is(host: str, url: str) -> None:
    assert advertised_url(host, 9101, registry_address="etcd://127.0.0.1:2379") == url
    assert loopback_url(host, 9101) == url


def test_a_wildcard_address_is_advertised_as_the_one_that_the_registry_sees() -> None:
    """R11: nobody can dial 0.0.0.0."""
    assert advertised_url("0.0.0.0", 9101, registry_address="etcd://127.0.0.1:2379") == "http://127.0.0.1:9101"
    assert loopback_url("0.0.0.0", 9101) == "http://127.0.0.1:9101"
    assert loopback_url("::", 9101) == "http://[::1]:9101"
    with pytest.raises(ConfigError, match="advertise="):
        advertised_url("0.0.0.0", 9101, registry_address="etcd://no-such-host.invalid:2379")


async def test_serve_forever_returns_when_other_code_closes_the_client() -> None:
    kb = ReachClient(handlers=[retrieve], registry=MemoryRegistry(), listen="127.0.0.1:0")
    await kb.__aenter__()
    serving = asyncio.ensure_future(kb.serve_forever())
    await until(lambda: kb.state.registered)
    await kb.aclose()
    await asyncio.wait_for(serving, 5)


async def test_a_client_whose_dialer_goes_through_a_proxy_registers_all_the_same() -> None:
    """Its own address is probed directly: a proxy doesn't know this host's loopback."""
    async with httpx.AsyncClient(proxy="http://127.0.0.1:9") as through_proxy:
        kb = ReachClient(
            handlers=[retrieve],
            registry=MemoryRegistry(),
            listen="127.0.0.1:0",
            dialer=HttpxDialer(through_proxy),
        )
        async with kb:
            await until(lambda: kb.state.registered)


async def test_another_process_of_the_same_id_at_the_address_is_not_taken_for_this_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A predecessor that still answers there would be registered in our name."""
    registry, clock = MemoryRegistry(), SystemClock()
    async with ReachClient("kb-1", handlers=[retrieve], registry=MemoryRegistry(), listen="127.0.0.1:0") as old:
        await until(lambda: old.state.registered)
        (info,) = old.agents()
        young = ReachClient(
            "kb-1", handlers=[retrieve], registry=registry, advertise=info.endpoint.url, clock=clock
        )
        young.asgi()
        async with young:
            await until(lambda: "isn't answered by this process yet" in caplog.text)
            assert not young.state.registered
            assert registry.list("default").records == ()


async def test_asking_for_the_app_again_gives_the_same_and_registers_once() -> None:
    registry, port = MemoryRegistry(), free_port()
    agent = ReachClient(handlers=[retrieve], registry=registry, advertise=f"http://127.0.0.1:{port}")
    app = agent.asgi()
    async with ReachClient(registry=registry) as reach:
        async with hosted(app, port):  # type: ignore[arg-type]
            await reach.wait_for(CAPABILITY, timeout=10)
            assert [agent.asgi() for _ in range(3)] == [app] * 3
        await until(lambda: reach.agents() == ())
        await asyncio.sleep(0)
        assert registry.list("default").records == ()


async def test_the_app_is_asked_for_before_opening_and_not_beside_a_server_of_our_own() -> None:
    registry = MemoryRegistry()
    async with ReachClient(handlers=[retrieve], registry=registry, advertise="http://127.0.0.1:1") as open_already:
        with pytest.raises(ConfigError, match="before the client is opened"):
            open_already.asgi()
    listening = ReachClient(
        handlers=[retrieve], registry=registry, listen="127.0.0.1:0", advertise="http://127.0.0.1:1"
    )
    with pytest.raises(ConfigError, match="leave listen= out"):
        listening.asgi()


async def test_serving_twice_is_refused() -> None:
    async with ReachClient(handlers=[retrieve], registry=MemoryRegistry(), listen="127.0.0.1:0") as kb:
        serving = asyncio.ensure_future(kb.serve_forever())
        await until(lambda: kb.state.registered)
        with pytest.raises(ConfigError, match="called already"):
            await kb.serve_forever()
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


def test_a_mounted_agent_works_again_each_time_its_host_starts() -> None:
    """Two test clients of one application module, or any restart of a lifespan; each in a loop of its own."""

    @register_agent("slow.work.v1")
    async def work() -> str:
        await asyncio.sleep(0.01)
        return "done"

    agent = ReachClient("kb-1", handlers=[work], registry="memory://mounted-twice", advertise="http://127.0.0.1:1")
    app = agent.asgi()
    incarnations = set()

    async def once() -> None:
        transport = httpx.ASGITransport(app=app)  # type: ignore[arg-type]
        async with agent, httpx.AsyncClient(transport=transport, base_url="http://kb") as client:
            incarnations.add((await client.get("/health")).json()["incarnation"])
            body = {
                "protocol": "reach/1", "request_id": "r", "trace_id": "a" * 32, "from_agent": "me",
                "namespace": "default", "target_capability": "slow.work.v1", "target_agent": "kb-1",
                "payload": {}, "ttl_ms": 5000,
            }  # fmt: skip
            assert (await client.post("/invoke", json=body)).json()["data"] == "done"

    for _ in range(2):
        asyncio.run(once())
    assert len(incarnations) == 2
