"""A client starts and ends in bounded time, whatever etcd does just then."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("pyetcd")

from agent_reach import RegistryConfig, RegistryUnavailable
from agent_reach.testing.etcd import EtcdServer
from tests.faults.proxy import Proxy
from tests.faults.support import QUICK, ROOT, Crew, client, entries, until

pytestmark = pytest.mark.etcd


def black_hole(proxy: Proxy, server: EtcdServer) -> None:
    proxy.to_server.black_hole()
    proxy.to_client.black_hole()


@pytest.mark.parametrize("requests", ["quiet", "under way"])
@pytest.mark.parametrize(
    "trouble",
    [
        pytest.param(lambda proxy, server: server.pause(), id="frozen"),
        pytest.param(lambda proxy, server: server.kill(), id="killed"),
        pytest.param(black_hole, id="black hole"),
        pytest.param(lambda proxy, server: proxy.to_client.black_hole(), id="no answers"),
        pytest.param(lambda proxy, server: (proxy.refuse(), proxy.cut()), id="refused"),
    ],
)
async def test_closing_takes_two_seconds_at_most(
    server: EtcdServer,
    proxy: Proxy,
    namespace: str,
    trouble: Callable[[Proxy, EtcdServer], object],
    requests: str,
) -> None:
    # With requests that hang for long, and heartbeats and refreshes that come often.
    config = RegistryConfig(lease_ttl_s=2.0, refresh_s=0.5, refresh_jitter_s=0.1, request_timeout_s=20.0)
    agent = client(proxy.url, namespace, "a", config=config, serves=True)
    async with agent:
        await until(lambda: agent.state.registered)
        await asyncio.to_thread(trouble, proxy, server)
        if requests == "under way":
            # Nothing tells of a request that hangs; each began by then.
            await asyncio.sleep(1.0)
        closing_at = time.monotonic()
        await agent.aclose()
        # It must take 2 s at most; the rest is for a busy machine.
        assert time.monotonic() - closing_at < 5


async def test_a_process_that_starts_while_etcd_is_down_calls_by_what_the_last_one_knew(
    server: EtcdServer, namespace: str, crew: Crew, tmp_path: Path
) -> None:
    config = replace(QUICK, snapshot_path=tmp_path / "snapshot.json")
    crew.start("a", server.url)
    async with client(server.url, namespace, config=config) as first:
        await first.wait_for("echo.say.v1", 20)
    server.kill()
    async with client(server.url, namespace) as without:
        with pytest.raises(RegistryUnavailable):
            await without.call("echo.say.v1", {"text": "x"}, timeout=1)
    async with client(server.url, namespace, config=config) as second:
        reply = await second.call("echo.say.v1", {"text": "still there"})
        assert (reply.data["text"], reply.stale) == ("still there", True)
        assert second.state.registry == "stale"
        assert second.state.index_age_s is not None
        assert (await second.resolve("echo.say.v1")).stale
        server.start()
        crew.start("b", server.url)
        await until(lambda: {agent.agent_id for agent in second.agents()} == {"a", "b"})
        assert second.state.registry == "fresh"


async def test_an_entry_that_was_changed_ends_with_its_process(server: EtcdServer, namespace: str) -> None:
    """A write without the lease would leave a ghost for ever."""
    code = (
        f"from tests.faults.test_start_and_end import *; asyncio.run(change_and_die({server.url!r}, {namespace!r}))"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, cwd=ROOT)
    await until(lambda: "changed" in server.ctl("get", "--prefix", f"/agent-reach/v1/{namespace}/"))
    assert await process.wait() == -signal.SIGKILL
    assert entries(server, namespace).keys() == {"a"}
    await until(lambda: entries(server, namespace) == {}, 10.0)


async def change_and_die(url: str, namespace: str) -> None:
    """What the process of the test above does."""
    async with client(url, namespace, "a", serves=True) as agent:
        await until(lambda: agent.state.registered)
        await agent.update(metadata={"is": "changed"})
        os.kill(os.getpid(), signal.SIGKILL)
