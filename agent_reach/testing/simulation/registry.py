"""Who is there, and how the news gets to the clients."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agent_reach.model import AgentInfo
from agent_reach.routing.index import Change, Remove, Reset, Upsert
from agent_reach.testing.simulation.heap import EventHeap

if TYPE_CHECKING:
    from agent_reach.testing.simulation.client import Client

__all__ = ["Registry"]


class Registry:
    """Entries by agent id, and the clients that watch. Each client's news come in order, its own delay later."""

    def __init__(self, heap: EventHeap) -> None:
        self._heap = heap
        self._entries: dict[str, AgentInfo] = {}
        self._watchers: dict[str, Client] = {}
        self._revision = 0

    @property
    def entries(self) -> dict[str, AgentInfo]:
        """What is registered now, by agent id."""
        return dict(self._entries)

    def watch(self, client: Client) -> None:
        """Give a client the list of now, and every change from now on."""
        self._watchers[client.client_id] = client
        seen = tuple(info for info in self._entries.values() if client.sees(info))
        client.algorithm.apply(Reset(seen, self._revision, 0), self._heap.now)

    def unwatch(self, client: Client) -> None:
        """Tell a client nothing more."""
        if self._watchers.get(client.client_id) is client:
            del self._watchers[client.client_id]

    def register(self, info: AgentInfo) -> None:
        """Put an entry in; it replaces that of an earlier incarnation."""
        self._entries[info.agent_id] = info
        self._revision += 1
        self._tell(Upsert(info, self._revision), info)

    def remove(self, info: AgentInfo) -> None:
        """Take out the entry of this incarnation, if it is still there."""
        if self._entries.get(info.agent_id) is info:
            del self._entries[info.agent_id]
            self._revision += 1
            self._tell(Remove(info.agent_id, self._revision), info)

    def expire_after(self, seconds: float, info: AgentInfo) -> None:
        """Take it out once its lease is over."""
        self._heap.after(seconds, self.remove, info)

    def _tell(self, change: Change, info: AgentInfo) -> None:
        for client in self._watchers.values():
            if client.sees(info):
                self._heap.after(client.watch_delay_s, client.hear, change)
