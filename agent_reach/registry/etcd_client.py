"""Connections to one etcd member, and what went wrong on them. Of the modules that know pyetcd and gRPC."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import grpc
import pyetcd
from pyetcd import etcdrpc
from pyetcd.exceptions import NoServerAvailableError

from agent_reach.errors import ConfigError

__all__ = ["Fault", "FaultKind", "Login", "classify", "connect", "fault_of", "log_in", "read_tls"]

FaultKind: TypeAlias = Literal[
    "unreachable",
    "hung",
    "cut_off",
    "lease_lost",
    "compacted",
    "no_space",
    "stale_token",
    "unauthorized",
    "forbidden",
    "other",
]

_CHANNEL_OPTIONS = {
    # A hung server is noticed after 8 s + 4 s at most; without the ping timeout it took over a minute. etcd takes
    # pings that come oftener than every 5 s for abuse.
    "grpc.keepalive_time_ms": 8_000,
    "grpc.keepalive_timeout_ms": 4_000,
    "grpc.http2.ping_timeout_ms": 4_000,
    # Only while a call is open: etcd takes idle pings for abuse and drops the connection (ENHANCE_YOUR_CALM) at the
    # third. A watch is always open, and unary calls have their own time limit.
    "grpc.keepalive_permit_without_calls": 0,
    "grpc.http2.max_pings_without_data": 0,
    # The default of 4 MB is less than 10,000 records.
    "grpc.max_receive_message_length": -1,
    # Without this, channels to one address share one TCP connection, and so each other's congestion.
    "grpc.use_local_subchannel_pool": 1,
    # Peers aren't reached through the proxy of the environment, and neither is etcd.
    "grpc.enable_http_proxy": 0,
}

# Without a leader a member can't know what it misses: let it say so instead of staying silent.
_HAS_LEADER = ("hasleader", "true")

# Answers to a token that aged out or was issued before users changed; a new login mends them.
_STALE_TOKEN = ("invalid auth token", "revision of auth store is old")
_NOT_LOGGED_IN = (
    "authentication failed",
    "user name is empty",
    "authentication is not enabled",
    "user name not found",
)
_UNREACHABLE = "failed to connect to all addresses"
# How BoringSSL names what went wrong in a handshake.
_TLS_REASON = re.compile(r"OPENSSL_internal:([A-Z0-9_]+(?:: [a-z][^:;]*)?)")


@dataclass(frozen=True, slots=True)
class Login:
    """A user of etcd."""

    username: str
    password: str


@dataclass(frozen=True, slots=True)
class Fault:
    """What etcd, or gRPC in its place, said. `code` is gRPC's name for it, `details` the words."""

    kind: FaultKind
    code: str
    details: str


def connect(
    endpoint: str, *, timeout_s: float, tls: grpc.ChannelCredentials | None, token: str | None = None
) -> Any:
    """Build a client for one member; nothing is sent yet. The caller closes it.

    One for each purpose: pyetcd shares a client's watches, and marks a member as failed for all its users.
    """
    host, _, port = endpoint.rpartition(":")
    # A pause of 0 s: whether this member is asked again is for its user to say.
    member = pyetcd.Endpoint(host, int(port), tls is not None, tls, 0.0, list(_CHANNEL_OPTIONS.items()))
    client = pyetcd.MultiEndpointEtcd3Client([member], timeout=timeout_s)
    # As metadata: pyetcd's own way, as call credentials, gRPC refuses over plaintext.
    client.metadata = (_HAS_LEADER,) if token is None else (_HAS_LEADER, ("token", token))
    return client


def log_in(client: Any, login: Login) -> str:
    """Return a token for this user; it is good at every member."""
    request = etcdrpc.AuthenticateRequest(name=login.username, password=login.password)
    return str(client.authstub.Authenticate(request, client.timeout).token)


def fault_of(error: BaseException) -> Fault:
    """What gRPC said, also from under pyetcd's own exceptions."""
    if isinstance(error, NoServerAvailableError):
        return Fault("unreachable", "UNAVAILABLE", "no connection")
    while not isinstance(error, grpc.RpcError):
        if error.__context__ is None:
            return Fault("other", "no answer", str(error) or type(error).__name__)
        error = error.__context__
    code = error.code() if hasattr(error, "code") else None
    details = (error.details() if hasattr(error, "details") else None) or "no details"
    if "handshake failed" in details.lower():
        details = _tls_details(details)
    elif details.startswith(_UNREACHABLE):
        # What follows tells each address at length; the cause is what stands last.
        details = f"{_UNREACHABLE}: {details.rpartition(': ')[2]}"
    return classify(code, details)


def _tls_details(details: str) -> str:
    found = _TLS_REASON.search(details)
    reason = found[1] if found is not None else "it gave no reason"
    text = f"the TLS handshake failed: {reason}"
    if "CERTIFICATE_VERIFY_FAILED" in reason:
        return f"{text}; etcd's certificate isn't trusted: name the file of its CA in the url, ?ca=…"
    if "ALERT" in reason or "CERTIFICATE_REQUIRED" in reason:
        return f"{text}; etcd wants a client certificate that it trusts: name its files in the url, ?cert=…&key=…"
    return text


def classify(code: grpc.StatusCode | None, details: str) -> Fault:
    """Sort what etcd said. Its codes alone don't tell a token that aged out from a wrong password."""
    kind: FaultKind = "other"
    if "requested lease not found" in details:
        kind = "lease_lost"
    elif any(text in details for text in _STALE_TOKEN):
        kind = "stale_token"
    elif code is grpc.StatusCode.PERMISSION_DENIED or "permission denied" in details:
        kind = "forbidden"
    elif code is grpc.StatusCode.UNAUTHENTICATED or any(text in details for text in _NOT_LOGGED_IN):
        kind = "unauthorized"
    elif code is grpc.StatusCode.DEADLINE_EXCEEDED:
        kind = "hung"
    elif code is grpc.StatusCode.CANCELLED:
        kind = "cut_off"
    elif code is grpc.StatusCode.RESOURCE_EXHAUSTED and "space exceeded" in details:
        kind = "no_space"
    elif code is grpc.StatusCode.OUT_OF_RANGE:
        kind = "compacted"
    elif code is grpc.StatusCode.UNAVAILABLE:
        kind = "unreachable"
    return Fault(kind, code.name if code is not None else "no answer", details)


def read_tls(ca: str | None, cert: str | None, key: str | None) -> grpc.ChannelCredentials:
    """Read the PEM files of a TLS connection; None: the system's roots, no client certificate.

    Raises ConfigError if one can't be read.
    """

    def read(path: str | None) -> bytes | None:
        if path is None:
            return None
        try:
            with open(path, "rb") as file:
                return file.read()
        except OSError as error:
            raise ConfigError(f"the registry's certificate file {path!r} can't be read: {error.strerror}") from None

    return grpc.ssl_channel_credentials(read(ca), read(key), read(cert))
