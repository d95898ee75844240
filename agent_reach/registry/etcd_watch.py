"""One watch on etcd. Of the modules that know pyetcd and gRPC."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any

import grpc
from pyetcd import etcdrpc
from pyetcd.utils import prefix_range_end

from agent_reach.ports import Deleted, Put, RawRecord, WatchChanges, WatchLost, WatchMessage, WatchProgress
from agent_reach.registry.etcd_client import Fault, classify, fault_of
from agent_reach.registry.keys import agent_id_of

__all__ = ["EtcdWatch"]

_log = logging.getLogger(__name__)


class EtcdWatch:
    """One watch on a stream, a client and a thread of its own.

    pyetcd's own watcher ignores a cancellation by the server (permissions, a bad token) and shares one stream
    among watches, so the stream is driven here. It closes `client` when it ends; while it is made, the caller does.
    `ended` is told once, with the fault if there was one.
    """

    def __init__(
        self,
        client: Any,
        endpoint: str,
        prefix: bytes,
        from_revision: int,
        deliver: Callable[[WatchMessage], None],
        ended: Callable[[EtcdWatch, Fault | None], None],
    ) -> None:
        self._client = client
        self._prefix = prefix
        self._deliver = deliver
        self._ended = ended
        # Held while delivering, so that nothing is delivered once `cancel` returned; a callback may cancel.
        self._delivering = threading.RLock()
        self._cancelled = False
        self._created = threading.Event()
        self._fault: Fault | None = None
        create = etcdrpc.WatchCreateRequest(
            key=prefix,
            range_end=prefix_range_end(prefix),
            start_revision=from_revision,
            progress_notify=True,
        )
        # What to send; None ends the stream.
        self._requests: SimpleQueue[Any] = SimpleQueue()
        self._requests.put(etcdrpc.WatchRequest(create_request=create))
        self.endpoint = endpoint
        self._stream = etcdrpc.WatchStub(client.channel).Watch(self._outgoing(), metadata=client.metadata)

    def start(self) -> None:
        """Begin to deliver, and to tell of the end."""
        threading.Thread(target=self._run, name="agent-reach-etcd-watch", daemon=True).start()

    def wait_created(self, timeout_s: float) -> Fault | None:
        """Wait until etcd confirmed the watch; what went wrong if it didn't."""
        if not self._created.wait(timeout_s):
            return classify(grpc.StatusCode.DEADLINE_EXCEEDED, "the watch was not confirmed")
        return self._fault

    def ask_progress(self) -> None:
        """Ask etcd how far this stream has come; the answer is delivered in its turn."""
        self._requests.put(etcdrpc.WatchRequest(progress_request=etcdrpc.WatchProgressRequest()))

    def cancel(self) -> None:
        """End it; nothing is delivered once this returned."""
        with self._delivering:
            self._cancelled = True
        self._requests.put(None)
        self._stream.cancel()

    def _outgoing(self) -> Iterator[Any]:
        return iter(self._requests.get, None)

    def _run(self) -> None:
        compacted = False
        try:
            fault, compacted = self._read()
        except Exception as error:  # noqa: BLE001 - outermost: also after a bug somebody waits for the end
            if not isinstance(error, grpc.RpcError):
                _log.exception("reading a watch failed")
            fault = fault_of(error)
        self._requests.put(None)
        if self._created.is_set():
            self._send(WatchLost(fault.details, compacted=compacted))
        else:
            self._fault = fault
            self._created.set()
        self._ended(self, None if self._cancelled else fault)
        self._stream.cancel()
        self._client.close()

    def _read(self) -> tuple[Fault, bool]:
        """Deliver until the watch ends; return how it did, and whether by a compaction."""
        for answer in self._stream:
            if answer.compact_revision:
                # Creation was confirmed before: a revision that is gone is told like any other end.
                self._created.set()
                text = f"changes before revision {answer.compact_revision} were compacted"
                return classify(None, text), True
            if answer.canceled:
                return classify(None, answer.cancel_reason or "etcd cancelled the watch"), False
            if answer.created:
                self._created.set()
            elif answer.events:
                changes = tuple(self._change(event) for event in answer.events)
                # Not the header's revision: a watch that catches up may be behind it.
                self._send(WatchChanges(answer.events[-1].kv.mod_revision, changes))
            else:
                self._send(WatchProgress(answer.header.revision))
        return classify(grpc.StatusCode.UNAVAILABLE, "etcd closed the stream"), False

    def _change(self, event: Any) -> Put | Deleted:
        agent_id = agent_id_of(self._prefix, event.kv.key)
        if event.type == event.DELETE:
            return Deleted(agent_id, event.kv.mod_revision)
        return Put(RawRecord(agent_id, event.kv.value, event.kv.mod_revision, event.kv.lease))

    def _send(self, message: WatchMessage) -> None:
        with self._delivering:
            if not self._cancelled:
                self._deliver(message)
