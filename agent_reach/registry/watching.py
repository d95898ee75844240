"""What is in the registry, brought to the index; the side that its users hold. `following.py` does the work."""

from __future__ import annotations

import asyncio
import copy
import random
from collections import deque
from collections.abc import Callable, Sequence

from agent_reach.config import RegistryConfig
from agent_reach.errors import Forbidden, Unauthorized
from agent_reach.events import Event
from agent_reach.ports import Clock, Registry
from agent_reach.registry.following import Finding, Follower
from agent_reach.registry.hosting import Host, Signal, unavailable
from agent_reach.registry.view import WatchView
from agent_reach.routing.index import Change, Remove, Reset, Upsert

__all__ = ["WatchView", "Watcher"]

# Changes that are taken in before the application's loop gets its turn: a few milliseconds.
_PORTION = 100


class Watcher:
    """Follows one namespace for as long as it runs; it never gives up by itself.

    `apply`, `emit` and changes of `view` happen on the loop that called `start`, in revision order. With a
    blocking registry everything else, decoding too, happens on a thread.
    """

    def __init__(
        self,
        registry: Registry,
        namespace: str,
        *,
        apply: Callable[[Change], None],
        config: RegistryConfig,
        clock: Clock,
        rng: random.Random,
        emit: Callable[[Event], None],
    ) -> None:
        self._registry = registry
        self._apply = apply
        self._clock = clock
        self._emit = emit
        self._changed = Signal()
        self._view = WatchView()
        self._stopped = False
        self._inbox: deque[Finding] = deque()
        self._host = Host("agent-reach-watcher", self._follow, threaded=registry.blocking, clock=clock)
        self._follower = Follower(
            registry,
            namespace,
            host=self._host,
            found=lambda findings: self._host.post(self._took, findings),
            config=config,
            rng=rng,
        )

    @property
    def view(self) -> WatchView:
        """How well the index matches the registry now."""
        return self._view

    def start(self) -> None:
        """Begin to list and watch. Needs a running event loop; returns at once."""
        self._host.start()

    async def stop(self, timeout_s: float = 0.3) -> None:
        """Stop; nothing is applied or emitted afterwards. A stuck request is left behind after `timeout_s`."""
        self._stopped = True
        self._changed.fire()
        await self._host.stop(timeout_s)

    async def wait_loaded(self, timeout_s: float) -> None:
        """Return once a first list was applied; any number of callers share that one list.

        Raises `Unauthorized` or `Forbidden` if the registry refuses us, `RegistryUnavailable` after `timeout_s`.
        """

        def settled() -> WatchView | None:
            view = self._view
            refused = isinstance(view.error, Unauthorized | Forbidden)
            return view if view.status != "starting" or refused or self._stopped else None

        view = await self._changed.wait_for(settled, self._clock, timeout_s)
        if view is None or self._stopped:
            raise unavailable(self._registry.address, timeout_s, "no list of agents came", self._view.error)
        if view.status == "starting" and view.error is not None:
            # A copy for each caller, who adds the call to it and gets a traceback of its own.
            raise copy.copy(view.error)

    async def first_attempt(self) -> None:
        """Return once the first list was applied or has failed; `view` tells which.

        A registry does either within its own request timeout.
        """
        await self._changed.wait_for(
            lambda: self._stopped or self._view.status != "starting" or self._view.error is not None or None,
            self._clock,
        )

    async def _follow(self) -> None:
        await self._follower.run()

    def _took(self, findings: Sequence[Finding]) -> None:
        """Take in what the follower found, on the owner's loop."""
        waits = bool(self._inbox)
        self._inbox.extend(findings)
        if not waits:
            self._take_in()

    def _take_in(self) -> None:
        """In their order, and in portions: 10,000 instances at once would hold up the application for long."""
        try:
            for _ in range(_PORTION):
                if not self._inbox or self._stopped:
                    return
                finding = self._inbox.popleft()
                match finding:
                    case Upsert() | Remove():
                        self._apply(finding)
                    case Reset():
                        self._apply(finding)
                        # A portion by itself.
                        return
                    case WatchView():
                        self._view = finding
                        self._changed.fire()
                    case _:
                        self._emit(finding)
        finally:
            # Also after somebody's bug: what follows is still to be taken in.
            if self._inbox and not self._stopped:
                asyncio.get_running_loop().call_soon(self._take_in)
