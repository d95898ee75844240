"""One life of a simulated agent: requests in, answers out, as `agent_reach.serving` does it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agent_reach.errors import ReachError
from agent_reach.routing.budget import RetryAllowance
from agent_reach.routing.outcomes import Outcome
from agent_reach.testing.simulation import answers
from agent_reach.testing.simulation.algorithms import CallRequest
from agent_reach.testing.simulation.building import own_client
from agent_reach.testing.simulation.draws import mix
from agent_reach.testing.simulation.exchange import Exchange
from agent_reach.testing.simulation.faults import Busy, DropAfterExecuting, FailFast, Hang, SharedDownstream
from agent_reach.testing.simulation.offers import Admission, Offer
from agent_reach.testing.simulation.world import World

if TYPE_CHECKING:
    from agent_reach.testing.simulation.client import Call
    from agent_reach.testing.simulation.server import Server

__all__ = ["Incarnation"]

# Parts of an attempt's luck beside its service time: its fate, and each nested call.
_FATE, _NESTED = 1, 2
# What a handler that is at fault itself raises; any class that isn't one of ours.
_FAILURE = "RuntimeError"


class Incarnation:
    """What runs between a start and an end."""

    def __init__(self, world: World, server: Server) -> None:
        self._world = world
        self._heap = world.heap
        self._server = server
        self._conditions = server.conditions
        self._refusing = False
        self._admissions = {offer.capability: Admission(offer, server.report_delay_s) for offer in server.offers}
        # In order of arrival: a dict, for the order of a set isn't the same in every run.
        self.held: dict[Exchange, None] = {}
        nests = any(offer.calls for offer in server.offers)
        self.client = own_client(world, server) if nests else None

    @property
    def running(self) -> int:
        """Slots in use."""
        return sum(admission.running for admission in self._admissions.values())

    @property
    def queued(self) -> int:
        """Requests that wait for a slot."""
        return sum(len(admission.queue) for admission in self._admissions.values())

    # --- its end -------------------------------------------------------------------------------------------

    def refuse(self) -> None:
        """Take nothing more, and tell the server when nothing is left."""
        self._refusing = True
        self._tell_idle()

    def stop(self) -> None:
        """Answer everything at once: what runs is cancelled, what waits never ran."""
        self._refusing = True
        waiting = [x for x in self.held if x.began is None]
        for x in waiting + [x for x in self.held if x.began is not None]:
            self._cut_short(x, 503, "NotStarted")
        self._tell_idle()

    def lose(self, *, silent: bool) -> None:
        """Vanish; callers see their connections reset, or nothing at all."""
        lost = list(self.held)
        self.held.clear()
        for admission in self._admissions.values():
            admission.running = 0
            admission.queue.clear()
        for x in lost:
            self._stop_work(x)
            if not silent:
                self._heap.after(x.delay_s, x.call.client.answered, x, answers.RESET)

    def _tell_idle(self) -> None:
        if self._refusing and not self.held:
            self._server.idle()

    # --- requests ------------------------------------------------------------------------------------------

    def take(self, x: Exchange) -> None:
        """Take a request in."""
        now = self._heap.now
        x.arrived(now)
        x.admission = admission = self._admissions[x.send.candidate.capability.name]
        self.held[x] = None
        if self._refusing:
            self._reject(x, 503, "NotStarted", retryable=True)
        elif now >= x.deadline:
            self._reject(x, 504, "DeadlineExceeded", retryable=True)
        elif not (self._conditions.any and self._meets_fate(x, now)):
            self._admit(x, admission, now)

    def disconnected(self, x: Exchange) -> None:
        """The caller is gone: so is what was done for it."""
        if x in self.held:
            self._let_go(x)
            self._tell_idle()

    def _meets_fate(self, x: Exchange, now: float) -> bool:
        """True if a fault keeps the request from being admitted."""
        draws = self._world.draws
        draws.rekey(mix(x.key, _FATE))
        x.fate = fate = self._conditions.fate(now, draws)
        if isinstance(fate, Hang):
            return True
        if isinstance(fate, Busy):
            wanted_s = fate.retry_after_s
            wanted_ms = None if wanted_s is None else round(wanted_s * 1000)
            self._reject(x, 429, "Overloaded", retryable=True, retry_after_ms=wanted_ms)
            return True
        if isinstance(fate, FailFast | SharedDownstream) and fate.after_s is not None:
            self._execute(x, now)
            x.event = self._heap.after(fate.after_s, self._fail, x)
            return True
        return False

    def _admit(self, x: Exchange, admission: Admission, now: float) -> None:
        if admission.running < admission.most:
            admission.running += 1
            self._begin(x, admission, now)
        elif len(admission.queue) < admission.room:
            admission.queue.append(x)
            x.event = self._heap.at(self._conditions.awake(x.deadline), self._cut_short, x, 504, "DeadlineExceeded")
        else:
            self._reject(x, 503, "Overloaded", retryable=True, retry_after_ms=admission.retry_after_ms())
            return
        admission.changed(now)

    # --- work ----------------------------------------------------------------------------------------------

    def _begin(self, x: Exchange, admission: Admission, now: float) -> None:
        """Run a request in a slot that is counted already."""
        x.in_slot = True
        self._execute(x, now)
        offer, draws, conditions = admission.offer, self._world.draws, self._conditions
        draws.rekey(x.key)
        took_s = offer.service.draw(draws) / self._server.speed
        ends = now + took_s
        if conditions.paces:
            ends = conditions.ends(now, took_s * conditions.factor(now, self._server.started_at))
        if ends > x.deadline:
            x.event = self._heap.at(conditions.awake(x.deadline), self._cut_short, x, 504, "DeadlineExceeded")
        elif offer.calls and x.fate is None:
            x.purse = RetryAllowance(x.send.retry_allowance)
            x.event = self._heap.at(ends, self._call_on, x, 0)
        else:
            x.event = self._heap.at(ends, self._finish, x)

    def _execute(self, x: Exchange, now: float) -> None:
        x.began = now
        call = x.call
        call.executions += 1
        counts = call.counts
        if counts is not None:
            counts.executions += 1
            if call.executions > 1:
                counts.duplicates += 1
                counts.unsafe_duplicates += not _offer(x).idempotent

    def _call_on(self, x: Exchange, step: int) -> None:
        """Make the handler's next nested call, or end."""
        calls, draws = _offer(x).calls, self._world.draws
        while step < len(calls):
            key = mix(x.key, _NESTED + step)
            draws.rekey(key)
            if draws.random() < calls[step].share:
                self._nest(x, step, key)
                return
            step += 1
        self._finish(x)

    def _nest(self, x: Exchange, step: int, key: int) -> None:
        nested, now = _offer(x).calls[step], self._heap.now
        x.event = self._heap.at(self._conditions.awake(x.deadline), self._cut_short, x, 504, "DeadlineExceeded")
        request = CallRequest(
            capability=nested.capability,
            request_id=f"{x.call.request.request_id}.{x.send.number}.{step}",
            started=now,
            timeout_s=nested.timeout_s,
            left_s=x.deadline - now,
            allowance=x.purse,
            context_id=x.call.request.context_id,
        )

        def done(call: Call, error: ReachError | None) -> None:
            x.nested = None
            if error is not None:
                # What failed has been retried next to the fault; unless that hop had no retries left.
                retryable = _offer(x).idempotent and error.starved
                self._reject(x, 500, type(error).__name__, retryable=retryable, executed=True)
                return
            if x.event is not None:
                self._heap.cancel(x.event)
            self._call_on(x, step + 1)

        assert self.client is not None
        call = self.client.call(request, key, done, parent=x.call)
        if not call.ended:
            x.nested = call

    def _finish(self, x: Exchange) -> None:
        fate, admission = x.fate, x.admission
        assert admission is not None
        if fate is None:
            self._let_go(x)
            load = admission.load(self._heap.now)
            self._answer(x, answers.succeeded(self._server.agent_id, self._state(admission), load, _left(x)))
        elif isinstance(fate, DropAfterExecuting):
            self._let_go(x)
            self._answer(x, answers.RESET)
        else:
            self._fail(x)

    def _fail(self, x: Exchange) -> None:
        self._reject(x, 500, _FAILURE, retryable=_offer(x).idempotent, executed=True)

    def _cut_short(self, x: Exchange, status: int, kind: str) -> None:
        """End it before it is done, or before it began."""
        executed = x.began is not None
        self._reject(x, status, kind, retryable=not executed or _offer(x).idempotent, executed=executed)

    # --- answers -------------------------------------------------------------------------------------------

    def _reject(
        self,
        x: Exchange,
        status: int,
        kind: str,
        *,
        retryable: bool,
        executed: bool = False,
        retry_after_ms: int | None = None,
    ) -> None:
        admission = x.admission
        assert admission is not None
        self._let_go(x)
        info = answers.error(kind, retryable=retryable, executed=executed, retry_after_ms=retry_after_ms)
        load = admission.load(self._heap.now)
        self._answer(x, answers.rejected(status, info, self._state(admission), load, _left(x)))

    def _state(self, admission: Admission) -> str:
        state = self._server.state
        return "overloaded" if state == "accepting" and admission.is_full else state

    def _answer(self, x: Exchange, outcome: Outcome) -> None:
        heap = self._heap
        heap.at(heap.now + x.delay_s, x.call.client.answered, x, outcome)
        if self._refusing:
            self._tell_idle()

    def _let_go(self, x: Exchange) -> None:
        """Hold it no longer; its slot is the next one's."""
        del self.held[x]
        self._stop_work(x)
        admission = x.admission
        assert admission is not None
        if x.in_slot:
            assert x.began is not None
            x.in_slot = False
            now = self._heap.now
            admission.took(now - x.began)
            if admission.queue:
                # Handed over, it stays counted: no newcomer slips in.
                following = admission.queue.popleft()
                assert following.event is not None
                self._heap.cancel(following.event)
                self._begin(following, admission, now)
            else:
                admission.running -= 1
            admission.changed(now)
        elif x.began is None and x in admission.queue:
            admission.queue.remove(x)
            admission.changed(self._heap.now)

    def _stop_work(self, x: Exchange) -> None:
        if x.event is not None:
            self._heap.cancel(x.event)
        if x.nested is not None:
            nested, x.nested = x.nested, None
            nested.client.cancel(nested)


def _offer(x: Exchange) -> Offer:
    assert x.admission is not None
    return x.admission.offer


def _left(x: Exchange) -> int:
    """How many of the retries that came along are left."""
    return x.send.retry_allowance if x.purse is None else x.purse.left
