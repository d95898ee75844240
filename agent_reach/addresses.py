"""Under which URL peers reach a listening address."""

from __future__ import annotations

import re
import socket
from urllib.parse import urlsplit

from agent_reach.errors import ConfigError
from agent_reach.model import check_url

__all__ = ["advertised_url", "loopback_url", "parse_listen"]

_WILDCARDS = ("0.0.0.0", "::", "")  # noqa: S104 - told apart, not bound


def parse_listen(listen: str) -> tuple[str, int]:
    """Return (host, port) of `host:port` or `[ipv6]:port`. Raises ConfigError for anything else."""
    match = re.fullmatch(r"(?:\[([0-9A-Fa-f:.%]+)\]|([^\[\]:/@\s]*)):([0-9]{1,5})", str(listen))
    if match is None or int(match[3]) > 65535 or not (match[1] or match[2]):
        raise ConfigError(
            f"listen={listen!r} must be host:port, like '0.0.0.0:9101' or '[::1]:9101'; port 0 takes a free one"
        )
    return match[1] or match[2], int(match[3])


def advertised_url(host: str, port: int, *, registry_address: str) -> str:
    """The URL that peers dial for a listening address.

    For a wildcard it is the address that this host reaches the registry from: where the registry is, the peers
    are. Raises ConfigError if that can't be told, or if peers couldn't dial it.
    """
    if host in _WILDCARDS:
        host = _own_address(registry_address)
    try:
        return check_url(_url(host, port))
    except ValueError as error:
        raise ConfigError(f"peers can't dial what listen= says: {error}; pass advertise=") from None


def loopback_url(host: str, port: int) -> str:
    """The URL under which this very host reaches a listening address."""
    if host in _WILDCARDS:
        host = "::1" if host == "::" else "127.0.0.1"
    return _url(host, port)


def _url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _own_address(registry_address: str) -> str:
    """This host's address on the route to the registry; connecting a UDP socket sends nothing."""
    first = registry_address.partition("://")[2].partition(",")[0]
    target = urlsplit(f"//{first}")
    try:
        host, port = target.hostname or "127.0.0.1", target.port or 2379
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, proto) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except (OSError, ValueError) as error:
        raise ConfigError(f"which address do peers dial? Pass advertise='http://ADDRESS:PORT' ({error})") from None
