"""THE call loop in virtual time: what `agent_reach.calling` does in an event loop."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

from agent_reach.errors import AgentNotFound, DeadlineExceeded, HopLimitExceeded, ReachError
from agent_reach.model import AgentInfo
from agent_reach.routing.index import Change
from agent_reach.routing.outcomes import Cancelled, Outcome
from agent_reach.routing.steps import Raise, Return, Send, Wait
from agent_reach.testing.simulation.algorithms import Algorithm, CallRequest, Session
from agent_reach.testing.simulation.answers import NO_ANSWER, NO_CONNECTION
from agent_reach.testing.simulation.draws import mix
from agent_reach.testing.simulation.exchange import Exchange
from agent_reach.testing.simulation.heap import Handle
from agent_reach.testing.simulation.places import Places, Waiter
from agent_reach.testing.simulation.world import World

__all__ = ["Call", "Client", "Done"]

Done: TypeAlias = Callable[["Call", ReachError | None], object]
"""Called when a call ended by itself, with its error if it failed."""

# As deep as ReachConfig.hop_limit lets a call tree be.
_HOP_LIMIT = 16
_CANCELLED = Cancelled()


class Call:
    """One call under way. `root_started` is when the root of its tree began; `key` is what its luck is drawn by."""

    __slots__ = (
        "attempts",
        "client",
        "counts",
        "done",
        "ended",
        "executions",
        "flights",
        "hop",
        "key",
        "request",
        "root_started",
        "session",
        "timer",
        "waiter",
        "woken",
    )

    def __init__(
        self, client: Client, request: CallRequest, key: int, done: Done, root_started: float, hop: int
    ) -> None:
        self.client = client
        self.request = request
        self.key = key
        self.done = done
        self.root_started = root_started
        self.hop = hop
        # Where to count what is done for it; None in the warm-up.
        self.counts = client.metrics.count(request.capability, root_started)
        self.session: Session | None = None
        self.attempts = 0
        self.executions = 0
        self.flights: list[Exchange] = []
        self.ended = False
        self.timer: Handle | None = None
        self.waiter: Waiter | None = None
        self.woken = False


class Client:
    """One simulated client: its algorithm, its place in the network, its calls."""

    def __init__(
        self,
        client_id: str,
        world: World,
        algorithm: Algorithm,
        *,
        zone: str | None = None,
        watch_delay_s: float = 0.02,
        view: Callable[[AgentInfo], bool] | None = None,
    ) -> None:
        self.client_id = client_id
        self.algorithm = algorithm
        self.zone = zone
        self.watch_delay_s = watch_delay_s
        self.in_flight = 0
        self.calls_open = 0
        self.metrics = world.metrics
        self._world = world
        self._heap = world.heap
        self._view = view
        self._places = Places(world.heap)
        self._delays: dict[str, float] = {}

    @property
    def waiting(self) -> int:
        """Calls that wait for a place."""
        return len(self._places)

    def sees(self, info: AgentInfo) -> bool:
        """True if this client is told of the instance."""
        return self._view is None or self._view(info)

    def hear(self, change: Change) -> None:
        """Take in news from the registry."""
        self.algorithm.apply(change, self._heap.now)

    # --- calls ---------------------------------------------------------------------------------------------

    def call(self, request: CallRequest, key: int, done: Done, *, parent: Call | None = None) -> Call:
        """Begin a call; `done` is called when it ends, perhaps before this returns, but not if it is cancelled."""
        root_started, hop = (request.started, 1) if parent is None else (parent.root_started, parent.hop + 1)
        call = Call(self, request, key, done, root_started, hop)
        self.calls_open += 1
        if parent is not None and call.counts is not None:
            call.counts.nested_calls += 1
        refused = _refused(request, hop)
        if refused is None:
            call.session = self.algorithm.open(request)
            if call.session is None:
                refused = AgentNotFound(
                    f"nobody offers {request.capability}",
                    capability=request.capability,
                    request_id=request.request_id,
                )
        if refused is not None:
            self._end(call, refused)
        elif self._places.crowded(request.capability):
            # Who comes while others wait goes behind them.
            self._wait_for_place(call, self._world.network.connect_timeout_s)
        else:
            self._go(call)
        return call

    def cancel(self, call: Call) -> None:
        """Give a call up, as when its caller left; harmless if it has ended."""
        if not call.ended:
            self._stop(call)

    def _go(self, call: Call) -> None:
        session, heap = call.session, self._heap
        assert session is not None
        step: Any = session.next(heap.now)
        to_place = isinstance(step, Wait) and step.until_place
        if call.woken and not to_place:
            # It goes, so there may be room for more; or it ends, and the place is the next one's.
            self._places.freed()
        if isinstance(step, Send):
            call.woken = False
            self._send(call, step)
        elif isinstance(step, Return):
            self._end(call, None)
        elif isinstance(step, Raise):
            self._end(call, step.error)
        elif to_place:
            self._wait_for_place(call, step.seconds)
        elif step.seconds is not None:
            # A Wait, or an Await that wants to be asked again although attempts are in flight.
            call.timer = heap.after(max(0.0, step.seconds), self._go, call)

    def _wait_for_place(self, call: Call, seconds: float) -> None:
        resume = partial(self._placed, call)
        call.waiter = self._places.wait(call.request.capability, resume, max(0.0, seconds), again=call.woken)

    def _placed(self, call: Call, woken: bool) -> None:
        call.waiter = None
        call.woken = woken
        self._go(call)

    # --- attempts ------------------------------------------------------------------------------------------

    def _send(self, call: Call, send: Send) -> None:
        heap, now = self._heap, self._heap.now
        call.attempts += 1
        agent_id = send.candidate.instance.info.agent_id
        server = self._world.servers[agent_id]
        delay_s = self._delays.get(agent_id)
        if delay_s is None:
            delay_s = self._delays[agent_id] = self._world.network.one_way_s(self.zone, server.zone)
        x = Exchange(call, send, server, mix(call.key, call.attempts), delay_s, now)
        call.flights.append(x)
        self.in_flight += 1
        server.note_sent(now)
        if call.counts is not None:
            call.counts.attempts += 1
        heap.at(now + delay_s, server.arrive, x)
        x.timer = heap.at(now + max(0.0, send.timeout_s), self._expired, x)
        hedge_after_s = getattr(send, "hedge_after_s", None)
        if hedge_after_s is not None:
            x.hedge = heap.at(now + max(0.0, hedge_after_s), self._go_anew, call)

    def answered(self, x: Exchange, outcome: Outcome) -> None:
        """An attempt's outcome got here; too late if the attempt was over."""
        if not x.over:
            self._record(x, outcome)
            self._go_anew(x.call)

    def _expired(self, x: Exchange) -> None:
        if x.sent:
            self._leave(x)
        self.answered(x, NO_ANSWER if x.sent else NO_CONNECTION)

    def _record(self, x: Exchange, outcome: Outcome) -> None:
        call, session = x.call, x.call.session
        assert session is not None
        x.over = True
        self.in_flight -= 1
        call.flights.remove(x)
        if x.timer is not None:
            self._heap.cancel(x.timer)
        if x.hedge is not None:
            self._heap.cancel(x.hedge)
        if call.counts is not None:
            call.counts.outcomes[type(outcome).__name__] += 1
        session.record(outcome, self._heap.now, x.send)
        self._places.freed()

    def _go_anew(self, call: Call) -> None:
        if call.timer is not None or call.waiter is not None:
            self._wake(call)
        self._go(call)

    def _wake(self, call: Call) -> None:
        """End its waiting, if it waits while attempts are in flight."""
        if call.timer is not None:
            self._heap.cancel(call.timer)
            call.timer = None
        if call.waiter is not None:
            self._places.leave(call.waiter)
            call.waiter = None

    def _leave(self, x: Exchange) -> None:
        self._heap.after(x.delay_s, x.server.disconnected, x)

    # --- ends ----------------------------------------------------------------------------------------------

    def _end(self, call: Call, error: ReachError | None) -> None:
        self._stop(call)
        if call.hop > 1 and error is not None and call.counts is not None:
            call.counts.nested_failures += 1
        call.done(call, error)

    def _stop(self, call: Call) -> None:
        """End the call, and whatever of it is in flight."""
        call.ended = True
        self.calls_open -= 1
        if call.timer is not None or call.waiter is not None:
            self._wake(call)
        for x in call.flights.copy() if call.flights else ():
            if x.sent:
                self._leave(x)
            self._record(x, _CANCELLED)


def _refused(request: CallRequest, hop: int) -> ReachError | None:
    if hop > _HOP_LIMIT:
        return HopLimitExceeded(f"{request.capability} would be hop {hop}", capability=request.capability)
    if request.left_s is not None and request.left_s <= 0:
        text = f"{request.capability} was not called: no time is left"
        return DeadlineExceeded(text, phase="pick", capability=request.capability)
    return None
