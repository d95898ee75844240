"""What happens to the agents during the demo, in order."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from agent_reach import ReachClient
from examples.customer_service.processes import AgentProcess, DemoFailed, Etcd, Fleet, until
from examples.customer_service.tally import Facts, Killed, Outage, Tally
from examples.customer_service.traffic import CAPABILITIES, Traffic

__all__ = ["TimeLine"]

# Starting is an interpreter, the imports, a registration; ten at once on a small machine take their time.
_START_S = 60.0
# A newcomer gets little work in its first 10 s, its slow start.
_USE_S = 15.0
# So many tickets in flight on the killed desk open the caller's breaker by themselves: 5 failures in a row do.
# With fewer the caller only finds the dead desk dear, asks the other one, and no fifth failure comes.
_IN_FLIGHT = 5
# So many tickets just before the kill that each of the two desks has those, even if they aren't shared out evenly.
_BURST = 14
# How often that is tried, should a busy machine have answered too many before the kill.
_BURSTS = 5


@dataclass
class TimeLine:
    """Starts the agents, then kills, replaces and moves some, and stops etcd. `say` tells a person what happens.

    `pause_s` are the quiet seconds between two events, `outage_s` how long etcd is away.
    """

    reach: ReachClient
    fleet: Fleet
    etcd: Etcd
    traffic: Traffic
    tally: Tally
    say: Callable[[str], None]
    pause_s: float
    outage_s: float

    def __post_init__(self) -> None:
        self.facts = Facts()
        self._agents: dict[str, AgentProcess] = {}

    async def open(self) -> None:
        """Start two instances of each agent and wait until the caller has discovered all of them."""
        began = time.monotonic()
        for name in CAPABILITIES:
            for number in (1, 2):
                self._start(name, f"{name}-{number}")
        for agent_id in self._agents:
            await self._discovered(agent_id)
        self.say(f"all {len(self._agents)} agents are up and discovered after {time.monotonic() - began:.1f} s")

    async def play(self) -> None:
        """Everything that happens while calls are made."""
        for event in (self._kill, self._replace, self._stop_first, self._move, self._take_etcd_away):
            await asyncio.sleep(self.pause_s)
            await event()
        await asyncio.sleep(self.pause_s)

    # --- events --------------------------------------------------------------------------------------------

    async def _kill(self) -> None:
        victim, bystander = self._agents["tickets-1"], self._agents["summary-1"]
        for _ in range(_BURSTS):
            for _ in range(_BURST):
                self.traffic.start_call("tickets")
            # Time for the calls to get there, but not for an answer: a ticket takes 0.15 s.
            await asyncio.sleep(0.08)
            if self._in_flight(victim.agent_id, "ticket.open.v1") >= _IN_FLIGHT:
                break
        self.fleet.kill(victim)
        self.facts.killed = Killed(victim.agent_id, time.monotonic())
        self.say(f"SIGKILL {victim.agent_id} while it is opening tickets")
        self.fleet.kill(bystander)
        self.say(f"SIGKILL {bystander.agent_id}; what it was doing is idempotent, so it is repeated elsewhere")
        await until(lambda: bool(self.reach.explain("ticket.open.v1").excluded), 3.0)
        self.say(f"what the caller makes of it:\n{self.reach.explain('ticket.open.v1')}")

    async def _replace(self) -> None:
        self._start("knowledge", "knowledge-3")
        self.say("start knowledge-3 to take over from knowledge-1")
        await self._newcomer("knowledge-3")
        self.say("SIGTERM knowledge-1")
        await self._stop("knowledge-1")

    async def _stop_first(self) -> None:
        self.say("SIGTERM profiles-1; the other one is alone for a while")
        await self._stop("profiles-1")
        self._start("profiles", "profiles-3")
        self.say("start profiles-3")
        await self._newcomer("profiles-3")

    async def _move(self) -> None:
        old_url = self._url_of("intent-1")
        self.say(f"intent-1 moves: SIGTERM at {old_url}")
        await self._stop("intent-1")
        self._start("intent", "intent-1")
        await self._newcomer("intent-1", not_at=old_url)

    async def _take_etcd_away(self) -> None:
        since = time.monotonic()
        self.say(f"stop etcd for {self.outage_s:g} s; calls go on from what the agents know")
        await self.etcd.stop()
        await asyncio.sleep(max(0.0, since + self.outage_s - time.monotonic()))
        self.facts.outage = Outage(since, time.monotonic())
        calls = self.tally.within(self.facts.outage)
        answered = sum(call.outcome == "ok" for call in calls)
        self.say(f"start etcd again; meanwhile {len(calls)} calls were made and {answered} are answered")
        await self.etcd.start()
        self._start("summary", "summary-3")
        self.say("start summary-3, which nobody has heard of yet")
        url = await self._newcomer("summary-3")
        if await until(lambda: self.tally.used("summary-3", url), _USE_S):
            self.say("summary-3 has answered its first call")

    # --- parts ---------------------------------------------------------------------------------------------

    def _start(self, name: str, agent_id: str) -> None:
        self._agents[agent_id] = self.fleet.start(name, agent_id)

    async def _stop(self, agent_id: str) -> None:
        took_s = await self.fleet.stop(self._agents[agent_id])
        self.say(f"{agent_id} has left the registry, finished its work and gone, in {took_s:.1f} s")

    async def _newcomer(self, agent_id: str, *, not_at: str = "") -> str:
        """Wait until an instance is discovered; the verdict at the end asks whether it was used."""
        url = await self._discovered(agent_id, not_at=not_at)
        self.facts.newcomers.append((agent_id, url))
        self.say(f"{agent_id} is discovered at {url}")
        return url

    async def _discovered(self, agent_id: str, *, not_at: str = "") -> str:
        agent = self._agents[agent_id]
        found = await until(
            lambda: not agent.running or self._url_of(agent_id) not in ("", not_at),
            _START_S,
        )
        if not agent.running:
            raise DemoFailed(f"{agent_id} ended before it was discovered. Its last words:\n{agent.tail()}")
        if not found:
            raise DemoFailed(f"{agent_id} wasn't discovered within {_START_S:g} s. Its last words:\n{agent.tail()}")
        return self._url_of(agent_id)

    def _in_flight(self, agent_id: str, capability: str) -> int:
        """How many calls the caller has in flight to an instance."""
        views = self.reach.explain(capability).candidates
        return next((view.score.in_flight for view in views if view.agent_id == agent_id), 0)

    def _url_of(self, agent_id: str) -> str:
        """Where the caller believes an instance to be; empty if it knows of none."""
        return next((info.endpoint.url for info in self.reach.agents() if info.agent_id == agent_id), "")
