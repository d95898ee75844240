"""From a registry url to a registry."""

from __future__ import annotations

import re
from urllib.parse import parse_qsl, unquote

from agent_reach.config import RegistryConfig
from agent_reach.errors import ConfigError
from agent_reach.ports import Clock, Registry
from agent_reach.registry.memory import MemoryRegistry

__all__ = ["open_registry"]

_HELP = (
    "write 'etcd://host:2379', 'etcd://h1:2379,h2:2379', 'etcd://user:password@host:2379', "
    "'etcds://host:2379?ca=ca.pem&cert=client.pem&key=client.key', or 'memory://NAME'"
)
_HOST = re.compile(r"[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]")
_NAME = re.compile(r"[A-Za-z0-9._-]+")
_DEFAULT_PORT = 2379


def open_registry(registry: str | Registry, config: RegistryConfig, clock: Clock | None = None) -> Registry:
    """Return the registry that a url names; a `Registry` object is returned as it is. Nothing is connected yet.

    `etcd://` and `etcds://` (TLS) take several hosts with commas, user and password (percent-encoded where they
    hold `@ : / ?`), and for TLS the files `?ca=…&cert=…&key=…`. `memory://NAME` is this process's registry of
    that name. Raises `ConfigError` for anything else.
    """
    if not isinstance(registry, str):
        return registry
    scheme, separator, rest = registry.partition("://")
    if not separator:
        # Not shown: without a scheme nobody can say whether it holds a password.
        raise ConfigError(f"the registry url has no scheme; {_HELP}")
    if scheme == "memory":
        if not _NAME.fullmatch(rest):
            raise ConfigError(
                f"{registry!r}: a memory registry needs a name of letters, digits, '.', '_', '-'; {_HELP}"
            )
        return MemoryRegistry.named(rest, clock)
    if scheme in ("etcd", "etcds"):
        return _open_etcd(scheme, rest, config)
    raise ConfigError(f"the registry scheme {scheme!r} is unknown; {_HELP}")


def _open_etcd(scheme: str, rest: str, config: RegistryConfig) -> Registry:
    place, _, query = rest.partition("?")
    login, at, hosts = place.rpartition("@")
    username = password = None
    if at:
        user, colon, secret = login.partition(":")
        if not (user and colon and secret):
            raise ConfigError(f"the registry url needs user and password before the '@'; {_HELP}")
        username, password = unquote(user), unquote(secret)
    endpoints = [_endpoint(host) for host in hosts.removesuffix("/").split(",")]
    files = dict(parse_qsl(query, keep_blank_values=True))
    if unknown := files.keys() - {"ca", "cert", "key"}:
        raise ConfigError(f"the registry url has unknown options {sorted(unknown)}; {_HELP}")
    if files and scheme == "etcd":
        raise ConfigError(f"ca, cert and key are for TLS, so the scheme is etcds; {_HELP}")

    # gRPC takes a quarter of a second to import; who doesn't use etcd shouldn't pay for it.
    from agent_reach.registry.etcd import EtcdRegistry

    return EtcdRegistry(
        endpoints,
        config=config,
        secure=scheme == "etcds",
        ca=files.get("ca"),
        cert=files.get("cert"),
        key=files.get("key"),
        username=username,
        password=password,
    )


def _endpoint(text: str) -> str:
    """Check one `host:port` and fill the port in. The text is never a secret: the part before '@' is off."""
    host, colon, port = text.rpartition(":") if not text.endswith("]") else (text, "", "")
    if not colon:
        host, port = text, str(_DEFAULT_PORT)
    if not _HOST.fullmatch(host):
        raise ConfigError(f"{text!r} is no host for a registry (IPv6 needs brackets); {_HELP}")
    if not re.fullmatch(r"[0-9]{1,5}", port) or not 0 < int(port) < 65536:
        raise ConfigError(f"{text!r} has no port between 1 and 65535; {_HELP}")
    return f"{host}:{port}"
