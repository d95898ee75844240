"""Serving with uvicorn: our own socket, our own signals, a bounded end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
from collections.abc import Iterator
from typing import Any

from agent_reach.addresses import parse_listen
from agent_reach.errors import ConfigError
from agent_reach.forks import on_fork

__all__ = ["UvicornServer"]

# Longer than any client keeps an idle connection (ours 3 s, browsers and proxies up to 60 s): whoever closes
# first must be the client, or its next request meets a connection that is just being closed.
_KEEP_ALIVE_S = 75
# Headers are ours and small; 64 KiB leaves room for what proxies add.
_MAX_HEADER_BYTES = 64 * 1024
_BACKLOG = 1024
# Uvicorn looks at its flags every 0.1 s and pauses 0.1 s more before it waits for open answers.
_UVICORN_S = 0.2
# Past the time given: for uvicorn to end by itself, and again for it to end once cancelled, on a loop that is late.
_LATE_S = 0.2


class UvicornServer:
    """One uvicorn server for one app. `listen` is `host:port`, `[ipv6]:port`; port 0 takes a free one.

    `host` and `port` are the real ones after `start`. Raises ConfigError for a bad `listen`.
    """

    def __init__(self, app: Any, listen: str) -> None:
        self._app = app
        self._listen = listen
        self.host, self.port = parse_listen(listen)
        self._server: Any = None
        self._task: asyncio.Task[None] | None = None
        self._sock: socket.socket | None = None
        on_fork(self, UvicornServer._in_child)

    async def start(self) -> None:
        """Bind and return once connections are accepted.

        Raises ConfigError if the address is taken or isn't this host's, or if uvicorn isn't installed.
        """
        server_class = _server_class()
        sock = self._sock = _bind(self._listen, self.host, self.port)
        try:
            self.port = sock.getsockname()[1]
            server = server_class(self._app)
            self._server = server
            self._task = asyncio.get_running_loop().create_task(server.serve(sockets=[sock]))
            accepting = asyncio.ensure_future(server.accepting.wait())
            try:
                await asyncio.wait({self._task, accepting}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                accepting.cancel()
            if self._task.done():
                self._task.result()
                raise ConfigError(f"listen={self._listen}: uvicorn ended while starting; its log says why")
        except BaseException:
            try:
                # What uvicorn failed with is on its way already, and must not take the place of a cancellation.
                with contextlib.suppress(Exception):
                    await self.stop(0.0)
            finally:
                sock.close()
            raise

    async def stop(self, timeout_s: float) -> None:
        """Accept no more, let open answers end within `timeout_s` seconds, cut the rest. Safe to call twice.

        Takes 0.4 s longer at most, whatever the app does. Raises what uvicorn failed with, all being closed.
        """
        task, self._task = self._task, None
        if task is None:
            return
        # 0 would mean no limit.
        self._server.config.timeout_graceful_shutdown = max(timeout_s - _UVICORN_S, 0.001)
        self._server.should_exit = True
        if timeout_s <= 0:
            self._server.force_exit = True
        try:
            _, late = await asyncio.wait({task}, timeout=timeout_s + _LATE_S)
            if late:
                task.cancel()
                await asyncio.wait({task}, timeout=_LATE_S)
            if task.done() and not task.cancelled():
                task.result()
        finally:
            # Uvicorn has done so too, unless it failed or had to be cancelled.
            for listening in getattr(self._server, "servers", ()):
                listening.close()
            for connection in list(self._server.server_state.connections):
                connection.transport.abort()

    def _in_child(self) -> None:
        """Let go of the sockets after a fork.

        A child that outlives its parent would keep the port taken, and callers waiting for an answer that nobody
        gives. And when it ends, uvicorn would answer 500 to whatever the parent is just answering.
        """
        sockets = [] if self._sock is None else [self._sock]
        if self._server is not None:
            connections = self._server.server_state.connections
            sockets += [connection.transport.get_extra_info("socket") for connection in list(connections)]
        nowhere = os.open(os.devnull, os.O_RDWR)
        for sock in sockets:
            # Not closed: whoever holds the number closes it once more, and it may be another's by then.
            if sock is not None and sock.fileno() >= 0:
                os.dup2(nowhere, sock.fileno(), inheritable=False)
        os.close(nowhere)


def _server_class() -> Any:
    """Make the server class here, so that uvicorn is imported by those who serve only."""
    try:
        import uvicorn
    except ImportError:
        raise ConfigError("serving needs uvicorn: pip install 'agent-reach[standard]'") from None

    class Config(uvicorn.Config):
        """Leaves logging alone: uvicorn would empty its access log for the host application too."""

        def configure_logging(self) -> None:
            pass

    class Server(uvicorn.Server):
        """Tells when it accepts, and leaves signals to us: we drain first."""

        def __init__(self, app: Any) -> None:
            super().__init__(
                Config(
                    app,
                    lifespan="off",
                    log_config=None,
                    access_log=False,
                    server_header=False,
                    # What a caller says of itself in X-Forwarded-For means nothing to an agent.
                    proxy_headers=False,
                    ws="none",
                    timeout_keep_alive=_KEEP_ALIVE_S,
                    h11_max_incomplete_event_size=_MAX_HEADER_BYTES,
                    backlog=_BACKLOG,
                )
            )
            self.accepting = asyncio.Event()

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets=sockets)
            self.accepting.set()

        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield

    return Server


def _bind(listen: str, host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise ConfigError(f"listen={listen}: the host can't be found: {error.strerror}") from None
    sock = socket.socket(family, kind, protocol)
    try:
        # A restarted agent takes its port back although old connections of it still linger in the kernel.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        # Listening is part of claiming: two processes may both bind, only one can listen.
        sock.listen(_BACKLOG)
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"listen={listen} is taken (another process listens there); choose another port, or 0 for a free "
                "one"
            ) from None
        raise ConfigError(f"listen={listen} can't be bound: {error.strerror}") from None
    return sock
