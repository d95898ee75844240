"""One event loop after the other, two at once, and never one for another's client; on a real etcd."""

from __future__ import annotations

import asyncio
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor

import pytest

from agent_reach import ClientNotOpen, ReachClient, ReachConfig, RegistryConfig, register_agent
from agent_reach.testing.etcd import EtcdServer
from tests.faults.support import entries
from tests.registry.support import eventually

pytestmark = pytest.mark.etcd

CONFIG = ReachConfig(registry=RegistryConfig(lease_ttl_s=2.0))


@register_agent("echo.say.v1", idempotent=True)
async def say(text: str) -> dict[str, object]:
    """Give the text back, with the thread."""
    return {"text": text, "thread": threading.current_thread().name}


def agent(etcd: EtcdServer, namespace: str, agent_id: str) -> ReachClient:
    return ReachClient(
        agent_id,
        handlers=[say],
        listen="127.0.0.1:0",
        registry=etcd.url,
        namespace=namespace,
        config=CONFIG,
    )


@pytest.fixture
def namespace() -> str:
    return uuid.uuid4().hex[:8]


async def call_itself(reach: ReachClient) -> str:
    async with reach:
        await reach.wait_for("echo.say.v1", timeout=20)
        (info,) = reach.agents()
        assert (await reach.call("echo.say.v1", {"text": "x"})).agent_id == reach.agent_id
        return info.incarnation


@pytest.mark.parametrize("same", [True, False], ids=["the same client", "two clients"])
def test_two_runs_in_a_row_each_register_call_and_leave(etcd: EtcdServer, namespace: str, same: bool) -> None:
    first = agent(etcd, namespace, "a")
    second = first if same else agent(etcd, namespace, "a")
    incarnations = []
    for reach in (first, second):
        incarnations.append(asyncio.run(call_itself(reach)))
        # At once, so the second run never waits for the lease of the first.
        assert entries(etcd, namespace) == {}
    assert len(set(incarnations)) == 2


def test_two_clients_in_the_loops_of_two_threads_call_each_other(etcd: EtcdServer, namespace: str) -> None:
    done = threading.Barrier(2, timeout=30)

    async def life(own_id: str, other_id: str) -> list[object]:
        async with agent(etcd, namespace, own_id) as reach:
            await eventually(lambda: len(reach.agents()) == 2)
            payload = {"text": own_id}
            calls = [reach.call("echo.say.v1", payload, agent_id=other_id) for _ in range(50)]
            replies = await asyncio.gather(*calls)
            # Neither leaves before the other has had its answers.
            await asyncio.to_thread(done.wait)
            assert {reply.data["text"] for reply in replies} == {own_id}
            return [reply.data["thread"] for reply in replies] + [threading.current_thread().name]

    with ThreadPoolExecutor(2) as pool:
        one = pool.submit(asyncio.run, life("one", "two"))
        two = pool.submit(asyncio.run, life("two", "one"))
        heard_by_one, heard_by_two = one.result(60), two.result(60)
    # Each was answered on the other's loop, in the other's thread.
    assert set(heard_by_one[:-1]) == {heard_by_two[-1]}
    assert set(heard_by_two[:-1]) == {heard_by_one[-1]}
    assert entries(etcd, namespace) == {}


async def test_a_client_of_another_loop_is_refused_there_and_goes_on_in_its_own(
    etcd: EtcdServer, namespace: str
) -> None:
    async with agent(etcd, namespace, "a") as reach:
        await reach.wait_for("echo.say.v1", timeout=20)

        async def elsewhere() -> None:
            for use in (
                lambda: reach.call("echo.say.v1", {"text": "x"}),
                lambda: reach.resolve("echo.say.v1"),
                lambda: reach.wait_for("echo.say.v1"),
                lambda: reach.aclose(),
            ):
                with pytest.raises(ClientNotOpen, match="another process, event loop or thread"):
                    await use()
            for ask in (reach.agents, lambda: reach.explain("echo.say.v1"), lambda: reach.state):
                with pytest.raises(ClientNotOpen, match="another process, event loop or thread"):
                    ask()

        await asyncio.to_thread(asyncio.run, elsewhere())
        assert (await reach.call("echo.say.v1", {"text": "x"})).agent_id == "a"
        assert "a" in entries(etcd, namespace)
