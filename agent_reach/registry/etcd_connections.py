"""Connections to an etcd cluster: one for each purpose, all to one member until it fails. Of the modules that know
pyetcd and gRPC.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import grpc
from pyetcd.exceptions import Etcd3Exception
from tenacity import Retrying, retry_if_exception_type, stop_after_attempt

from agent_reach.config import RegistryConfig
from agent_reach.errors import Forbidden, ReachError, RegistryUnavailable, Unauthorized
from agent_reach.forks import on_fork
from agent_reach.ports import LeaseLost, WatchMessage
from agent_reach.registry.etcd_client import Fault, Login, connect, fault_of, log_in
from agent_reach.registry.etcd_watch import EtcdWatch
from agent_reach.registry.keys import ROOT
from agent_reach.registry.members import Members

__all__ = ["EtcdConnections"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Connection:
    endpoint: str
    client: Any
    token: str | None
    # Whether the token is as old as this connection.
    just_logged_in: bool


class EtcdConnections:
    """Asks the cluster, and translates what goes wrong.

    `ask` is for unary requests, by role: each role has a connection of its own. `watch` makes one for each watch.
    Raises what the `Registry` port says.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        *,
        config: RegistryConfig,
        tls: grpc.ChannelCredentials | None,
        login: Login | None,
        rng: random.Random,
    ) -> None:
        self._endpoints = tuple(endpoints)
        self._timeout_s = config.request_timeout_s
        self._tls = tls
        self._login = login
        self._lock = threading.Lock()
        # One login serves every connection: each costs etcd a slow hash.
        self._logging_in = threading.Lock()
        self._token: str | None = None
        self._members = Members(self._endpoints, config, rng)
        # What the member that failed last said, for those who come before one is asked again.
        self._last_problem = ""
        self._kept: dict[str, _Connection] = {}
        self._watches: set[EtcdWatch] = set()
        self._closed = False
        on_fork(self, EtcdConnections._in_child)

    @property
    def address(self) -> str:
        """`etcd://host:port,…`, or `etcds://` over TLS; no credentials."""
        scheme = "etcd" if self._tls is None else "etcds"
        return f"{scheme}://{','.join(self._endpoints)}"

    def ask(self, role: str, action: Callable[[Any], T]) -> T:
        """Run one request on the connection of that role."""

        def ask() -> T:
            endpoint = self._pick()
            connection, was_there = None, False
            try:
                connection, was_there = self._connection(role, endpoint)
                answer = action(connection.client)
            except (grpc.RpcError, Etcd3Exception) as error:
                fault = fault_of(error)
                if connection is not None and fault.kind in ("unreachable", "hung", "stale_token"):
                    self._discard(role, connection, fault)
                if was_there and fault.kind in ("unreachable", "cut_off"):
                    # That an old connection broke, or that another thread closed it because of a request of its
                    # own, says little; a new one will tell.
                    raise _AskAgain(self._translate(fault)) from None
                raise self._judge(endpoint, fault) from None
            except ValueError as error:
                if "closed channel" not in str(error):
                    raise
                # gRPC's way to say that another thread closed the channel before this request began.
                raise _AskAgain(self._translate(Fault("cut_off", "no answer", str(error)))) from None
            self._worked(endpoint)
            return answer

        return self._asking(ask)

    def watch(self, prefix: bytes, from_revision: int, deliver: Callable[[WatchMessage], None]) -> EtcdWatch:
        """Open a watch, and return once etcd confirmed it."""
        return self._asking(lambda: self._watch(prefix, from_revision, deliver))

    def close(self) -> None:
        """Close every connection; waits for none."""
        with self._lock:
            self._closed = True
            kept, self._kept = self._kept, {}
            watches, self._watches = self._watches, set()
        for watch in watches:
            watch.cancel()
        for connection in kept.values():
            connection.client.close()

    # --- inside -------------------------------------------------------------------------------------------

    def _asking(self, ask: Callable[[], T]) -> T:
        """Ask again where that may mend it: on a new connection, with a new login, at another member."""
        once_each = stop_after_attempt(2 + len(self._endpoints))
        try:
            return Retrying(stop=once_each, retry=retry_if_exception_type(_AskAgain), reraise=True)(ask)
        except _AskAgain as again:
            raise again.problem from None

    def _judge(self, endpoint: str, fault: Fault) -> Exception:
        """What to raise for it; and what it says of the member."""
        problem = self._translate(fault)
        with self._lock:
            self._last_problem = f"{fault.code}: {fault.details}"
            if fault.kind == "unreachable":
                now = time.monotonic()
                self._members.failed(endpoint, now)
                if self._members.any_left:
                    return _AskAgain(problem)
                if isinstance(problem, RegistryUnavailable):
                    problem.retry_after_s = self._members.wait_s(now) or None
                return problem
            if fault.kind == "hung":
                # Its time is up, so the next request asks another one.
                self._members.hung(endpoint)
            else:
                self._members.worked(endpoint)
        return _AskAgain(problem) if fault.kind in ("stale_token", "compacted") else problem

    def _pick(self) -> str:
        with self._lock:
            self._require_open()
            now = time.monotonic()
            picked, wait_s = self._members.pick(now), self._members.wait_s(now)
        if picked is not None:
            return picked
        raise RegistryUnavailable(
            self._text(f"can't be reached ({self._last_problem}); is it running, and do address and scheme fit?"),
            endpoints=self._endpoints,
            retry_after_s=wait_s,
        )

    def _worked(self, endpoint: str) -> None:
        with self._lock:
            self._members.worked(endpoint)

    def _translate(self, fault: Fault) -> ReachError | LeaseLost:
        if self._closed:
            # Whatever gRPC calls it: the request was cut off because we were closed.
            return self._was_closed()
        match fault.kind:
            case "lease_lost":
                return LeaseLost(fault.details)
            case "forbidden" if self._login is not None:
                advice = f"grant this user's role read (and, for agents, write) on {ROOT}/"
                return Forbidden(self._text(f"refused: {fault.details}; {advice}"))
            case "forbidden" | "unauthorized" | "stale_token":
                advice = "check user and password of the registry url"
                if self._login is None:
                    advice = f"it wants a user: {advice}"
                return Unauthorized(self._text(f"refused: {fault.details}; {advice}"))
            case "hung":
                text = f"didn't answer within {self._timeout_s:g} s; is it overloaded, frozen or without a leader?"
            case "no_space":
                text = f"is out of space ({fault.details}); compact it, defragment it, and disarm its alarm"
            case _:
                text = (
                    f"can't be used ({fault.code}: {fault.details}); is it running, and do address and scheme fit?"
                )
        return RegistryUnavailable(self._text(text), endpoints=self._endpoints)

    def _text(self, problem: str) -> str:
        return f"the registry {self.address} {problem}"

    # --- connections ----------------------------------------------------------------------------------------

    def _connection(self, role: str, endpoint: str) -> tuple[_Connection, bool]:
        """The role's connection to this member, and whether it was there already."""
        with self._lock:
            kept = self._kept.get(role)
        if kept is not None and kept.endpoint == endpoint:
            return kept, True
        # Not under the lock: it may log in, and `close` must not wait for that.
        made = self._connect(endpoint)
        with self._lock:
            # We may have been closed meanwhile, or another thread was quicker.
            closed, there = self._closed, self._kept.get(role)
            if not closed and (there is None or there.endpoint != endpoint):
                self._kept[role], surplus = made, there
            else:
                surplus = made
        if surplus is not None:
            surplus.client.close()
        if closed:
            raise self._was_closed()
        # Of two that were made at once the one that is kept serves both.
        return (there, True) if surplus is made and there is not None else (made, False)

    def _connect(self, endpoint: str) -> _Connection:
        token, is_new = self._current_token(endpoint) if self._login is not None else (None, False)
        client = connect(endpoint, timeout_s=self._timeout_s, tls=self._tls, token=token)
        return _Connection(endpoint, client, token, is_new)

    def _current_token(self, endpoint: str) -> tuple[str, bool]:
        """Log in, unless that was done; of several who need it at once one does."""
        assert self._login is not None
        with self._logging_in:
            if self._token is not None:
                return self._token, False
            with closing(connect(endpoint, timeout_s=self._timeout_s, tls=self._tls)) as client:
                self._token = log_in(client, self._login)
            return self._token, True

    def _forget_token(self, token: str | None) -> None:
        with self._logging_in:
            if self._token == token:
                self._token = None

    def _require_open(self) -> None:
        if self._closed:
            raise self._was_closed()

    def _in_child(self) -> None:
        """The parent's connections are of no use to us, nor ours to close; threads of its may hold the locks."""
        self._kept, self._watches = {}, set()
        self._lock, self._logging_in = threading.Lock(), threading.Lock()

    def _was_closed(self) -> RegistryUnavailable:
        return RegistryUnavailable(self._text("was closed"), endpoints=self._endpoints)

    def _discard(self, role: str, connection: _Connection, fault: Fault) -> None:
        if fault.kind == "stale_token":
            self._forget_token(connection.token)
        with self._lock:
            ours = self._kept.get(role) is connection
            if ours:
                del self._kept[role]
        if ours:
            connection.client.close()

    def _watch(self, prefix: bytes, from_revision: int, deliver: Callable[[WatchMessage], None]) -> EtcdWatch:
        endpoint = self._pick()
        connection = None
        try:
            connection = self._connect(endpoint)
            watch = EtcdWatch(connection.client, endpoint, prefix, from_revision, deliver, self._watch_ended)
        except BaseException as error:
            if connection is not None:
                connection.client.close()
            if isinstance(error, grpc.RpcError | Etcd3Exception):
                raise self._judge(endpoint, fault_of(error)) from None
            raise
        with self._lock:
            self._watches.add(watch)
            closed = self._closed
        watch.start()
        if closed:
            watch.cancel()
        fault = watch.wait_created(self._timeout_s)
        if fault is not None:
            watch.cancel()
            if fault.kind == "forbidden" and self._login is not None and not connection.just_logged_in:
                # What etcd says of a watch with a token that aged out, too; a new one will tell.
                fault = replace(fault, kind="stale_token")
            if fault.kind == "stale_token":
                self._forget_token(connection.token)
            raise self._judge(endpoint, fault)
        self._worked(endpoint)
        return watch

    def _watch_ended(self, watch: EtcdWatch, fault: Fault | None) -> None:
        """A watch is over: cancelled, or by a fault of its member."""
        with self._lock:
            self._watches.discard(watch)
            if fault is not None and fault.kind in ("unreachable", "hung"):
                self._members.failed(watch.endpoint, time.monotonic())


class _AskAgain(Exception):
    """A request failed in a way that asking once more may mend; `problem` is what to raise if it doesn't."""

    def __init__(self, problem: Exception) -> None:
        super().__init__(str(problem))
        self.problem = problem
