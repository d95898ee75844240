"""Who calls, when, and how patiently."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from agent_reach.errors import ReachError
from agent_reach.testing.simulation.algorithms import CallRequest
from agent_reach.testing.simulation.arrivals import Arrivals, ClosedLoop
from agent_reach.testing.simulation.client import Call, Client
from agent_reach.testing.simulation.distributions import Distribution
from agent_reach.testing.simulation.draws import mix
from agent_reach.testing.simulation.world import World

__all__ = ["Load"]

# Parts of a call's luck; attempts have the small numbers.
_CANCELLING, _THINKING, _CONTEXT = 1 << 32, (1 << 32) + 1, (1 << 32) + 2


class Load:
    """Root calls of one capability. `Simulation.load` says what the settings mean."""

    def __init__(
        self,
        world: World,
        name: str,
        rng: random.Random,
        clients: Sequence[Client],
        capability: str,
        arrivals: Arrivals | ClosedLoop,
        *,
        timeout_s: float | None,
        deadline_s: float,
        from_s: float,
        until_s: float,
        most_calls: int | None,
        cancel_share: float,
        cancel_after: Distribution | None,
        context_ids: Sequence[str],
    ) -> None:
        self.started = 0
        self.stopped = False
        self._world = world
        self._heap = world.heap
        self._metrics = world.metrics
        self._name = name
        self._rng = rng
        self._key = rng.getrandbits(64)
        self._clients = clients
        self._capability = capability
        self._arrivals = arrivals
        self._timeout_s = timeout_s
        self._deadline_s = deadline_s
        self._from_s = from_s
        self._until_s = until_s
        self._most_calls = most_calls
        self._cancel_share = cancel_share
        self._cancel_after = cancel_after
        self._context_ids = context_ids
        self._times: Iterator[float] = iter(())

    def begin(self) -> None:
        """Schedule the first calls."""
        if isinstance(self._arrivals, ClosedLoop):
            for worker in range(self._arrivals.workers):
                self._heap.at(self._from_s, self._work, self._clients[worker % len(self._clients)])
        else:
            self._times = self._arrivals.times(self._rng, self._from_s)
            self._await_next()

    # --- open loop -----------------------------------------------------------------------------------------

    def _await_next(self) -> None:
        time_s = next(self._times, None)
        if time_s is not None:
            self._heap.at(time_s, self._arrive)

    def _arrive(self) -> None:
        if not self._over():
            self._await_next()
            # Drawn here, so that every algorithm faces the same arrivals at the same clients.
            self._call(self._clients[int(self._rng.random() * len(self._clients))])

    # --- closed loop ---------------------------------------------------------------------------------------

    def _work(self, client: Client) -> None:
        if not self._over():
            self._call(client)

    def _again(self, call: Call) -> None:
        if isinstance(self._arrivals, ClosedLoop):
            self._world.draws.rekey(mix(call.key, _THINKING))
            self._heap.after(self._arrivals.thinking.draw(self._world.draws), self._work, call.client)

    # --- calls ---------------------------------------------------------------------------------------------

    def _over(self) -> bool:
        enough = self._most_calls is not None and self.started >= self._most_calls
        return self.stopped or enough or self._heap.now >= self._until_s

    def _call(self, client: Client) -> None:
        self.started += 1
        key, draws = mix(self._key, self.started), self._world.draws
        context_id = None
        if self._context_ids:
            draws.rekey(mix(key, _CONTEXT))
            context_id = self._context_ids[int(draws.random() * len(self._context_ids))]
        request = CallRequest(
            capability=self._capability,
            request_id=f"{self._name}.{self.started}",
            started=self._heap.now,
            timeout_s=self._timeout_s,
            context_id=context_id,
        )
        call = client.call(request, key, self._done)
        if self._cancel_after is not None and not call.ended:
            draws.rekey(mix(key, _CANCELLING))
            if draws.random() < self._cancel_share:
                self._heap.after(self._cancel_after.draw(draws), self._cancel, call)

    def _cancel(self, call: Call) -> None:
        if not call.ended:
            call.client.cancel(call)
            self._report(call, "Cancelled")
            self._again(call)

    def _done(self, call: Call, error: ReachError | None) -> None:
        self._report(call, None if error is None else type(error).__name__)
        self._again(call)

    def _report(self, call: Call, failure: str | None) -> None:
        started = call.request.started
        took_s = self._heap.now - started
        self._metrics.ended(self._capability, started, took_s, self._deadline_s, call.attempts, failure)
