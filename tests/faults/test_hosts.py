"""Etcd, agents and caller on hosts of their own, and the network between them fails."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

pytest.importorskip("pyetcd")

from agent_reach.testing.etcd import EtcdServer
from tests.faults.hosts import Hosts, NotPermitted
from tests.faults.support import Crew, Load, client, incarnations, known, until

pytestmark = pytest.mark.etcd


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    """Three: one for etcd, two for agents."""
    try:
        with Hosts(3) as made:
            yield made
    except NotPermitted as why:
        pytest.skip(f"no network namespaces here: {why}")


@pytest.fixture(scope="module")
def far_etcd(hosts: Hosts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    place = hosts[0]
    folder = tmp_path_factory.mktemp("etcd")
    with EtcdServer(folder / "data", host=place.address, launcher=place.launcher) as server:
        yield server


@pytest.fixture(autouse=True)
def _whole(hosts: Hosts) -> Iterator[None]:
    yield
    for number in range(3):
        hosts[number].heal()


def reaches(hosts: Hosts, number: int, other: int) -> bool:
    """True if a TCP connection from one host to a closed port of another is answered."""
    code = (
        "import socket,sys; s=socket.socket(); s.settimeout(0.5); sys.exit(s.connect_ex((sys.argv[1], 9)) != 111)"
    )
    command = [*hosts[number].launcher, sys.executable, "-c", code, hosts[other].address]
    return subprocess.run(command, timeout=10).returncode == 0


async def test_a_host_reaches_another_until_it_is_unplugged_or_barred(hosts: Hosts) -> None:
    assert reaches(hosts, 0, 1)
    hosts[0].unplug()
    assert not reaches(hosts, 0, 1)
    assert not reaches(hosts, 1, 0)
    hosts[0].heal()
    await until(lambda: reaches(hosts, 0, 1))
    hosts[0].drop_to(hosts[1])
    assert not reaches(hosts, 0, 1)
    assert reaches(hosts, 0, 2)
    hosts[0].heal()
    await until(lambda: reaches(hosts, 0, 1))


@pytest.mark.parametrize("broken", ["unplugged", "deaf", "mute"])
async def test_an_agent_whose_network_fails_is_replaced_and_back_when_it_is_healed(
    hosts: Hosts, far_etcd: EtcdServer, namespace: str, crew: Crew, broken: str
) -> None:
    for number, agent_id in ((1, "lost"), (2, "near")):
        listen = f"{hosts[number].address}:0"
        crew.start(agent_id, far_etcd.url, listen=listen, launcher=hosts[number].launcher)
    async with client(far_etcd.url, namespace) as caller:
        await until(lambda: known(caller).keys() == {"lost", "near"})
        before = known(caller)
        async with Load(caller) as load:
            match broken:
                case "unplugged":
                    hosts[1].unplug()
                case "mute":
                    hosts[1].drop_to(hosts[0])
                case "deaf":
                    hosts[0].drop_to(hosts[1])
            if broken == "unplugged":
                await until(lambda: known(caller).keys() == {"near"})
            elif broken == "mute":
                # Only its way to etcd is closed.
                await until(lambda: "lost" not in incarnations(far_etcd, namespace))
            else:
                await load.lasts(5)
            hosts[0].heal()
            hosts[1].heal()
            await until(lambda: known(caller) == before == incarnations(far_etcd, namespace), 30)
            await until(lambda: caller.state.connected)
        reply = await caller.call("echo.say.v1", {"text": "x"}, agent_id="lost")
        assert reply.data["text"] == "x"
        assert load.failed == []


async def test_while_etcds_host_is_unplugged_the_others_call_each_other(
    hosts: Hosts, far_etcd: EtcdServer, namespace: str, crew: Crew
) -> None:
    for number, agent_id in ((1, "one"), (2, "two")):
        listen = f"{hosts[number].address}:0"
        crew.start(agent_id, far_etcd.url, listen=listen, launcher=hosts[number].launcher)
    async with client(far_etcd.url, namespace) as caller:
        await until(lambda: known(caller).keys() == {"one", "two"})
        before = known(caller)
        async with Load(caller) as load:
            hosts[0].unplug()
            await until(lambda: caller.state.stale)
            await load.lasts(4)
            assert known(caller) == before
            hosts[0].heal()
            await until(lambda: caller.state.connected and not caller.state.stale, 30)
            await until(lambda: known(caller) == before == incarnations(far_etcd, namespace), 30)
        assert load.failed == []
