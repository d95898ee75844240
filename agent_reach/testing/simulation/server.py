"""A simulated agent: its place, its faults, its starts and ends."""

from __future__ import annotations

from collections.abc import Sequence

from agent_reach.model import AgentInfo, Endpoint
from agent_reach.testing.simulation import answers
from agent_reach.testing.simulation.conditions import Conditions
from agent_reach.testing.simulation.exchange import Exchange
from agent_reach.testing.simulation.faults import BlackHole
from agent_reach.testing.simulation.incarnation import Incarnation
from agent_reach.testing.simulation.offers import Offer
from agent_reach.testing.simulation.world import World

__all__ = ["Server"]


class Server:
    """One agent. `state` is down, accepting, draining or lost (its host is gone, and its port silent).

    `speed` divides its service times; `uses` names what it depends on, for `SharedDownstream`. Its load reports are
    `report_delay_s` old. `lease_ttl_s` is how long its entry outlives it, `linger_s` and `drain_s` are those of
    `ServingConfig`.
    """

    def __init__(
        self,
        world: World,
        agent_id: str,
        offers: Sequence[Offer],
        *,
        zone: str | None = None,
        weight: float = 1.0,
        speed: float = 1.0,
        max_concurrency: int | None = None,
        report_delay_s: float = 0.0,
        uses: Sequence[str] = (),
        lease_ttl_s: float = 15.0,
        linger_s: float = 3.0,
        drain_s: float = 30.0,
    ) -> None:
        self.agent_id = agent_id
        self.offers = tuple(offers)
        self.zone = zone
        self.weight = weight
        self.speed = speed
        self.max_concurrency = max_concurrency
        self.report_delay_s = report_delay_s
        self.uses = frozenset(uses)
        self.conditions = Conditions()
        # Called with the time of every attempt that is sent here.
        self.note_sent = world.metrics.sent_to(agent_id)
        self.state = "down"
        self.started_at = 0.0
        # How many incarnations there were.
        self.starts = 0
        # What runs now, or ran last.
        self.incarnation: Incarnation | None = None
        self._world = world
        self._heap = world.heap
        self._lease_ttl_s = lease_ttl_s
        self._linger_s = linger_s
        self._drain_s = drain_s
        self._info: AgentInfo | None = None

    @property
    def in_flight(self) -> int:
        """Requests that it holds: waiting, running, hung."""
        return 0 if self.incarnation is None else len(self.incarnation.held)

    @property
    def running(self) -> int:
        """Slots in use."""
        return 0 if self.incarnation is None else self.incarnation.running

    @property
    def queued(self) -> int:
        """Requests that wait for a slot."""
        return 0 if self.incarnation is None else self.incarnation.queued

    # --- start and end -------------------------------------------------------------------------------------

    def start(self) -> None:
        """Come up as a new incarnation, and register. Raises ValueError if it is up."""
        if self.state in ("accepting", "draining"):
            raise ValueError(f"{self.agent_id} is up: kill it, or let it drain, before it starts again")
        self.starts += 1
        self.state = "accepting"
        self.started_at = self._heap.now
        self._info = AgentInfo(
            agent_id=self.agent_id,
            incarnation=f"{self.starts}",
            name=self.agent_id,
            namespace="default",
            endpoint=Endpoint(url=f"http://{self.agent_id}.sim:8080"),
            zone=self.zone,
            weight=self.weight,
            max_concurrency=self.max_concurrency,
            registered_at=self._heap.now,
            capabilities=tuple(offer.info for offer in self.offers),
        )
        self.incarnation = Incarnation(self._world, self)
        self._world.registry.register(self._info)

    def kill(self, *, silent: bool = False) -> None:
        """End at once: what it holds is lost, its entry stays until its lease ends. `silent`: the whole host is
        gone, so that nobody is told: connections hang, and answers never come.
        """
        if self.incarnation is None or self._info is None or self.state in ("down", "lost"):
            return
        self.incarnation.lose(silent=silent)
        self._world.registry.expire_after(self._lease_ttl_s, self._info)
        self._close("lost" if silent else "down")

    def drain(self) -> None:
        """Withdraw and say so in every answer, accept for `linger_s` more, finish what runs, close; all of it takes
        `drain_s` at the most.
        """
        if self.state != "accepting" or self._info is None:
            return
        self.state = "draining"
        self._world.registry.remove(self._info)
        self._heap.after(self._linger_s, self._linger_ended, self.starts)
        self._heap.after(self._drain_s, self._drain_ended, self.starts)

    def idle(self) -> None:
        """What runs tells that it holds nothing any more, after it was told to refuse."""
        if self.state == "draining":
            self._close("down")

    def _linger_ended(self, starts: int) -> None:
        if self.state == "draining" and starts == self.starts and self.incarnation is not None:
            self.incarnation.refuse()

    def _drain_ended(self, starts: int) -> None:
        if self.state == "draining" and starts == self.starts and self.incarnation is not None:
            self.incarnation.stop()

    def _close(self, state: str) -> None:
        self.state = state
        if self.incarnation is not None and self.incarnation.client is not None:
            self._world.registry.unwatch(self.incarnation.client)

    # --- requests ------------------------------------------------------------------------------------------

    def arrive(self, x: Exchange) -> None:
        """A request gets here, or rather to the door."""
        now, conditions = self._heap.now, self.conditions
        if self.state in ("down", "lost"):
            self._world.metrics.dead(x.sent_at, x.call.client.client_id, self.agent_id)
            self._turn_away(x, silent=self.state == "lost")
            return
        if conditions.any:
            door = conditions.door(now)
            if door is not None:
                self._turn_away(x, silent=isinstance(door, BlackHole))
                return
            awake = conditions.awake(now)
            if awake > now:
                self._heap.at(awake, self.arrive, x)
                return
        assert self.incarnation is not None
        self.incarnation.take(x)

    def disconnected(self, x: Exchange) -> None:
        """The caller of this request is gone."""
        now = self._heap.now
        awake = self.conditions.awake(now) if self.conditions.any else now
        if awake > now:
            self._heap.at(awake, self.disconnected, x)
        elif self.incarnation is not None:
            self.incarnation.disconnected(x)

    def _turn_away(self, x: Exchange, *, silent: bool) -> None:
        client = x.call.client
        if silent:
            x.sent = False
            patience_s = self._world.network.connect_timeout_s - x.delay_s
            self._heap.after(max(0.0, patience_s), client.answered, x, answers.NO_CONNECTION)
        else:
            self._heap.after(x.delay_s, client.answered, x, answers.REFUSED)
