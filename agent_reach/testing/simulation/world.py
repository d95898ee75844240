"""What everything in one simulation shares."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from agent_reach.testing.simulation.draws import KeyedRandom
from agent_reach.testing.simulation.heap import EventHeap
from agent_reach.testing.simulation.metrics import Metrics
from agent_reach.testing.simulation.network import Network
from agent_reach.testing.simulation.registry import Registry

if TYPE_CHECKING:
    from agent_reach.testing.simulation.client import Client
    from agent_reach.testing.simulation.server import Server

__all__ = ["World"]


@dataclass(slots=True)
class World:
    """Time, the network, the registry, the servers by agent id, and what is measured."""

    seed: int
    heap: EventHeap
    network: Network
    registry: Registry
    metrics: Metrics
    # Builds the client by which an agent makes its own calls.
    client_of: Callable[[Server], Client]
    draws: KeyedRandom = field(default_factory=KeyedRandom)
    servers: dict[str, Server] = field(default_factory=dict)
