"""The tools of the other tests in this folder do what they say."""

from __future__ import annotations

import json
import os
import socket
import ssl
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("pyetcd")

from agent_reach.config import RegistryConfig
from agent_reach.errors import ConfigError, RegistryUnavailable
from agent_reach.registry.urls import open_registry
from agent_reach.testing.etcd import EtcdServer
from agent_reach.testing.etcd_cluster import EtcdCluster
from agent_reach.testing.etcd_tls import EtcdTls
from agent_reach.testing.held_ports import HeldPorts

pytestmark = pytest.mark.etcd

CONFIG = RegistryConfig(request_timeout_s=2.0)


def until(check: Callable[[], object], within_s: float = 20.0) -> None:
    deadline = time.monotonic() + within_s
    while not check():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.02)


# --- one server -------------------------------------------------------------------------------------------


def test_etcdctl_reads_and_writes_and_says_what_is_wrong(etcd: EtcdServer) -> None:
    etcd.ctl("put", "/ctl/a", "1")
    answer = json.loads(etcd.ctl("get", "/ctl/a", "--write-out=json"))
    assert answer["count"] == 1
    with pytest.raises(RegistryUnavailable, match="requested lease not found"):
        etcd.ctl("put", "/ctl/a", "1", "--lease=7")


def test_what_was_compacted_is_gone(own_etcd: EtcdServer) -> None:
    for value in ("1", "2", "3"):
        own_etcd.ctl("put", "/a", value)
    revision = own_etcd.compact()
    assert revision == int(own_etcd.status()["header"]["revision"])
    assert own_etcd.ctl("get", "/a").split() == ["/a", "3"]
    with pytest.raises(RegistryUnavailable, match="compacted"):
        own_etcd.ctl("get", "/a", f"--rev={revision - 1}")
    with pytest.raises(RegistryUnavailable, match="compacted"):
        own_etcd.compact(revision - 1)


def test_the_process_and_its_processor_time_can_be_seen(own_etcd: EtcdServer) -> None:
    pid = own_etcd.pid
    assert pid is not None
    os.kill(pid, 0)
    before = own_etcd.cpu_s()
    until(lambda: own_etcd.status() and own_etcd.cpu_s() > before)
    own_etcd.kill()
    assert own_etcd.pid is None
    with pytest.raises(RegistryUnavailable, match="doesn't run"):
        own_etcd.cpu_s()


def test_with_authentication_on_the_url_is_roots_and_nobody_elses(own_etcd: EtcdServer) -> None:
    own_etcd.enable_auth("s3/cret")
    registry = open_registry(own_etcd.url, CONFIG)
    assert registry.list("prod").records == ()
    registry.close()
    with pytest.raises(RegistryUnavailable, match="authentication failed"):
        own_etcd.ctl("--user=root:wr0ng", "get", "/a")
    own_etcd.ctl("put", "/a", "1")
    own_etcd.restart()
    assert own_etcd.compact() >= 2
    own_etcd.wipe()
    assert "@" not in own_etcd.url
    assert own_etcd.ctl("get", "/a") == ""


@pytest.mark.parametrize("mutual", [False, True])
def test_over_tls_the_url_is_all_that_a_client_needs(pem: Path, tmp_path: Path, mutual: bool) -> None:
    ca = pem / "ca.pem"
    tls = EtcdTls(cert=pem / "server.pem", key=pem / "server.key", ca=ca, client_ca=ca if mutual else None)
    with EtcdServer(tmp_path / "data", tls=tls) as server:
        assert server.url.startswith("etcds://127.0.0.1:")
        registry = open_registry(server.url, CONFIG)
        assert registry.list("prod").records == ()
        registry.close()
        server.ctl("put", "/a", "1")
        assert server.compact() == 2
        stranger = ssl.create_default_context(cafile=ca)
        address = f"https://127.0.0.1:{server.port}/health"
        if mutual:
            with pytest.raises(OSError, match="certificate|reset|EOF"):
                urllib.request.urlopen(address, context=stranger, timeout=2)
        else:
            urllib.request.urlopen(address, context=stranger, timeout=2).close()


def test_ports_are_nobody_elses_while_they_are_held() -> None:
    ports = HeldPorts(50)
    assert len(set(ports.numbers)) == 50
    assert not set(ports.numbers) & set(HeldPorts(200).numbers)
    for number in ports.numbers:
        with socket.create_server(("127.0.0.1", number)):
            pass
    low, high = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    assert not [number for number in ports.numbers if int(low) <= number <= int(high)]
    ports.release()


# --- a cluster --------------------------------------------------------------------------------------------


def test_a_cluster_has_one_leader_and_all_members_say_the_same(cluster: EtcdCluster) -> None:
    assert [member.is_leader for member in cluster.members].count(True) == 1
    assert cluster.leader().is_leader
    assert len(cluster.followers()) == 2
    cluster.members[0].ctl("put", "/a", "1")
    assert [member.ctl("get", "/a").split() for member in cluster.members] == [["/a", "1"]] * 3
    registry = open_registry(cluster.url, CONFIG)
    assert cluster.url.count(",") == 2
    assert registry.list("prod").revision >= 2
    registry.close()


def test_a_frozen_leader_is_followed_by_another(cluster: EtcdCluster) -> None:
    old = cluster.leader()
    old.pause()
    new = cluster.leader()
    assert new is not old
    assert not old.is_leader
    assert old.running
    new.ctl("put", "/a", "2")
    cluster.heal()
    until(lambda: not old.is_leader)
    assert old.ctl("get", "/a").split() == ["/a", "2"]


def test_without_a_majority_there_is_no_leader_until_one_is_back(cluster: EtcdCluster) -> None:
    first, second = cluster.followers()
    first.kill()
    cluster.leader()
    second.kill()
    until(lambda: not any(member.is_leader for member in cluster.members))
    with pytest.raises(RegistryUnavailable, match="no leader"):
        cluster.leader(timeout_s=0.2)
    second.start()
    cluster.leader()
    first.start()
    assert len(cluster.followers()) == 2


def test_a_wiped_cluster_begins_anew_and_one_member_alone_cant_be_wiped(cluster: EtcdCluster) -> None:
    cluster.members[0].ctl("put", "/wiped", "1")
    with pytest.raises(ConfigError, match="alone"):
        cluster.members[0].wipe()
    cluster.wipe()
    assert cluster.members[0].ctl("get", "/wiped") == ""
    assert int(cluster.leader().status()["header"]["revision"]) == 1
