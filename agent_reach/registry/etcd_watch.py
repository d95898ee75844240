"""One watch on etcd. With `etcd.py` the only module that knows pyetcd and gRPC."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import grpc
from pyetcd import etcdrpc
from pyetcd.exceptions import NoServerAvailableError
from pyetcd.utils import prefix_range_end

from agent_reach.ports import Deleted, Put, RawRecord, WatchChanges, WatchLost, WatchMessage, WatchProgress
from agent_reach.registry.keys import agent_id_of

__all__ = ["EtcdWatch", "code_and_details"]

_UNREACHABLE = "failed to connect to all addresses"


class EtcdWatch:
    """One watch on a stream, a client and a thread of its own.

    pyetcd's own watcher ignores a cancellation by the server (permissions, a bad token) and shares one stream
    among watches, so the stream is driven here. It closes `client` when it ends; while it is made, the caller does.
    """

    def __init__(
        self,
        client: Any,
        prefix: bytes,
        from_revision: int,
        deliver: Callable[[WatchMessage], None],
        ended: Callable[[EtcdWatch], None],
    ) -> None:
        self._client = client
        self._prefix = prefix
        self._deliver = deliver
        self._ended = ended
        # Held while delivering, so that nothing is delivered once `cancel` returned; a callback may cancel.
        self._delivering = threading.RLock()
        self._cancelled = False
        self._created = threading.Event()
        self._problem: tuple[grpc.StatusCode | None, str] | None = None
        self._over = threading.Event()
        create = etcdrpc.WatchCreateRequest(
            key=prefix,
            range_end=prefix_range_end(prefix),
            start_revision=from_revision,
            progress_notify=True,
        )
        self._request = etcdrpc.WatchRequest(create_request=create)
        channel = client.channel
        self.endpoint: str = client.endpoint_in_use.netloc
        self._stream = etcdrpc.WatchStub(channel).Watch(self._requests(), metadata=client.metadata)
        threading.Thread(target=self._run, name="agent-reach-etcd-watch", daemon=True).start()

    def wait_created(self, timeout_s: float) -> tuple[grpc.StatusCode | None, str] | None:
        """Wait until etcd confirmed the watch; what went wrong if it didn't."""
        if not self._created.wait(timeout_s):
            return grpc.StatusCode.DEADLINE_EXCEEDED, "the watch was not confirmed"
        return self._problem

    def cancel(self) -> None:
        """End it; nothing is delivered once this returned."""
        with self._delivering:
            self._cancelled = True
        self._over.set()
        self._stream.cancel()

    def _requests(self) -> Iterator[Any]:
        yield self._request
        # The stream ends when its requests do.
        self._over.wait()

    def _run(self) -> None:
        try:
            code, reason, compacted = self._read()
        except grpc.RpcError as error:
            (code, reason), compacted = code_and_details(error), False
        self._over.set()
        if self._created.is_set():
            self._send(WatchLost(reason, compacted=compacted))
        else:
            self._problem = (code, reason)
            self._created.set()
        if not self._cancelled:
            self._ended(self)
        self._stream.cancel()
        self._client.close()

    def _read(self) -> tuple[grpc.StatusCode | None, str, bool]:
        """Deliver until the watch ends; return how it did."""
        for answer in self._stream:
            if answer.compact_revision:
                # Creation was confirmed before: a revision that is gone is told like any other end.
                self._created.set()
                return None, f"changes before revision {answer.compact_revision} were compacted", True
            if answer.canceled:
                return None, answer.cancel_reason or "etcd cancelled the watch", False
            if answer.created:
                self._created.set()
            elif answer.events:
                changes = tuple(self._change(event) for event in answer.events)
                # Not the header's revision: a watch that catches up may be behind it.
                self._send(WatchChanges(answer.events[-1].kv.mod_revision, changes))
            else:
                self._send(WatchProgress(answer.header.revision))
        return None, "etcd closed the stream", False

    def _change(self, event: Any) -> Put | Deleted:
        agent_id = agent_id_of(self._prefix, event.kv.key)
        if event.type == event.DELETE:
            return Deleted(agent_id, event.kv.mod_revision)
        return Put(RawRecord(agent_id, event.kv.value, event.kv.mod_revision))

    def _send(self, message: WatchMessage) -> None:
        with self._delivering:
            if not self._cancelled:
                self._deliver(message)


def code_and_details(error: BaseException) -> tuple[grpc.StatusCode | None, str]:
    """What gRPC said, also from under pyetcd's own exceptions."""
    if isinstance(error, NoServerAvailableError):
        return None, "no member answered lately"
    while not isinstance(error, grpc.RpcError):
        if error.__context__ is None:
            return None, str(error) or type(error).__name__
        error = error.__context__
    code = error.code() if hasattr(error, "code") else None
    details = (error.details() if hasattr(error, "details") else None) or "no details"
    if details.startswith(_UNREACHABLE):
        # What follows tells each address at length; the cause is what stands last.
        details = f"{_UNREACHABLE}: {details.rpartition(': ')[2]}"
    return code, details
