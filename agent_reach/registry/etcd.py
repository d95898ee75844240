"""The registry in etcd. Only `etcd*.py` know pyetcd and gRPC, and no exception of theirs leaves them.

Layout: `/agent-reach/v1/{namespace}/agents/{agent_id}`, names quoted, one JSON record each, always under a lease.

Leases and writes, lists, and each watch have a client and a connection of their own: a slow list never delays a
keep-alive, and the end of one watch never touches another. All ask the same member, until it fails.
"""

from __future__ import annotations

import builtins
import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import grpc
from pyetcd import etcdrpc
from pyetcd.exceptions import Etcd3Exception
from pyetcd.utils import prefix_range_end

from agent_reach.config import RegistryConfig
from agent_reach.errors import ConfigError, RegistryUnavailable
from agent_reach.ports import (
    Created,
    LeaseLost,
    Listing,
    Occupied,
    Probe,
    RawRecord,
    Watch,
    WatchMessage,
)
from agent_reach.registry.etcd_client import Login, fault_of, read_tls
from agent_reach.registry.etcd_connections import EtcdConnections
from agent_reach.registry.keys import agent_id_of, key_of, prefix_of

__all__ = ["EtcdRegistry"]

# 1,000 records of 1 KB are 1 MB an answer: quick, and far from any limit.
_PAGE = 1000
# 20 KB in 3 s: whatever is slower than that serves nobody.
_LEAST_PAGE = 20


class EtcdRegistry:
    """Implements the `Registry` port on an etcd cluster (API v3).

    `endpoints` are `host:port` (IPv6 in brackets). With `secure` connections use TLS: the system's roots or the
    PEM file `ca`; `cert` and `key` are the files of a client certificate. Nothing is connected before the first
    request. Raises `ConfigError` if a file can't be read or the parts don't fit.

    `rng` draws the member to begin with, and the pauses while none answers.
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
        rng: random.Random | None = None,
    ) -> None:
        if not endpoints:
            raise ConfigError("an etcd registry needs at least one endpoint, like '127.0.0.1:2379'")
        if (username is None) != (password is None):
            raise ConfigError("etcd needs both a user and a password, or neither")
        if (cert is None) != (key is None):
            raise ConfigError("a client certificate needs both `cert` and `key`")
        if not secure and (ca or cert):
            raise ConfigError("certificates were given, but the connection isn't secure; use etcds://")
        self._connections = EtcdConnections(
            endpoints,
            config=config,
            tls=read_tls(ca, cert, key) if secure else None,
            login=Login(username, password) if username is not None and password is not None else None,
            rng=rng or random.Random(),
        )
        self._page = _PAGE

    def __repr__(self) -> str:
        return f"<EtcdRegistry {self.address}>"

    @property
    def blocking(self) -> bool:
        """True: every method waits for the network."""
        return True

    @property
    def address(self) -> str:
        """`etcd://host:port,…`, or `etcds://` over TLS; no credentials."""
        return self._connections.address

    def grant(self, ttl_s: float) -> int:
        """Open a lease; etcd counts whole seconds, so `ttl_s` is rounded up."""
        return int(self._connections.ask("leases", lambda client: client.lease(math.ceil(ttl_s)).id))

    def keep_alive(self, lease: int) -> bool:
        """Renew once; False if the lease lives no longer, which etcd says by a TTL of 0."""

        def renew(client: Any) -> bool:
            answers = builtins.list(client.refresh_lease(lease))
            if not answers:
                raise RegistryUnavailable(f"the registry {self.address} closed the keep-alive without an answer")
            return bool(answers[-1].TTL > 0)

        return self._connections.ask("leases", renew)

    def revoke(self, lease: int) -> None:
        """End a lease and with it its records; one that is gone already is no error."""
        try:
            self._connections.ask("leases", lambda client: client.revoke_lease(lease))
        except LeaseLost:
            return

    def time_left(self, lease: int) -> float:
        """Whole seconds that a lease has left; 0 if it ended, for which etcd says -1."""
        return self._connections.ask("leases", lambda client: max(0.0, float(client.get_lease_info(lease).TTL)))

    def get(self, namespace: str, agent_id: str) -> RawRecord | None:
        """One record; etcd writes nothing to its log for it."""
        request = etcdrpc.RangeRequest(key=key_of(namespace, agent_id))

        def read(client: Any) -> RawRecord | None:
            found = client.kvstub.Range(request, client.timeout, metadata=client.metadata).kvs
            return RawRecord(agent_id, found[0].value, found[0].mod_revision, found[0].lease) if found else None

        return self._connections.ask("leases", read)

    def create(self, namespace: str, agent_id: str, value: bytes, lease: int) -> Created | Occupied:
        """Write only if no record is there, in one transaction."""
        _check_lease(lease)
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
            return Occupied(RawRecord(agent_id, held, about.mod_revision, about.lease_id))

        return self._connections.ask("leases", write)

    def replace(self, namespace: str, held: RawRecord, value: bytes, lease: int) -> bool:
        """Write over `held` if it is still what is there, in one transaction."""
        _check_lease(lease)
        key = key_of(namespace, held.agent_id)

        def write(client: Any) -> bool:
            done, _ = client.transaction(
                compare=[client.transactions.mod(key) == held.revision],
                success=[client.transactions.put(key, value, lease=lease)],
                failure=[],
            )
            return bool(done)

        return self._connections.ask("leases", write)

    def list(self, namespace: str) -> Listing:
        """Everything in the namespace at one revision, read page by page.

        A page that doesn't come in time may be too large for this way; then the next list's are smaller.
        """
        prefix = prefix_of(namespace)

        def read(client: Any) -> Listing:
            start, revision = prefix, 0
            records: builtins.list[RawRecord] = []
            while True:
                try:
                    answer = client.get_range_response(
                        start, prefix_range_end(prefix), limit=min(self._page, _PAGE), revision=revision
                    )
                except (grpc.RpcError, Etcd3Exception) as error:
                    if fault_of(error).kind == "hung":
                        self._page = max(_LEAST_PAGE, self._page // 4)
                    raise
                revision = revision or answer.header.revision
                records += (
                    RawRecord(agent_id_of(prefix, kv.key), kv.value, kv.mod_revision, kv.lease) for kv in answer.kvs
                )
                if not answer.more:
                    self._page = min(_PAGE, self._page * 2)
                    return Listing(answer.header.cluster_id, revision, tuple(records))
                start = answer.kvs[-1].key + b"\0"

        return self._connections.ask("lists", read)

    def probe(self, namespace: str, known: Sequence[RawRecord]) -> Probe:
        """Ask for the number of records, and for keys, revisions and leases of a few.

        Reads only, so etcd writes nothing to its log for it, which it does for a comparison in a transaction.
        """
        prefix = prefix_of(namespace)
        keys = [key_of(namespace, record.agent_id) for record in known]
        ranges = [etcdrpc.RangeRequest(key=prefix, range_end=prefix_range_end(prefix), count_only=True)]
        ranges += [etcdrpc.RangeRequest(key=key, keys_only=True) for key in keys]

        def read(client: Any) -> Probe:
            counted, *found = self._read_at_once(client, ranges)
            changed = {
                record.agent_id
                for record, there in zip(known, found, strict=True)
                # Revisions of a store that began anew may coincide; the ids of its leases don't.
                if [(kv.mod_revision, kv.lease) for kv in there.kvs] != [(record.revision, record.lease)]
            }
            header = counted.header
            return Probe(header.cluster_id, header.revision, counted.count, frozenset(changed))

        return self._connections.ask("lists", read)

    def _read_at_once(self, client: Any, ranges: Sequence[Any]) -> builtins.list[Any]:
        """Several reads at one revision, and with the header of that."""
        request = etcdrpc.TxnRequest(success=[etcdrpc.RequestOp(request_range=one) for one in ranges])
        try:
            answer = client.kvstub.Txn(request, client.timeout, metadata=client.metadata)
        except grpc.RpcError as error:
            if fault_of(error).kind != "no_space":
                raise
        else:
            answers = [response.response_range for response in answer.responses]
            answers[0].header.CopyFrom(answer.header)
            return answers
        # An etcd without space refuses transactions, some versions those of reads too; but it reads.
        first = client.kvstub.Range(ranges[0], client.timeout, metadata=client.metadata)
        answers = [first]
        for one in ranges[1:]:
            one.revision = first.header.revision
            answers.append(client.kvstub.Range(one, client.timeout, metadata=client.metadata))
        return answers

    def watch(self, namespace: str, from_revision: int, deliver: Callable[[WatchMessage], None]) -> Watch:
        """Deliver changes from `from_revision` on; one that lies ahead is accepted and silent until then.

        Returns once etcd confirmed the watch.
        """
        return self._connections.watch(prefix_of(namespace), from_revision, deliver)

    def close(self) -> None:
        """Close connections; leases are left to end by themselves unless revoked.

        Never waits for the network: requests that are under way fail, those that still log in once that is done.
        """
        self._connections.close()


def _check_lease(lease: int) -> None:
    if lease == 0:
        raise LeaseLost("lease 0 is none")
