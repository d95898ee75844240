"""What everything in one simulation shares."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, TypeAlias

from agent_reach.testing.simulation.algorithms import Algorithm
from agent_reach.testing.simulation.draws import KeyedRandom
from agent_reach.testing.simulation.heap import EventHeap
from agent_reach.testing.simulation.metrics import Metrics
from agent_reach.testing.simulation.network import Network
from agent_reach.testing.simulation.registry import Registry

if TYPE_CHECKING:
    from agent_reach.testing.simulation.client import Client
    from agent_reach.testing.simulation.server import Server

__all__ = ["AlgorithmFactory", "World"]

AlgorithmFactory: TypeAlias = Callable[[Random, str | None], Algorithm]
"""Builds one client's algorithm, given its randomness and its zone."""


@dataclass(slots=True)
class World:
    """Time, the network, the registry, servers by agent id, all clients, and what is measured."""

    seed: int
    heap: EventHeap
    network: Network
    registry: Registry
    metrics: Metrics
    # Builds the algorithm of an agent that calls others itself.
    nested: AlgorithmFactory
    draws: KeyedRandom = field(default_factory=KeyedRandom)
    servers: dict[str, Server] = field(default_factory=dict)
    clients: list[Client] = field(default_factory=list)
