"""Registry urls: what they open, and what a wrong one is told."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from agent_reach.config import RegistryConfig
from agent_reach.errors import ConfigError
from agent_reach.registry.etcd_client import Login
from agent_reach.registry.memory import MemoryRegistry
from agent_reach.registry.urls import open_registry
from agent_reach.testing import ManualClock

CONFIG = RegistryConfig()


def test_a_registry_object_is_returned_as_it_is() -> None:
    registry = MemoryRegistry()
    assert open_registry(registry, CONFIG, ManualClock()) is registry


def test_a_memory_url_names_a_registry_of_this_process_on_the_given_clock() -> None:
    clock = ManualClock()
    registry = open_registry("memory://urls-test", CONFIG, clock)
    assert registry is MemoryRegistry.named("urls-test")
    assert registry.clock is clock
    assert registry.address == "memory://urls-test"


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("etcd://127.0.0.1:2379", "etcd://127.0.0.1:2379"),
        ("etcd://etcd.internal", "etcd://etcd.internal:2379"),
        ("etcd://h1:2379,h2:23790/", "etcd://h1:2379,h2:23790"),
        ("etcd://[::1]:2379,[fe80::1]", "etcd://[::1]:2379,[fe80::1]:2379"),
        ("etcds://h1:2379", "etcds://h1:2379"),
        ("etcd://user:pass@h:2379", "etcd://h:2379"),
    ],
)
def test_etcd_urls_open_without_connecting(url: str, address: str) -> None:
    registry = open_registry(url, CONFIG, ManualClock())
    assert registry.address == address
    registry.close()


def test_user_and_password_are_decoded_and_never_shown() -> None:
    registry = open_registry("etcd://us%40er:s3%3Acr%2Fet@h:2379", CONFIG, ManualClock())
    assert registry._connections._login == Login("us@er", "s3:cr/et")
    assert "s3" not in repr(registry) + registry.address
    registry.close()


def test_certificate_files_are_read_and_a_missing_one_is_named(tmp_path: Path) -> None:
    missing = tmp_path / "ca.pem"
    with pytest.raises(ConfigError, match=r"ca\.pem.*can't be read"):
        open_registry(f"etcds://h:2379?ca={missing}", CONFIG, ManualClock())


@pytest.mark.parametrize(
    "url",
    [
        "",
        "h:2379",
        "etcd:h:2379",
        "redis://h:6379",
        "http://h:2379",
        "etcd://",
        "etcd://:2379",
        "etcd://h:",
        "etcd://h:0",
        "etcd://h:65536",
        "etcd://h:port",
        "etcd://h1:2379,,h2:2379",
        "etcd://::1:2379",
        "etcd://h:2379/path",
        "etcd://h h:2379",
        "etcd://user@h:2379",
        "etcd://:secret@h:2379",
        "etcd://h:2379?ca=x",
        "etcds://h:2379?verify=no",
        "etcds://h:2379?cert=x",
        "memory://",
        "memory://a/b",
    ],
)
def test_a_wrong_url_is_told_what_to_write(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_registry(url, CONFIG, ManualClock())
    assert "etcd://" in str(caught.value) or "cert" in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "etcd://user:s3cret@:2379",
        "etcd://user:s3cret@h:port",
        "redis://user:s3cret@h",
        "user:s3cret@h",
        "etcd://:s3cret@h",
    ],
)
def test_no_error_repeats_a_password(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_registry(url, CONFIG, ManualClock())
    assert "s3cret" not in str(caught.value)


def test_who_doesnt_use_etcd_doesnt_load_grpc() -> None:
    code = (
        "import sys; from agent_reach.registry.urls import open_registry;"
        "from agent_reach.config import RegistryConfig;"
        "open_registry('memory://x', RegistryConfig(), None); assert not {'grpc', 'pyetcd'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
