"""Clients of the registry in a process of their own, for `registry.py`: a command a line, an answer a line.

Three kinds: `watcher` is the library's own; `reload` takes every change for "reload everything", the design to
compare with; and bare watches over one shared mirror, of which a process can hold hundreds.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import random
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from agent_reach.config import RegistryConfig
from agent_reach.errors import ReachError
from agent_reach.events import Event, RegistryChanged
from agent_reach.model import AgentInfo
from agent_reach.ports import Listing, SystemClock, Watch, WatchChanges, WatchLost, WatchMessage, WatchProgress
from agent_reach.registry.etcd import EtcdRegistry
from agent_reach.registry.mirror import Mirror
from agent_reach.registry.records import decode
from agent_reach.registry.trust import Trust
from agent_reach.registry.watching import Watcher
from agent_reach.routing.index import Change, Index, Reset, Upsert

# As many records as the library's own refresh compares besides the newest.
_SPOT_CHECKS = 4
_LOAD_S = 60.0
_PROGRESS_S = 10.0


class _Registry(EtcdRegistry):
    """Counts its lists."""

    def __init__(self, port: int, seed: int) -> None:
        super().__init__([f"127.0.0.1:{port}"], config=RegistryConfig(), rng=random.Random(seed))
        self.lists = 0

    def list(self, namespace: str) -> Listing:
        self.lists += 1
        return super().list(namespace)


class _Client(Protocol):
    """One that keeps an index. `saw` tells since when an incarnation is routable, `failures` what went wrong."""

    registry: _Registry
    index: Index
    saw: dict[str, float]
    failures: int

    async def load(self) -> None:
        """Return once there is an index."""

    async def settle(self) -> None:
        """Return once changes come in."""


class _Watching:
    """The library's own way."""

    def __init__(self, port: int, namespace: str, seed: int) -> None:
        self.registry = _Registry(port, seed)
        self.index = Index()
        self.saw: dict[str, float] = {}
        self.failures = 0
        self._watcher = Watcher(
            self.registry,
            namespace,
            apply=self._apply,
            config=RegistryConfig(),
            clock=SystemClock(),
            rng=random.Random(seed),
            emit=self._emit,
        )

    async def load(self) -> None:
        self._watcher.start()
        await self._watcher.wait_loaded(_LOAD_S)

    async def settle(self) -> None:
        deadline = time.monotonic() + _LOAD_S
        while not self._watcher.view.connected and time.monotonic() < deadline:
            await asyncio.sleep(0.02)

    def _apply(self, change: Change) -> None:
        self.index.apply(change, time.monotonic())
        if isinstance(change, Upsert):
            self.saw.setdefault(change.info.incarnation, time.monotonic())
        elif isinstance(change, Reset):
            _note(self.saw, change.infos)

    def _emit(self, event: Event) -> None:
        self.failures += isinstance(event, RegistryChanged) and event.status != "connected"


class _Reloading:
    """Whatever changes: list everything, decode everything, build the index anew.

    Once for all changes that came while the last reload ran; one for each would never catch up.
    """

    def __init__(self, port: int, namespace: str, seed: int) -> None:
        self.registry = _Registry(port, seed)
        self.index = Index()
        self.saw: dict[str, float] = {}
        self.failures = 0
        self._namespace = namespace
        self._changed = threading.Event()
        self._watch: Watch | None = None

    async def load(self) -> None:
        await asyncio.to_thread(self._reload)
        threading.Thread(target=self._run, daemon=True).start()

    async def settle(self) -> None:
        """The watch is open since `load`."""

    def _run(self) -> None:
        while True:
            self._changed.wait()
            self._changed.clear()
            try:
                self._reload()
            except ReachError:
                self.failures += 1
                self._changed.set()
                time.sleep(0.1)

    def _reload(self) -> None:
        listing = self.registry.list(self._namespace)
        infos = tuple(decode(raw, self._namespace, allow_local=False) for raw in listing.records)
        index = Index()
        index.apply(Reset(infos, listing.revision, 0), time.monotonic())
        self.index = index
        _note(self.saw, infos)
        if self._watch is None:
            self._watch = self.registry.watch(self._namespace, listing.revision + 1, self._deliver)

    def _deliver(self, message: WatchMessage) -> None:
        if isinstance(message, WatchLost):
            self._watch = None
        self._changed.set()


def _note(saw: dict[str, float], infos: tuple[AgentInfo, ...]) -> None:
    now = time.monotonic()
    for info in infos:
        saw.setdefault(info.incarnation, now)


class _Refresher:
    """A watch of its own over a mirror that the process shares, and refreshes as `following.py` does them."""

    def __init__(self, registry: _Registry, namespace: str, mirror: Mirror, lock: threading.Lock) -> None:
        self._registry = registry
        self._namespace = namespace
        self._mirror = mirror
        self._lock = lock
        self._came = threading.Condition()
        self._progress = self._known = mirror.revision
        self._watch = registry.watch(namespace, mirror.revision + 1, self._deliver)

    def prove(self, rng: random.Random) -> bool:
        """Refresh; True if it proved that what is known is what the store holds."""
        with self._lock:
            sample = self._mirror.sample(rng, _SPOT_CHECKS)
        known = self._known
        probe = self._registry.probe(self._namespace, sample)
        self._watch.ask_progress()
        with self._came:
            if not self._came.wait_for(lambda: self._progress >= probe.revision, _PROGRESS_S):
                return False
        with self._lock:
            # As `Mirror.take_probe`, but for the revision: the shared mirror may be ahead of this client's probe.
            same_store = probe.cluster_id == self._mirror.cluster_id and probe.revision >= known
            return same_store and len(probe.changed) < len(sample) and self._mirror.matches(sample, probe)

    def list(self) -> int:
        """List everything; how many there are."""
        return len(self._registry.list(self._namespace).records)

    def _deliver(self, message: WatchMessage) -> None:
        if isinstance(message, WatchChanges):
            with self._lock:
                # The others bring the same.
                if message.revision > self._mirror.revision:
                    self._mirror.take_changes(message, time.monotonic())
                self._known = message.revision
        elif isinstance(message, WatchProgress):
            with self._came:
                self._progress = message.revision
                self._came.notify_all()


class Clients:
    """What this process holds, and the commands that it takes."""

    def __init__(self) -> None:
        self._port = 0
        self._clients: list[_Client] = []
        self._registries: list[_Registry] = []
        self._refreshers: list[_Refresher] = []

    async def start(self, kind: str, count: int, port: int, namespace: str, seed: int) -> dict[str, float]:
        """Start so many clients of a kind; answers once each has its first index, with what that took."""
        self._port = port
        # gRPC's own memory isn't what an instance costs.
        _Registry(port, seed).list("nothing")
        gc.collect()
        before = _memory("VmRSS")
        pauses = asyncio.create_task(_longest_pause())
        await asyncio.sleep(0.05)
        of_kind: Callable[[int, str, int], _Client] = _Watching if kind == "watcher" else _Reloading
        clients = [of_kind(port, namespace, seed + number) for number in range(count)]
        began = time.perf_counter()
        await asyncio.gather(*(client.load() for client in clients))
        took_s = time.perf_counter() - began
        await asyncio.sleep(0.05)
        pauses.cancel()
        self._clients += clients
        self._registries += (client.registry for client in clients)
        peak = _memory("VmHWM")
        await asyncio.gather(*(client.settle() for client in clients))
        gc.collect()
        return {
            "instances": sum(len(client.index) for client in clients),
            "took_s": took_s,
            "pause_s": await pauses,
            "memory": _memory("VmRSS") - before,
            "peak": peak - before,
        }

    async def open_watches(self, count: int, port: int, namespace: str, seed: int) -> dict[str, float]:
        """List once, and open so many watches, each with connections of its own."""
        self._port = port

        def open_all() -> None:
            lock, mirror = (
                threading.Lock(),
                Mirror(namespace, Trust(lease_s=15.0, confirm_s=15.0), allow_local=False),
            )
            for number in range(count):
                registry = _Registry(port, seed + number)
                if number == 0:
                    mirror.take_list(registry.list(namespace), time.monotonic())
                else:
                    # Opens the second connection that each client has.
                    registry.probe(namespace, ())
                self._registries.append(registry)
                self._refreshers.append(_Refresher(registry, namespace, mirror, lock))

        await asyncio.to_thread(open_all)
        return {"watches": len(self._refreshers)}

    async def prove(self, over_s: float, seed: int) -> dict[str, Any]:
        """One refresh of each client by probe and progress, spread over `over_s` seconds."""
        rng = random.Random(seed)
        return await asyncio.to_thread(self._each, lambda one: one.prove(rng), over_s, over_s + 60.0)

    async def list_all(self, within_s: float) -> dict[str, Any]:
        """A full list of one client after the other; of as many as fit in `within_s` seconds."""
        return await asyncio.to_thread(self._each, lambda one: one.list() > 0, 0.0, within_s)

    def _each(self, refresh: Callable[[_Refresher], bool], over_s: float, within_s: float) -> dict[str, Any]:
        began, took, good, failures = time.perf_counter(), [], 0, 0
        for number, one in enumerate(self._refreshers):
            time.sleep(max(0.0, began + over_s * number / len(self._refreshers) - time.perf_counter()))
            at = time.perf_counter()
            if at > began + within_s:
                break
            try:
                good += refresh(one)
            except ReachError:
                failures += 1
            took.append(time.perf_counter() - at)
        return {"took": took, "good": good, "failures": failures}

    async def stand(self) -> dict[str, float]:
        """What was used since the start: processor time, bytes both ways, lists; and what went wrong."""
        sent, received = _wire(self._port)
        return {
            "cpu_s": time.process_time(),
            "sent": sent,
            "received": received,
            "lists": sum(registry.lists for registry in self._registries),
            "failures": sum(client.failures for client in self._clients),
        }

    async def saw(self) -> dict[str, list[float]]:
        """Of each incarnation: how many clients had it, and when the last one did (monotonic)."""
        told: dict[str, list[float]] = {}
        for client in self._clients:
            for incarnation, at in client.saw.copy().items():
                count, last = told.get(incarnation, (0, 0.0))
                told[incarnation] = [count + 1, max(last, at)]
        return told


async def _longest_pause() -> float:
    """How long the loop kept a timer waiting at most, until it is cancelled."""
    longest = 0.0
    try:
        while True:
            began = time.perf_counter()
            await asyncio.sleep(0.002)
            longest = max(longest, time.perf_counter() - began - 0.002)
    except asyncio.CancelledError:
        return longest


def _memory(name: str) -> int:
    """A line of /proc/self/status, in bytes."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(name))


def _wire(port: int) -> tuple[int, int]:
    """Bytes sent to and received from etcd on the connections that are open, as the kernel counts them: what TCP
    carries, so with HTTP/2 and gRPC frames and without TCP/IP headers.
    """
    sent = received = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as one:
                if one.type != socket.SOCK_STREAM or one.getpeername()[1] != port:
                    continue
                info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        except (OSError, IndexError, TypeError):
            continue
        # tcpi_bytes_acked and tcpi_bytes_received of linux/tcp.h; the former counts the SYN as one.
        acked, came = struct.unpack_from("QQ", info, 120)
        sent += acked
        received += came
    return sent, received


async def main() -> None:
    """Take commands until the input ends."""
    clients = Clients()
    while line := await asyncio.to_thread(sys.stdin.readline):
        command = json.loads(line)
        answer = await getattr(clients, command.pop("do"))(**command)
        print(json.dumps(answer), flush=True)
    # Without ceremony: hundreds of connections take seconds to close one by one.
    os._exit(0)


if __name__ == "__main__":
    asyncio.run(main())
