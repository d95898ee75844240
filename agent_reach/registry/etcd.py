"""The registry in etcd. With `etcd_watch.py` the only module that knows pyetcd and gRPC; no exception of theirs
leaves it.

Layout: `/agent-reach/v1/{namespace}/agents/{agent_id}`, names quoted, one JSON record each, always under a lease.

Leases and writes, lists, and each watch have a client and a connection of their own: a slow list never delays a
keep-alive, and the end of one watch never touches another.
"""

from __future__ import annotations

import builtins
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import grpc
import pyetcd
from pyetcd.exceptions import Etcd3Exception, NoServerAvailableError
from pyetcd.utils import prefix_range_end
from tenacity import Retrying, retry_if_exception_type, stop_after_attempt

from agent_reach.config import RegistryConfig
from agent_reach.errors import ConfigError, Forbidden, ReachError, RegistryUnavailable, Unauthorized
from agent_reach.ports import (
    Created,
    LeaseLost,
    Listing,
    Occupied,
    RawRecord,
    WatchMessage,
)
from agent_reach.registry.etcd_watch import EtcdWatch, code_and_details
from agent_reach.registry.keys import ROOT, agent_id_of, key_of, prefix_of

__all__ = ["EtcdRegistry"]

T = TypeVar("T")

# 1,000 records of 1 KB are 1 MB an answer: quick, and far from any limit.
_PAGE = 1000
# How long a member that failed is passed over while others are left.
_RETRY_MEMBER_S = 2.0

_CHANNEL_OPTIONS = {
    # A hung server is noticed after 10 s + 5 s at most; without the ping timeout it took over a minute.
    "grpc.keepalive_time_ms": 10_000,
    "grpc.keepalive_timeout_ms": 5_000,
    # Only while a call is open: etcd takes idle pings for abuse and drops the connection (ENHANCE_YOUR_CALM) at the
    # third. A watch is always open, and unary calls have their own time limit.
    "grpc.keepalive_permit_without_calls": 0,
    "grpc.http2.max_pings_without_data": 0,
    "grpc.http2.ping_timeout_ms": 5_000,
    # The default of 4 MB is less than 10,000 records.
    "grpc.max_receive_message_length": -1,
    # By default the pause between connection attempts grows to 2 min; an etcd that is back should be seen at once.
    "grpc.max_reconnect_backoff_ms": 1_000,
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


class EtcdRegistry:
    """Implements the `Registry` port on an etcd cluster (API v3).

    `endpoints` are `host:port` (IPv6 in brackets). With `secure` connections use TLS: the system's roots or the
    PEM file `ca`; `cert` and `key` are the files of a client certificate. Nothing is connected before the first
    request. Raises `ConfigError` if a file can't be read or the parts don't fit.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        *,
        config: RegistryConfig,
        secure: bool = False,
        ca: str | None = None,
        cert: str | None = None,
        key: str | None = None,
        username: str | None = None,
        password: str | None = None,
    ) -> None:
        if not endpoints:
            raise ConfigError("an etcd registry needs at least one endpoint, like '127.0.0.1:2379'")
        if (username is None) != (password is None):
            raise ConfigError("etcd needs both a user and a password, or neither")
        if (cert is None) != (key is None):
            raise ConfigError("a client certificate needs both `cert` and `key`")
        if not secure and (ca or cert):
            raise ConfigError("certificates were given, but the connection isn't secure; use etcds://")
        self._endpoints = tuple(endpoints)
        self._timeout_s = config.request_timeout_s
        self._credentials = _tls(ca, cert, key) if secure else None
        self._username = username
        self._password = password
        self._lock = threading.Lock()
        self._clients: dict[str, Any] = {}
        self._watches: set[EtcdWatch] = set()
        self._failed_at: dict[str, float] = {}
        self._pid = os.getpid()
        self._closed = False

    def __repr__(self) -> str:
        return f"<EtcdRegistry {self.address}>"

    @property
    def blocking(self) -> bool:
        """True: every method waits for the network."""
        return True

    @property
    def address(self) -> str:
        """`etcd://host:port,…`, or `etcds://` over TLS; no credentials."""
        scheme = "etcd" if self._credentials is None else "etcds"
        return f"{scheme}://{','.join(self._endpoints)}"

    def grant(self, ttl_s: float) -> int:
        """Open a lease; etcd counts whole seconds, so `ttl_s` is rounded up."""
        return int(self._ask("leases", lambda client: client.lease(math.ceil(ttl_s)).id))

    def keep_alive(self, lease: int) -> bool:
        """Renew once; False if the lease lives no longer, which etcd says by a TTL of 0."""

        def renew(client: Any) -> bool:
            answers = builtins.list(client.refresh_lease(lease))
            if not answers:
                raise RegistryUnavailable(
                    self._text("closed the keep-alive without an answer"), endpoints=self._endpoints
                )
            return bool(answers[-1].TTL > 0)

        return self._ask("leases", renew)

    def revoke(self, lease: int) -> None:
        """End a lease and with it its records; one that is gone already is no error."""
        try:
            self._ask("leases", lambda client: client.revoke_lease(lease))
        except LeaseLost:
            return

    def create(self, namespace: str, agent_id: str, value: bytes, lease: int) -> Created | Occupied:
        """Write only if no record is there, in one transaction."""
        if lease == 0:
            raise LeaseLost("lease 0 is none")
        key = key_of(namespace, agent_id)

        def write(client: Any) -> Created | Occupied:
            new, answers = client.transaction(
                compare=[client.transactions.create(key) == 0],
                success=[client.transactions.put(key, value, lease=lease)],
                failure=[client.transactions.get(key)],
            )
            if new:
                return Created(answers[0].response_put.header.revision)
            held, about = answers[0][0]
            # An expired lease answers -1.
            left_s = max(0.0, float(client.get_lease_info(about.lease_id).TTL)) if about.lease_id else None
            return Occupied(RawRecord(agent_id, held, about.mod_revision), left_s)

        return self._ask("leases", write)

    def list(self, namespace: str) -> Listing:
        """Everything in the namespace at one revision, read page by page."""
        prefix = prefix_of(namespace)

        def read(client: Any) -> Listing:
            start, revision = prefix, 0
            records: builtins.list[RawRecord] = []
            while True:
                answer = client.get_range_response(start, prefix_range_end(prefix), limit=_PAGE, revision=revision)
                revision = revision or answer.header.revision
                records += (RawRecord(agent_id_of(prefix, kv.key), kv.value, kv.mod_revision) for kv in answer.kvs)
                if not answer.more:
                    return Listing(answer.header.cluster_id, revision, tuple(records))
                start = answer.kvs[-1].key + b"\0"

        return self._ask("lists", read)

    def watch(
        self, namespace: str, from_revision: int, deliver: Callable[[WatchMessage], None]
    ) -> Callable[[], None]:
        """Deliver changes from `from_revision` on; one that lies ahead is accepted and silent until then.

        Returns once etcd confirmed the watch.
        """
        with self._lock:
            self._check_usable()
        try:
            watch = self._start_watch(prefix_of(namespace), from_revision, deliver)
        except (grpc.RpcError, Etcd3Exception) as error:
            raise self._translate(*code_and_details(error)) from None
        with self._lock:
            self._watches.add(watch)
            closed = self._closed
        if closed:
            watch.cancel()
        problem = watch.wait_created(self._timeout_s)
        if problem is None:
            return lambda: self._cancel_watch(watch)
        self._watch_ended(watch)
        watch.cancel()
        raise self._translate(*problem)

    def close(self) -> None:
        """Close connections; leases are left to end by themselves unless revoked.

        Never waits for the network: requests that are under way fail, those that still log in once that is done.
        """
        with self._lock:
            self._closed = True
            clients, self._clients = self._clients, {}
            watches, self._watches = self._watches, set()
        for watch in watches:
            watch.cancel()
        for client in clients.values():
            client.close()

    # --- requests -----------------------------------------------------------------------------------------

    def _ask(self, role: str, action: Callable[[Any], T]) -> T:
        """Run one request on the client of that role and translate what goes wrong."""

        def ask() -> T:
            client = None
            try:
                client = self._client(role)
                return action(client)
            except (grpc.RpcError, Etcd3Exception) as error:
                code, details = code_and_details(error)
                stale_token = any(text in details for text in _STALE_TOKEN)
                if stale_token or isinstance(error, NoServerAvailableError):
                    self._discard(role, client)
                problem = self._translate(code, details)
                # Compacted between two pages of a list: the next list begins at a newer revision.
                if stale_token or code is grpc.StatusCode.OUT_OF_RANGE:
                    raise _AskAgain(problem) from None
                raise problem from None
            except ValueError as error:
                # gRPC's way to say that the channel was closed meanwhile.
                raise self._translate(None, str(error)) from None

        try:
            # Once more where that mends it: after a new login, or with a list from the start.
            return Retrying(stop=stop_after_attempt(2), retry=retry_if_exception_type(_AskAgain), reraise=True)(ask)
        except _AskAgain as again:
            raise again.problem from None

    def _translate(self, code: grpc.StatusCode | None, details: str) -> ReachError | LeaseLost:
        if self._closed:
            # Whatever gRPC calls it: the request was cut off because we were closed.
            return self._was_closed()
        if "requested lease not found" in details:
            return LeaseLost(details)
        forbidden = code is grpc.StatusCode.PERMISSION_DENIED or "permission denied" in details
        if forbidden and self._username is None:
            return Unauthorized(
                self._text(f"refused: {details}; it wants a user: check user and password of the url")
            )
        if forbidden:
            return Forbidden(self._text(f"refused: {details}; grant this user's role read and write on {ROOT}/"))
        told = any(text in details for text in (*_NOT_LOGGED_IN, *_STALE_TOKEN))
        if told or code is grpc.StatusCode.UNAUTHENTICATED:
            return Unauthorized(self._text(f"refused: {details}; check user and password of the registry url"))
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            problem = f"didn't answer within {self._timeout_s:g} s; is it overloaded, frozen or without a leader?"
        else:
            name = code.name if code is not None else "no answer"
            problem = f"can't be used ({name}: {details}); is it running, and do address and scheme fit?"
        return RegistryUnavailable(self._text(problem), endpoints=self._endpoints)

    def _text(self, problem: str) -> str:
        return f"the registry {self.address} {problem}"

    def _client(self, role: str) -> Any:
        with self._lock:
            self._check_usable()
            if role in self._clients:
                return self._clients[role]
        # Not under the lock: it may log in, and `close` must not wait for that.
        made = self._connect(self._endpoints)
        with self._lock:
            # We may have been closed meanwhile, or another thread was quicker.
            closed = self._closed
            kept: Any = None if closed else self._clients.setdefault(role, made)
        if kept is not made:
            made.close()
        if closed:
            raise self._was_closed()
        return kept

    def _check_usable(self) -> None:
        if self._closed:
            raise self._was_closed()
        if self._pid != os.getpid():
            # After a fork the parent's connections are of no use to us, nor ours to close.
            self._clients, self._watches, self._pid = {}, set(), os.getpid()

    def _was_closed(self) -> RegistryUnavailable:
        return RegistryUnavailable(self._text("was closed"), endpoints=self._endpoints)

    def _discard(self, role: str, client: Any) -> None:
        with self._lock:
            ours = role in self._clients and self._clients[role] is client
            if ours:
                del self._clients[role]
        if ours:
            client.close()

    def _connect(self, endpoints: Sequence[str]) -> Any:
        """Build a client (and log in, if there is a user)."""
        options = builtins.list(_CHANNEL_OPTIONS.items())
        # With one endpoint a failure must not keep us from asking it again; 0 would keep several from failing over.
        retry_s = _RETRY_MEMBER_S if len(endpoints) > 1 else 0.0
        members = []
        for endpoint in endpoints:
            host, _, port = endpoint.rpartition(":")
            secure = self._credentials is not None
            members.append(pyetcd.Endpoint(host, int(port), secure, self._credentials, retry_s, options))
        try:
            client = pyetcd.MultiEndpointEtcd3Client(
                members, timeout=self._timeout_s, user=self._username, password=self._password, failover=True
            )
        except BaseException:
            for member in members:
                member.close()
            raise
        # The token travels as metadata; as call credentials gRPC would refuse it over plaintext.
        client.call_credentials = None
        client.metadata = (*(client.metadata or ()), _HAS_LEADER)
        return client

    # --- watches ------------------------------------------------------------------------------------------

    def _members_to_watch(self) -> Sequence[str]:
        """All endpoints but those where a watch just failed; all of them if none is left."""
        now = time.monotonic()
        good = [e for e in self._endpoints if now - self._failed_at.get(e, -math.inf) > _RETRY_MEMBER_S]
        return good or self._endpoints

    def _start_watch(self, prefix: bytes, from_revision: int, deliver: Callable[[WatchMessage], None]) -> EtcdWatch:
        client = self._connect(self._members_to_watch())
        try:
            return EtcdWatch(client, prefix, from_revision, deliver, self._watch_ended)
        except BaseException:
            client.close()
            raise

    def _cancel_watch(self, watch: EtcdWatch) -> None:
        watch.cancel()
        with self._lock:
            self._watches.discard(watch)

    def _watch_ended(self, watch: EtcdWatch) -> None:
        self._failed_at[watch.endpoint] = time.monotonic()
        with self._lock:
            self._watches.discard(watch)


class _AskAgain(Exception):
    """A request failed in a way that asking once more may mend; `problem` is what to raise if it doesn't."""

    def __init__(self, problem: Exception) -> None:
        super().__init__(str(problem))
        self.problem = problem


def _tls(ca: str | None, cert: str | None, key: str | None) -> grpc.ChannelCredentials:
    def read(path: str | None) -> bytes | None:
        if path is None:
            return None
        try:
            with open(path, "rb") as file:
                return file.read()
        except OSError as error:
            raise ConfigError(f"the registry's certificate file {path!r} can't be read: {error.strerror}") from None

    return grpc.ssl_channel_credentials(read(ca), read(key), read(cert))
