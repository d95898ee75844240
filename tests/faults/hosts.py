"""Several hosts on this machine: network namespaces on a bridge, each with an address of its own.

The tests' own process is one more host on that bridge, with the bridge's address.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
from typing import Self

# An address on the local network that nobody has: what is sent there is dropped without a word.
_NOBODY = "02:00:00:00:de:ad"


class NotPermitted(Exception):
    """This process may not make network namespaces; the message says what went wrong."""


class Host:
    """One namespace. `launcher` goes before a command that is to run there."""

    def __init__(self, name: str, link: str, address: str) -> None:
        self.name, self.address = name, address
        self.launcher = ("ip", "netns", "exec", name)
        self._link = link
        self._barred: list[str] = []

    def unplug(self) -> None:
        """Take its link down: nothing comes or goes, and no connection is told."""
        _ip("link", "set", self._link, "down")

    def drop_to(self, other: Host) -> None:
        """Drop what it sends to `other`; what comes from there still arrives."""
        _ip(
            *("-n", self.name, "neigh", "replace", other.address),
            *("lladdr", _NOBODY, "dev", "eth0", "nud", "permanent"),
        )
        self._barred.append(other.address)

    def heal(self) -> None:
        """Plug it in again, and drop nothing."""
        _ip("link", "set", self._link, "up")
        while self._barred:
            _ip("-n", self.name, "neigh", "del", self._barred.pop(), "dev", "eth0")


class Hosts:
    """Makes `count` hosts, and removes them at the end of the context. Raises `NotPermitted`."""

    def __init__(self, count: int) -> None:
        mark = f"ar{os.getpid()}"
        # From the network that RFC 2544 sets aside for tests of networks.
        self._network = f"198.{random.choice((18, 19))}.{random.randrange(256)}"
        self._bridge = f"{mark}b"
        self._hosts = [
            Host(f"{mark}h{number}", f"{mark}v{number}", f"{self._network}.{number + 2}") for number in range(count)
        ]

    def __enter__(self) -> Self:
        if shutil.which("ip") is None:
            raise NotPermitted("there is no `ip` command here (iproute2)")
        try:
            self._make()
        except (subprocess.CalledProcessError, OSError) as error:
            self._remove()
            raise NotPermitted(f"{error}: {getattr(error, 'stderr', '')}".strip()) from None
        return self

    def __exit__(self, *_: object) -> None:
        self._remove()

    def __getitem__(self, number: int) -> Host:
        return self._hosts[number]

    def _make(self) -> None:
        _ip("link", "add", self._bridge, "type", "bridge")
        _ip("address", "add", f"{self._network}.1/24", "dev", self._bridge)
        _ip("link", "set", self._bridge, "up")
        for host in self._hosts:
            _ip("netns", "add", host.name)
            _ip("link", "add", host._link, "type", "veth", "peer", "name", "eth0", "netns", host.name)
            _ip("link", "set", host._link, "master", self._bridge, "up")
            _ip("-n", host.name, "address", "add", f"{host.address}/24", "dev", "eth0")
            for device in ("eth0", "lo"):
                _ip("-n", host.name, "link", "set", device, "up")
            # That it may be made doesn't say that it may be entered.
            subprocess.run([*host.launcher, "true"], check=True, capture_output=True, text=True, timeout=10)

    def _remove(self) -> None:
        for host in self._hosts:
            _ip("link", "del", host._link, check=False)
            _ip("netns", "del", host.name, check=False)
        _ip("link", "del", self._bridge, check=False)


def _ip(*words: str, check: bool = True) -> None:
    subprocess.run(["ip", *words], check=check, capture_output=True, text=True, timeout=10)
