"""One running instance as this client knows it: its record, and what was learnt of it.

What was learnt belongs to the incarnation: a changed record keeps it, a restarted process starts clean.
"""

from __future__ import annotations

from dataclasses import dataclass

from agent_reach.config import ReachConfig
from agent_reach.model import AgentInfo, CapabilityInfo, LoadReport
from agent_reach.routing.breaker import Breaker
from agent_reach.routing.stats import PeakEwma

__all__ = ["Candidate", "Instance"]


class Instance:
    """An agent process. `in_flight` counts this client's calls to it.

    `busy_until` is when it may be asked again after it said that it is overloaded, `avoid_until` the same
    after it said that it drains (a preference only: a draining instance still answers).
    """

    __slots__ = (
        "_config",
        "_latencies",
        "avoid_until",
        "breaker",
        "busy_until",
        "in_flight",
        "info",
        "load",
        "warm_from",
    )

    def __init__(self, info: AgentInfo, config: ReachConfig, now: float) -> None:
        self._config = config
        self._latencies: dict[str, PeakEwma] = {}
        self.info = info
        self.breaker = Breaker(config.breaker)
        self.in_flight = 0
        self.load: LoadReport | None = None
        self.busy_until = 0.0
        self.avoid_until = 0.0
        self.warm_from = now

    @property
    def limit(self) -> int:
        """How many calls this client keeps in flight to it at the most."""
        return self.info.max_concurrency or self._config.bulkheads.per_instance

    def offer(self, capability: CapabilityInfo) -> Candidate:
        """Return this instance as a candidate for one capability; its latencies are kept by name."""
        latency = self._latencies.get(capability.name)
        if latency is None:
            latency = self._latencies[capability.name] = PeakEwma(self._config.scoring.decay_s)
        return Candidate(self, capability, latency)


@dataclass(frozen=True, slots=True, eq=False)
class Candidate:
    """An instance offering one capability. Latency is kept per capability: one agent may answer a look-up in
    30 ms and write a report in a minute.
    """

    instance: Instance
    capability: CapabilityInfo
    latency: PeakEwma

    @property
    def agent_id(self) -> str:
        """The instance's id."""
        return self.instance.info.agent_id

    @property
    def url(self) -> str:
        """Where it is dialed."""
        return self.instance.info.endpoint.url
