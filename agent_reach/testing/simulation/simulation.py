"""A world to put agents, callers and faults in, and to run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import cycle, islice

from agent_reach.config import ReachConfig
from agent_reach.testing.simulation.arrivals import Arrivals, ClosedLoop
from agent_reach.testing.simulation.building import WATCH_DELAY_S, View, agent_reach, new_client
from agent_reach.testing.simulation.client import Client
from agent_reach.testing.simulation.distributions import Distribution
from agent_reach.testing.simulation.draws import stream
from agent_reach.testing.simulation.faults import Fault, SharedDownstream
from agent_reach.testing.simulation.heap import EventHeap
from agent_reach.testing.simulation.load import Load
from agent_reach.testing.simulation.metrics import Metrics
from agent_reach.testing.simulation.network import Network
from agent_reach.testing.simulation.offers import Nested, Offer
from agent_reach.testing.simulation.registry import Registry
from agent_reach.testing.simulation.server import Server
from agent_reach.testing.simulation.world import AlgorithmFactory, World

__all__ = ["Simulation"]


class Simulation:
    """Servers, clients, load and faults in virtual time. The same seed gives the same result, bit for bit; what one
    algorithm is compared with another by, arrivals and the luck of each attempt, depends on the seed alone.

    `warm_up_s`: root calls that begin before it are left out of the metrics. `nested` builds the algorithm of the
    agents that call others themselves. Times are virtual seconds, from 0.
    """

    def __init__(
        self,
        seed: int = 0,
        *,
        network: Network | None = None,
        warm_up_s: float = 0.0,
        nested: AlgorithmFactory = agent_reach,
    ) -> None:
        self.heap = EventHeap()
        self.metrics = Metrics(warm_up_s)
        self.servers: dict[str, Server] = {}
        # Those of agents that call others, too.
        self.all_clients: list[Client] = []
        self._seed = seed
        self._loads: list[Load] = []
        self._world = World(
            seed=seed,
            heap=self.heap,
            network=network or Network(),
            registry=Registry(self.heap),
            metrics=self.metrics,
            nested=nested,
            servers=self.servers,
            clients=self.all_clients,
        )
        self._begun = False
        self._ended = False

    # --- who is there --------------------------------------------------------------------------------------

    def server(
        self,
        agent_id: str,
        *offers: Offer,
        start_s: float | None = 0.0,
        zone: str | None = None,
        weight: float = 1.0,
        speed: float = 1.0,
        max_concurrency: int | None = None,
        report_delay_s: float = 0.0,
        uses: Sequence[str] = (),
        lease_ttl_s: float = 15.0,
    ) -> Server:
        """Add one agent with its offers, started at `start_s` (None: by `start`). The rest is as in `Server`."""
        if agent_id in self.servers:
            raise ValueError(f"there is an agent {agent_id!r} already")
        server = self.servers[agent_id] = Server(
            self._world,
            agent_id,
            offers,
            zone=zone,
            weight=weight,
            speed=speed,
            max_concurrency=max_concurrency,
            report_delay_s=report_delay_s,
            uses=uses,
            lease_ttl_s=lease_ttl_s,
        )
        if start_s is not None:
            self.start(server, start_s)
        return server

    def fleet(
        self,
        capability: str,
        count: int,
        *,
        service: Distribution,
        slots: int | None = 8,
        queue: int | None = None,
        idempotent: bool = True,
        timeout: str | float = "interactive",
        announce_slots: bool = True,
        calls: Sequence[Nested | str] = (),
        name: str | None = None,
        zones: Sequence[str] = (),
        speeds: Sequence[float] = (1.0,),
        weights: Sequence[float] = (1.0,),
        start_s: float | None = 0.0,
        max_concurrency: int | None = None,
        report_delay_s: float = 0.0,
        uses: Sequence[str] = (),
        lease_ttl_s: float = 15.0,
    ) -> list[Server]:
        """Add `count` agents that offer one capability, as in `Offer` and `Server`.

        They are called `name`-1, `name`-2 …; `zones`, `speeds` and `weights` are dealt out in turn.
        """
        offer = Offer(
            capability=capability,
            service=service,
            slots=slots,
            queue=queue,
            idempotent=idempotent,
            timeout=timeout,
            announce_slots=announce_slots,
            calls=tuple(Nested(call) if isinstance(call, str) else call for call in calls),
        )
        base = name or capability.split(".")[0]
        dealt = islice(zip(cycle(zones or (None,)), cycle(speeds), cycle(weights), strict=False), count)
        return [
            self.server(
                f"{base}-{number}",
                offer,
                start_s=start_s,
                zone=zone,
                weight=weight,
                speed=speed,
                max_concurrency=max_concurrency,
                report_delay_s=report_delay_s,
                uses=uses,
                lease_ttl_s=lease_ttl_s,
            )
            for number, (zone, speed, weight) in enumerate(dealt, 1)
        ]

    def clients(
        self,
        count: int,
        algorithm: AlgorithmFactory = agent_reach,
        *,
        name: str = "client",
        zones: Sequence[str] = (),
        watch_delay_s: tuple[float, float] = WATCH_DELAY_S,
        view: View = None,
    ) -> list[Client]:
        """Add `count` clients, `name`-1, `name`-2 …, each with an algorithm of its own. `zones` are dealt out in
        turn.

        News from the registry reach each of them after a delay of its own, drawn from `watch_delay_s`. `view`:
        which instances a client is told of, or which share of them, drawn for each client and instance.
        """
        return [
            new_client(
                self._world, f"{name}-{number}", algorithm, zone=zone, watch_delay_s=watch_delay_s, view=view
            )
            for number, zone in enumerate(islice(cycle(zones or (None,)), count), 1)
        ]

    # --- what happens --------------------------------------------------------------------------------------

    def load(
        self,
        clients: Sequence[Client],
        capability: str,
        arrivals: Arrivals | ClosedLoop,
        *,
        timeout_s: float | None = None,
        deadline_s: float | None = None,
        from_s: float = 0.0,
        until_s: float = math.inf,
        most_calls: int | None = None,
        cancel_share: float = 0.0,
        cancel_after: Distribution | None = None,
        context_ids: Sequence[str] = (),
        name: str | None = None,
    ) -> None:
        """Let root calls come: `arrivals` of all `clients` together, each at one of them by chance (workers: in
        turn).

        `timeout_s` is the total that the caller names, None for the capability's own. `deadline_s` is what a
        failure is taken to cost; by default `timeout_s`, or the total that Agent-Reach gives the capability.
        `cancel_share` of the calls are given up after a time drawn from `cancel_after`. `context_ids`: each call
        belongs to one of these conversations, by chance. `name` keeps the randomness apart from that of other
        loads.
        """
        name = name or f"load-{len(self._loads) + 1}"
        if cancel_share and cancel_after is None:
            raise ValueError("cancel_share needs cancel_after: how long callers wait before they give up")
        if deadline_s is None:
            deadline_s = self._total_s(capability) if timeout_s is None else timeout_s
        load = Load(
            self._world,
            name,
            stream(self._seed, f"load/{name}"),
            clients,
            capability,
            arrivals,
            timeout_s=timeout_s,
            deadline_s=deadline_s,
            from_s=from_s,
            until_s=until_s,
            most_calls=most_calls,
            cancel_share=cancel_share,
            cancel_after=cancel_after,
            context_ids=context_ids,
        )
        self._loads.append(load)
        if self._begun:
            load.begin()

    def inject(self, fault: Fault, *servers: Server | Iterable[Server]) -> None:
        """Let a fault befall servers; a `SharedDownstream` that names none befalls all that use it so far."""
        if not servers and isinstance(fault, SharedDownstream):
            hit = [server for server in self.servers.values() if fault.name in server.uses]
        else:
            hit = [server for part in servers for server in ([part] if isinstance(part, Server) else part)]
        if not hit:
            raise ValueError(f"{fault} befalls nobody: name the servers")
        for server in hit:
            server.conditions.add(fault)

    def start(self, server: Server, at_s: float) -> None:
        """Start it, or start it again as a new incarnation."""
        self._at(at_s, server.start)

    def kill(self, server: Server, at_s: float, *, silent: bool = False) -> None:
        """End it without a word; see `Server.kill`."""
        self._at(at_s, lambda: server.kill(silent=silent))

    def drain(self, server: Server, at_s: float) -> None:
        """Let it leave in order; see `Server.drain`."""
        self._at(at_s, server.drain)

    def restart(self, server: Server, at_s: float, *, down_s: float = 1.0) -> None:
        """Kill it and start it again `down_s` later, under the same id."""
        self.kill(server, at_s)
        self.start(server, at_s + down_s)

    def run(self, until_s: float, *, drain: bool = True) -> Metrics:
        """Run until `until_s`. With `drain` no call begins after that, and those under way are seen to their end;
        then it can't be run again. Without, they stay as they are, and the next `run` goes on.
        """
        if self._ended:
            raise ValueError("this simulation has been run to its end")
        if not self._begun:
            self._begun = True
            for load in self._loads:
                load.begin()
        self.heap.run(until_s)
        if drain:
            self._ended = True
            for load in self._loads:
                load.stopped = True
            self.heap.run()
        return self.metrics

    # --- inside --------------------------------------------------------------------------------------------

    def _at(self, at_s: float, action: Callable[[], object]) -> None:
        # What is there from the start is there before the clients look, without an event.
        if at_s <= self.heap.now:
            action()
        else:
            self.heap.at(at_s, action)

    def _total_s(self, capability: str) -> float:
        config = ReachConfig()
        offers = [o for s in self.servers.values() for o in s.offers if o.capability == capability]
        attempt_s = config.timeouts.of(offers[0].timeout if offers else "interactive")
        return max(attempt_s, min(attempt_s * config.retry.max_attempts, config.timeouts.total_s))
