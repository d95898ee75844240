"""Ports of the loopback interface for servers that tests start, stop and start again."""

from __future__ import annotations

import random
import socket
import weakref
from pathlib import Path

__all__ = ["HeldPorts"]

_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")


class HeldPorts:
    """Free ports, kept from every other `HeldPorts` on this machine until `release` or the end of the process.

    They lie outside the range from which the kernel serves outgoing connections and port 0: nobody gets one by
    chance while the server that it is meant for is down. `numbers` are all different. Raises `OSError` if
    none can be found.
    """

    def __init__(self, count: int) -> None:
        held = [_hold() for _ in range(count)]
        self.numbers = tuple(number for number, _ in held)
        self.release = weakref.finalize(self, _close, [mark for _, mark in held])


def _close(marks: list[socket.socket]) -> None:
    for mark in marks:
        mark.close()


def _hold() -> tuple[int, socket.socket]:
    candidates = _range()
    for _ in range(1_000):
        number = random.choice(candidates)
        mark = socket.socket(socket.AF_UNIX)
        try:
            # A name in the abstract namespace has one owner, and goes with it: no file to clean up after a crash.
            mark.bind(f"\0agent-reach-port-{number}")
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", number))
        except OSError:
            mark.close()
        else:
            return number, mark
    raise OSError(f"of 1,000 ports tried between {candidates.start} and {candidates.stop} none is free")


def _range() -> range:
    """The larger side of the ephemeral ports, above the well-known ones."""
    try:
        low, high = (int(word) for word in _EPHEMERAL.read_text().split())
    except (OSError, ValueError):
        low, high = 32768, 60999
    below, above = range(10_000, low), range(high + 1, 65_536)
    return below if len(below) >= len(above) else above
