"""What the tests of registration and watching share."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable

from agent_reach.config import ReachConfig, RegistryConfig
from agent_reach.events import Event, RegistrationChanged, RegistryChanged
from agent_reach.model import AgentInfo, CapabilityInfo, Endpoint
from agent_reach.ports import Clock, Registry
from agent_reach.registry.announcing import Announcer
from agent_reach.registry.watching import Watcher
from agent_reach.routing.index import Change, Index


def info(
    agent_id: str = "a", *, incarnation: str = "i1", namespace: str = "prod", url: str = "http://10.0.0.1:9000"
) -> AgentInfo:
    return AgentInfo(
        agent_id=agent_id,
        incarnation=incarnation,
        name=agent_id,
        namespace=namespace,
        endpoint=Endpoint(url=url),
        capabilities=(CapabilityInfo(name="a.b.v1"),),
    )


class Announced:
    """An announcer and what it said."""

    def __init__(
        self,
        registry: Registry,
        clock: Clock,
        record: AgentInfo | None = None,
        config: RegistryConfig | None = None,
        seed: int = 1,
    ) -> None:
        self.info = record or info()
        self.events: list[Event] = []
        self.announcer = Announcer(
            registry,
            lambda: self.info,
            config=config or RegistryConfig(),
            clock=clock,
            rng=random.Random(seed),
            emit=self.events.append,
        )

    @property
    def status(self) -> str:
        return self.announcer.state.status

    @property
    def said(self) -> list[str]:
        return [e.status for e in self.events if isinstance(e, RegistrationChanged)]


class Watched:
    """A watcher, the index it feeds, and what it said."""

    def __init__(
        self,
        registry: Registry,
        clock: Clock,
        config: RegistryConfig | None = None,
        seed: int = 1,
        namespace: str = "prod",
    ) -> None:
        self.clock = clock
        self.index = Index(ReachConfig())
        self.changes: list[Change] = []
        self.events: list[Event] = []
        self.watcher = Watcher(
            registry,
            namespace,
            apply=self.apply,
            config=config or RegistryConfig(),
            clock=clock,
            rng=random.Random(seed),
            emit=self.events.append,
        )

    def apply(self, change: Change) -> None:
        self.changes.append(change)
        self.index.apply(change, self.clock.now())

    @property
    def ids(self) -> list[str]:
        return sorted(self.index.instances)

    @property
    def status(self) -> str:
        return self.watcher.view.status

    @property
    def said(self) -> list[str]:
        return [e.status for e in self.events if isinstance(e, RegistryChanged)]


async def eventually(check: Callable[[], object], within_s: float = 30.0) -> None:
    """Wait in real time until the condition holds."""
    deadline = time.monotonic() + within_s
    while not check():
        assert time.monotonic() < deadline, "it never came true"
        await asyncio.sleep(0.01)
