"""A TCP proxy on loopback that can hold back, slow down, cut and refuse, each direction by itself.

What is held back is never lost: as after a real partition, where TCP sends again what wasn't acknowledged, it
goes through when the direction passes again. So does the end of a connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Self

from agent_reach.testing.held_ports import HeldPorts

_CHUNK = 65_536
# Small enough for a steady trickle at the rates that tests use.
_TRICKLE_S = 0.05
# Off with an RST, not with a FIN.
_NO_LINGER = struct.pack("ii", 1, 0)


class Direction:
    """One way through the proxy: passes, delays, holds back (`black_hole`) or throttles.

    `bytes` counts what went through, `held` what waits. To be used from any thread.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.bytes = 0
        self.held = 0
        self._loop = loop
        self._delay_s = 0.0
        self._rate: float | None = None
        self._open = True
        self._changed = asyncio.Event()

    def pass_on(self) -> None:
        """Forward everything at once."""
        self._set()

    def delay(self, seconds: float) -> None:
        """Forward each byte `seconds` after it came."""
        self._set(delay_s=seconds)

    def black_hole(self) -> None:
        """Take bytes and forward none; connections stay open."""
        self._set(is_open=False)

    def throttle(self, bytes_per_s: float) -> None:
        """Forward so many bytes a second at most, on each connection."""
        self._set(rate=bytes_per_s)

    def _set(self, *, delay_s: float = 0.0, rate: float | None = None, is_open: bool = True) -> None:
        async def change() -> None:
            self._delay_s, self._rate, self._open = delay_s, rate, is_open
            self._changed.set()
            self._changed = asyncio.Event()

        asyncio.run_coroutine_threadsafe(change(), self._loop).result(10)

    async def opened(self) -> None:
        """Wait while nothing passes."""
        while not self._open:
            await self._changed.wait()

    async def forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Bring all that comes from `reader` to `writer`, and its end."""
        waiting: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

        async def take() -> None:
            data = b"-"
            while data:
                try:
                    data = await reader.read(_CHUNK)
                except OSError:
                    data = b""
                self.held += len(data)
                waiting.put_nowait((self._loop.time(), data))

        async def give() -> None:
            data = b"-"
            while data:
                came_at, data = await waiting.get()
                await self._due(came_at)
                await self._write(writer, data)
            with contextlib.suppress(OSError):
                writer.write_eof()

        await asyncio.gather(take(), give())

    async def _due(self, came_at: float) -> None:
        while not self._open or self._loop.time() < came_at + self._delay_s:
            left_s = came_at + self._delay_s - self._loop.time() if self._open else None
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), left_s)

    async def _write(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        while data:
            await self.opened()
            size = len(data) if self._rate is None else max(1, int(self._rate * _TRICKLE_S))
            part, data = data[:size], data[size:]
            # Counted first: whoever got it shall find it counted.
            self.held -= len(part)
            self.bytes += len(part)
            writer.write(part)
            with contextlib.suppress(OSError):
                await writer.drain()
            if self._rate is not None:
                await asyncio.sleep(len(part) / self._rate)


class Proxy:
    """Listens at `port` of loopback and connects through to `upstream_port`, in a thread of its own.

    `accepted` counts connections, the refused ones too.
    """

    def __init__(self, upstream_port: int, upstream_host: str = "127.0.0.1") -> None:
        self._upstream = (upstream_host, upstream_port)
        self._held = HeldPorts(1)
        (self.port,) = self._held.numbers
        self.accepted = 0
        self._refusing = False
        self._connections: dict[asyncio.Task[Any], list[asyncio.StreamWriter]] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"proxy-{self.port}", daemon=True)
        self.to_server = Direction(self._loop)
        self.to_client = Direction(self._loop)

    @property
    def url(self) -> str:
        """The registry url that leads through it."""
        return f"etcd://127.0.0.1:{self.port}"

    @property
    def connections(self) -> int:
        """How many are open."""
        return len(self._connections)

    def black_hole(self) -> None:
        """Hold back both directions."""
        self.to_server.black_hole()
        self.to_client.black_hole()

    def refuse(self) -> None:
        """Reset new connections at once; those that are open go on."""
        self._refusing = True

    def heal(self) -> None:
        """Forward everything, and let new connections in."""
        self._refusing = False
        self.to_server.pass_on()
        self.to_client.pass_on()

    def cut(self) -> None:
        """Reset every open connection, at both ends."""

        async def reset_all() -> None:
            tasks = list(self._connections)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        self._do(reset_all)

    def __enter__(self) -> Self:
        self._thread.start()

        async def listen() -> asyncio.Server:
            return await asyncio.start_server(self._connected, "127.0.0.1", self.port)

        self._server = self._do(listen)
        return self

    def __exit__(self, *_: object) -> None:
        async def close() -> None:
            self._server.close()
            await asyncio.sleep(0)

        self._do(close)
        self.cut()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()
        self._held.release()

    def _do(self, work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        return asyncio.run_coroutine_threadsafe(work(), self._loop).result(10)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        if self._refusing:
            _reset(writer)
            return
        task = asyncio.current_task()
        assert task is not None
        ends = self._connections[task] = [writer]
        try:
            await self.to_server.opened()
            there_reader, there_writer = await asyncio.open_connection(*self._upstream)
            ends.append(there_writer)
            await asyncio.gather(
                self.to_server.forward(reader, there_writer), self.to_client.forward(there_reader, writer)
            )
        except OSError:
            pass  # the upstream isn't there
        except asyncio.CancelledError:
            pass  # cut
        finally:
            del self._connections[task]
            for end in ends:
                _reset(end)


def _reset(writer: asyncio.StreamWriter) -> None:
    connection = writer.get_extra_info("socket")
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
    writer.transport.abort()
