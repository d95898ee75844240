"""One running instance as this client knows it: its record, and what was learnt of it.

What was learnt belongs to the incarnation: a changed record keeps it, a restarted process starts clean.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from agent_reach.config import ReachConfig
from agent_reach.model import AgentInfo, CapabilityInfo, LoadReport
from agent_reach.routing.breaker import Breaker, BreakerState
from agent_reach.routing.limits import GradientLimit
from agent_reach.routing.stats import Latency, SuccessShare

__all__ = ["Candidate", "Instance", "Learnt"]


class Learnt:
    """What was learnt of one capability of one instance. Kept by capability: one agent may answer a look-up in
    30 ms and write a report in a minute, and be full of reports while look-ups are idle.

    `began` lists when this client's calls in flight began, the oldest first; `busy_until` is when it may be asked
    again after it said that it is overloaded; `load` is what it said last of its own load; `limit`, if there is
    one, is how many calls it has been seen to bear; `turn` is the number of the latest choice of this client that
    fell on it.
    """

    __slots__ = ("began", "busy_until", "latency", "limit", "load", "success", "turn")

    def __init__(self, config: ReachConfig) -> None:
        self.latency = Latency(config.scoring.decay_s)
        self.success = SuccessShare()
        self.limit = GradientLimit(config.bulkheads.adaptive) if config.bulkheads.adaptive else None
        self.began: list[float] = []
        self.turn = 0
        self.busy_until = 0.0
        self.load: LoadReport | None = None

    @property
    def in_flight(self) -> int:
        """How many of this client's calls are under way there."""
        return len(self.began)

    def age_s(self, now: float) -> float:
        """How long more than half of its calls in flight have taken so far, in seconds; 0.0 without any.

        A call counts before it ends: who learns from answers alone sends a minute's calls to an instance that hangs
        (Kratos `selector/node/ewma/node.go`). More than half: one long call is no news.
        """
        return now - self.began[len(self.began) // 2] if self.began else 0.0


class Instance:
    """An agent process. `in_flight` counts this client's calls to it.

    `avoid_until`: until then others are preferred, for it said that it drains, or another answered at its address.
    """

    __slots__ = (
        "_config",
        "_learnt",
        "avoid_until",
        "breaker",
        "in_flight",
        "info",
        "warm_from",
    )

    def __init__(self, info: AgentInfo, config: ReachConfig, now: float) -> None:
        self._config = config
        self._learnt: dict[str, Learnt] = {}
        self.info = info
        self.breaker = Breaker(config.breaker)
        self.in_flight = 0
        self.avoid_until = 0.0
        self.warm_from = now

    def forgive(self) -> None:
        """Forget what failures were booked as: it is well again."""
        for learnt in self._learnt.values():
            learnt.latency.forgive()

    def offer(self, capability: CapabilityInfo) -> Candidate:
        """Return this instance as a candidate for one capability."""
        learnt = self._learnt.get(capability.name)
        if learnt is None:
            learnt = self._learnt[capability.name] = Learnt(self._config)
        info, bulkheads = self.info, self._config.bulkheads
        own = capability.max_concurrency
        slots = own or info.max_concurrency
        return Candidate(
            self,
            capability,
            learnt,
            agent_id=info.agent_id,
            slots=slots,
            slots_root=math.sqrt(slots or self._config.scoring.assumed_slots),
            limit=math.inf if own is None else own * bulkheads.per_slot,
            instance_limit=info.max_concurrency or bulkheads.per_instance,
        )


@dataclass(frozen=True, slots=True, eq=False)
class Candidate:
    """An instance offering one capability. What a record says is read once, as each pick looks at several.

    `slots`: how many calls of this capability it says it runs at a time, `slots_root` the square root of that or of
    what is assumed; `limit` of this client's calls of the capability may be in flight, `instance_limit` of all.
    """

    instance: Instance
    capability: CapabilityInfo
    learnt: Learnt
    agent_id: str
    slots: int | None
    slots_root: float
    limit: float
    instance_limit: int

    @property
    def url(self) -> str:
        """Where it is dialed."""
        return self.instance.info.endpoint.url

    @property
    def latency(self) -> Latency:
        """How fast it answers this capability."""
        return self.learnt.latency

    @property
    def full(self) -> bool:
        """True if as many of this client's calls are in flight to it as may be."""
        learnt = self.learnt
        if self.instance.in_flight >= self.instance_limit or len(learnt.began) >= self.limit:
            return True
        # Who announces what it bears is believed.
        return learnt.limit is not None and self.slots is None and len(learnt.began) >= learnt.limit.value

    def admits_at(self, now: float) -> float:
        """When it takes a call: `now` or later, on the same clock; infinity if a call in flight must end first."""
        breaker = self.instance.breaker
        if self.full:
            return math.inf
        if breaker.unreachable or breaker.available(now):
            return max(now, self.learnt.busy_until)
        if breaker.state is BreakerState.HALF_OPEN:
            return math.inf
        return max(breaker.until, self.learnt.busy_until)
