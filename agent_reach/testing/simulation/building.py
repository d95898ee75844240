"""New clients, each with randomness, delays and a view of its own."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING, TypeAlias

from agent_reach.model import AgentInfo
from agent_reach.testing.simulation.algorithms import AgentReach, Algorithm
from agent_reach.testing.simulation.client import Client
from agent_reach.testing.simulation.draws import stream
from agent_reach.testing.simulation.world import AlgorithmFactory, World

if TYPE_CHECKING:
    from agent_reach.testing.simulation.server import Server

__all__ = ["WATCH_DELAY_S", "View", "agent_reach", "new_client", "own_client"]

# How long a change takes from etcd to an agent, at least and at most, in seconds.
WATCH_DELAY_S = (0.005, 0.05)

View: TypeAlias = float | Callable[[AgentInfo], bool] | None
"""Which instances a client is told of: those that a function says, a share of them, or all (None)."""


def agent_reach(rng: Random, zone: str | None) -> Algorithm:
    """Build what agents embed, with its default settings."""
    return AgentReach(rng, zone=zone)


def new_client(
    world: World,
    client_id: str,
    algorithm: AlgorithmFactory,
    *,
    zone: str | None,
    watch_delay_s: tuple[float, float] = WATCH_DELAY_S,
    view: View = None,
) -> Client:
    """Build a client and let it watch the registry."""
    low_s, high_s = watch_delay_s
    client = Client(
        client_id,
        world,
        algorithm(stream(world.seed, f"client/{client_id}"), zone),
        zone=zone,
        watch_delay_s=low_s + (high_s - low_s) * stream(world.seed, f"watch/{client_id}").random(),
        view=_share(world.seed, client_id, view) if isinstance(view, int | float) else view,
    )
    world.registry.watch(client)
    world.clients.append(client)
    return client


def own_client(world: World, server: Server) -> Client:
    """Build the client by which an incarnation of an agent calls others."""
    return new_client(world, f"{server.agent_id}#{server.starts}", world.nested, zone=server.zone)


def _share(seed: int, client_id: str, share: float) -> Callable[[AgentInfo], bool]:
    return lambda info: stream(seed, f"view/{client_id}/{info.agent_id}").random() < share
