"""The dialer over httpx: any `httpx.AsyncClient`, or one of our own."""

from __future__ import annotations

import asyncio
import errno
import functools
import os
import socket
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from agent_reach.dialing.encoding import refuse_encoding
from agent_reach.ports import Answer, BadAnswer, DialRequest, DialResult, MaybeExecuted, NeverSent

__all__ = ["HttpxDialer"]

# Uvicorn, the most common server, closes a connection that idled for 5 s. Reusing one at that very moment
# loses the request with its outcome unknown, so ours go first; 2 s are left for a loop that is late.
_KEEPALIVE_EXPIRY_S = 3.0
# Bulkheads limit what is in flight, 100 calls to an instance; this only keeps a leak from eating all files.
_LIMITS = httpx.Limits(max_connections=1000, max_keepalive_connections=200, keepalive_expiry=_KEEPALIVE_EXPIRY_S)

# This process or host is short of something; the peer has nothing to do with it.
_OWN_FAULTS = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL}


class HttpxDialer:
    """Implements the `Dialer` port with httpx.

    Without `client` it keeps its own connections: no proxies from the environment, no redirects, no cookies. A
    client given by the user (for a proxy, client certificates, `ASGITransport`, `MockTransport`) keeps its own
    settings and is never closed here; only redirects are off whatever it says.
    """

    def __init__(self, client: httpx.AsyncClient | None = None) -> None:
        self._given = client
        # Connections belong to the event loop they were opened in; a second loop gets a client of its own.
        self._own: dict[asyncio.AbstractEventLoop, httpx.AsyncHTTPTransport] = {}
        if client is None:
            _tls_context()

    async def send(self, request: DialRequest) -> DialResult:
        """POST once and say how far it got; never raises but for cancellation."""
        if self._given is not None and self._given.is_closed:
            return NeverSent("local", "the httpx client that this dialer was given is closed", local=True)
        progress = _Progress(traceable=self._given is None)
        try:
            async with asyncio.timeout(request.timeout_s) as limit:
                return await self._exchange(request, progress)
        except TimeoutError as error:
            if limit.expired():
                return progress.out_of_time(request.timeout_s)
            return progress.unknown(error)
        except Exception as error:  # noqa: BLE001 - the boundary: a user's transport may raise anything
            return _classify(error, progress)
        finally:
            await progress.abandon()

    async def aclose(self) -> None:
        """Close our own connections of the running loop; those of loops that ended went with them."""
        transport = self._own.pop(asyncio.get_running_loop(), None)
        if transport is not None:
            await transport.aclose()

    async def _exchange(self, request: DialRequest, progress: _Progress) -> DialResult:
        # Connecting and waiting for a place have their own limit; reading and writing only the total.
        limits = httpx.Timeout(None, connect=request.connect_timeout_s, pool=request.connect_timeout_s)
        # A compressed answer could unpack to a thousand times what the bound allows.
        headers = {**request.headers, "accept-encoding": "identity"}
        extensions = {"trace": progress.trace, "timeout": limits.as_dict()}
        if self._given is None:
            # The bare transport: a client would add redirects, cookies (which ignore ports, so one agent's would
            # go to every other on its host), a log line per request, and as much time again.
            headers["user-agent"] = "agent-reach"
            outgoing = httpx.Request(
                "POST", request.url, headers=headers, content=request.body, extensions=extensions
            )
            progress.built = True
            response = await self._own_transport().handle_async_request(outgoing)
        else:
            outgoing = self._given.build_request(
                "POST", request.url, headers=headers, content=request.body, timeout=limits, extensions=extensions
            )
            progress.built = True
            response = await self._given.send(outgoing, stream=True, follow_redirects=False)
        try:
            progress.status = response.status_code
            return await _read(response, request.max_reply_bytes)
        finally:
            await response.aclose()

    def _own_transport(self) -> httpx.AsyncHTTPTransport:
        loop = asyncio.get_running_loop()
        transport = self._own.get(loop)
        if transport is None:
            # Nothing can be closed in a loop that is closed itself; the collector takes the sockets.
            self._own = {other: kept for other, kept in self._own.items() if not other.is_closed()}
            transport = self._own[loop] = httpx.AsyncHTTPTransport(
                verify=_tls_context(), trust_env=False, limits=_LIMITS
            )
        return transport


@functools.cache
def _tls_context() -> ssl.SSLContext:
    """The trusted certificates, read once per process, and before the first call, whose time it would take."""
    return httpx.create_ssl_context(trust_env=False)


async def _read(response: httpx.Response, max_bytes: int) -> Answer | BadAnswer:
    if (refused := refuse_encoding(response.status_code, response.headers)) is not None:
        return refused
    too_large = BadAnswer(response.status_code, f"the answer is larger than {max_bytes} bytes", too_large=True)
    announced = response.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > max_bytes:
        return too_large
    body = bytearray()
    # Nothing is left to decode; unlike `aiter_raw` this also takes the ready-made answers of a MockTransport.
    async for chunk in response.aiter_bytes():
        if len(body) + len(chunk) > max_bytes:
            return too_large
        body += chunk
    return Answer(response.status_code, _lower(response.headers), bytes(body))


def _lower(headers: httpx.Headers) -> Mapping[str, str]:
    return {name.lower(): value for name, value in headers.items()}


@dataclass(slots=True)
class _Progress:
    """How far one exchange got, told by httpcore's trace events.

    `traceable` if the transport is known to send events, so that silence means something too. A foreign
    transport may send none: then only the type of an exception can tell.
    """

    traceable: bool
    built: bool = False
    seen: bool = False
    phase: str = "pool"
    sending: bool = False
    status: int | None = None
    handshaking: Any = None

    async def trace(self, event: str, info: Mapping[str, Any]) -> None:
        """Take one event, like `connection.connect_tcp.started` or `http11.send_request_headers.started`."""
        self.seen = True
        if event.endswith("send_request_headers.started"):
            self.sending = True
            self.handshaking = None
        elif event.endswith("connect_tcp.complete"):
            self.handshaking = info.get("return_value")
        elif event.endswith("start_tls.started"):
            self.phase = "tls"
        elif event.startswith("connection.") and event.endswith(".started"):
            self.phase = "connect"

    async def abandon(self) -> None:
        """Close a connection that was left in the middle of its TLS handshake: httpcore 1.0 forgets it then."""
        stream, self.handshaking = self.handshaking, None
        if stream is not None:
            await stream.aclose()

    @property
    def certainly_unsent(self) -> bool:
        """True if the events prove that not one byte of the request left."""
        return (self.traceable or self.seen) and not self.sending

    def out_of_time(self, timeout_s: float) -> DialResult:
        """What it means that the whole exchange's time is up."""
        if self.certainly_unsent:
            detail = f"no connection within {timeout_s:g} s"
            return NeverSent(self.phase, detail, local=self.phase == "pool", timed_out=True)
        return MaybeExecuted(f"no answer within {timeout_s:g} s", timed_out=True)

    def unknown(self, error: BaseException) -> DialResult:
        """What an error means that says nothing about the request."""
        detail = _say(error)
        if not self.built:
            return NeverSent("local", detail, local=True)
        if self.status is not None:
            return BadAnswer(self.status, f"the answer is cut off: {detail}")
        return MaybeExecuted(detail)


def _classify(error: Exception, progress: _Progress) -> DialResult:
    match error:
        case httpx.InvalidURL() | httpx.UnsupportedProtocol() | httpx.LocalProtocolError():
            # h11 refuses a bad header while building the request, before the first byte.
            return NeverSent("local", _say(error), local=True)
        case httpx.PoolTimeout():
            return NeverSent("pool", "no free connection in time", local=True, timed_out=True)
        case httpx.ConnectTimeout() if not progress.sending:
            return NeverSent("tls" if progress.phase == "tls" else "connect", _say(error), timed_out=True)
        case httpx.ConnectError() if not progress.sending and _errno_of(error) in _OWN_FAULTS:
            return NeverSent("pool", _cause_of(error), local=True)
        case httpx.ConnectError() if not progress.sending:
            return NeverSent(_connect_phase(error, progress), _cause_of(error) or _say(error))
        case httpx.ProxyError() if progress.certainly_unsent:
            return NeverSent("connect", _say(error))
        case httpx.TimeoutException() if progress.status is None:
            return MaybeExecuted(_say(error), timed_out=True)
        case _:
            return progress.unknown(error)


def _chain(error: BaseException) -> list[BaseException]:
    """An error and all that it came from, groups included, nearest first."""
    chain = [error]
    for one in chain:
        inner = one.exceptions if isinstance(one, BaseExceptionGroup) else ()
        chain += [e for e in (*inner, one.__cause__, one.__context__) if e is not None and e not in chain]
    return chain


def _errno_of(error: BaseException) -> int | None:
    return next((e.errno for e in _chain(error) if isinstance(e, OSError) and e.errno is not None), None)


def _cause_of(error: BaseException) -> str:
    """What the system said: "Connection refused" helps, httpx's "All connection attempts failed" doesn't."""
    for one in _chain(error):
        if isinstance(one, OSError) and one.strerror:
            # asyncio writes "Connect call failed" over the system's own words; name look-ups and TLS keep theirs.
            if one.errno is None or isinstance(one, socket.gaierror | ssl.SSLError):
                return one.strerror
            return os.strerror(one.errno)
    return ""


def _connect_phase(error: BaseException, progress: _Progress) -> str:
    """Tell a name that doesn't resolve and a refused handshake from a refused connection."""
    for one in _chain(error):
        if isinstance(one, socket.gaierror):
            return "dns"
        if isinstance(one, ssl.SSLError):
            return "tls"
    return "tls" if progress.phase == "tls" else "connect"


def _say(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
