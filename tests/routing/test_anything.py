"""Many calls at once on one router, with anything that hypothesis can think of: outcomes, orders of completion,
second copies, cancellations, instances that come, go and restart, and settings.
"""

from __future__ import annotations

import heapq
import itertools
import random
from dataclasses import dataclass, field
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from agent_reach.config import (
    BulkheadConfig,
    EjectionConfig,
    HedgeConfig,
    LimitConfig,
    ReachConfig,
    RetryConfig,
    ScoreWeights,
    ScoringConfig,
)
from agent_reach.model import AgentInfo, CapabilityInfo, LoadReport
from agent_reach.routing.breaker import BreakerState
from agent_reach.routing.budget import RetryAllowance
from agent_reach.routing.index import Remove, Upsert
from agent_reach.routing.instance import Instance
from agent_reach.routing.outcomes import Cancelled, LostAnswer, Outcome, Unreadable, Unsent, executed
from agent_reach.routing.session import CallSession
from agent_reach.routing.steps import Await, Raise, Return, Send, Wait
from tests.routing.world import World, agent, ok, rejected

READ, WRITE = "note.read.v1", "note.write.v1"
NAMES = tuple(f"a{n}" for n in range(6))
ZONES = ("eu/a", "eu/b", "us/a", None)

OUTCOMES: list[Outcome] = [
    ok(),
    ok(load=LoadReport(in_flight=9, queued=9)),
    ok(state="draining"),
    Unsent("connect", "refused"),
    Unsent("connect", "timed out", timed_out=True),
    Unsent("pool", "full", local=True),
    LostAnswer("reset"),
    LostAnswer("no answer", timed_out=True),
    Unreadable("HTML"),
    rejected(500),
    rejected(500, retryable=False),
    rejected(503, "Overloaded", executed=False, state="overloaded", retry_after_ms=300),
    rejected(503, "Overloaded", executed=False, state="overloaded", retry_after_ms=10_000_000),
    rejected(503, "Draining", executed=False, state="draining"),
    rejected(404, "UnknownCapability", executed=False),
    rejected(422, "InvalidPayload", executed=False, retryable=False),
]


def record(number: int, incarnation: str = "one") -> AgentInfo:
    """An instance that offers both capabilities, one of them to be repeated at will."""
    info = agent(NAMES[number], [], incarnation=incarnation, zone=ZONES[number % 4])
    offers = (CapabilityInfo(name=READ, idempotent=True, timeout="interactive"), CapabilityInfo(name=WRITE))
    return info.model_copy(update={"capabilities": offers, "max_concurrency": 2 if number == 5 else None})


@dataclass
class Call:
    """A call under way, and what was promised of it."""

    session: CallSession
    idempotent: bool
    deadline: float
    attempts: int
    flights: dict[int, tuple[Send, Outcome]] = field(default_factory=dict)
    sent: int = 0
    # What isn't idempotent may have been executed.
    spent: bool = False
    waits_for_place: bool = False
    asked: int = 0
    end: Return | Raise | None = None


class Play:
    """Drives calls as a client does, on an event heap; checks what each call promises as it goes."""

    def __init__(self, world: World, script: list[tuple[Outcome, float]]) -> None:
        self.world = world
        self.now = 0.0
        self.calls: list[Call] = []
        # All that ever were there: an attempt may outlive its instance's record.
        self.instances: set[Instance] = set()
        self._script = itertools.cycle(script)
        self._order = itertools.count()
        self._events: list[tuple[float, int, Any]] = []
        self.chosen: list[str] = []

    def begin(self, capability: str, cancel_after: float | None, **plan: Any) -> Call:
        retry = plan.pop("retry")
        deadline = self.now + plan.pop("total_s")
        plan["allowance"] = RetryAllowance(plan.pop("purse", retry.max_attempts))
        session = self.world.session(
            capability=capability,
            now=self.now,
            deadline=deadline,
            retry=retry,
            hedge=self.world.config.hedge,
            **plan,
        )
        call = Call(session, capability == READ, deadline, retry.max_attempts)
        self.calls.append(call)
        if cancel_after is not None:
            self._at(self.now + cancel_after, lambda: self._cancel(call))
        self._ask(call)
        return call

    def until(self, time: float) -> None:
        """Let everything happen that is due, in order."""
        while self._events and self._events[0][0] <= time:
            due, _, event = heapq.heappop(self._events)
            assert due >= self.now
            self.now = due
            event()
        self.now = max(self.now, time)

    def finish(self) -> None:
        """Let all calls end."""
        while self._events:
            self.until(self._events[0][0])
        assert all(call.end is not None for call in self.calls)

    def _at(self, time: float, event: Any) -> None:
        heapq.heappush(self._events, (time, next(self._order), event))

    def _ask_at(self, time: float, call: Call) -> None:
        call.asked += 1
        asked = call.asked
        self._at(time, lambda: self._ask(call) if call.asked == asked and call.end is None else None)

    def _ask(self, call: Call) -> None:
        call.asked += 1
        call.waits_for_place = False
        self.instances.update(self.world.index.instances.values())
        step = call.session.next(self.now)
        match step:
            case Send():
                self._send(call, step)
            case Await(seconds):
                assert call.flights
                if seconds is not None:
                    assert seconds > 0
                    self._ask_at(self.now + seconds, call)
            case Wait(seconds, until_place):
                assert not call.flights
                assert seconds > 0
                assert self.now + seconds <= call.deadline + 1e-6
                call.waits_for_place = until_place
                self._ask_at(self.now + seconds, call)
            case Return() | Raise():
                assert self.now <= call.deadline + 1e-6
                self._end(call, step)

    def _send(self, call: Call, send: Send) -> None:
        call.sent += 1
        self.chosen.append(send.candidate.agent_id)
        assert self.now < call.deadline
        assert 0 < send.timeout_s <= call.deadline - self.now + 1e-9
        assert send.number == call.sent
        # Moves from where nothing listens are free, but each instance is moved to once.
        assert call.sent <= call.attempts + len(NAMES)
        assert len(call.flights) < (2 if call.idempotent else 1)
        assert not call.spent, "it may have been executed, and is not to be repeated"
        assert all(other.candidate.agent_id != send.candidate.agent_id for other, _ in call.flights.values())
        outcome, took = next(self._script)
        if took >= send.timeout_s and not isinstance(outcome, Unsent):
            outcome = LostAnswer("no answer", timed_out=True)
        call.flights[send.number] = (send, outcome)
        self._at(self.now + min(took, send.timeout_s), lambda: self._ended(call, send))
        if send.hedge_after_s is not None:
            assert call.idempotent
            self._ask_at(self.now + send.hedge_after_s, call)

    def _ended(self, call: Call, send: Send) -> None:
        if send.number not in call.flights:
            return
        _, outcome = call.flights.pop(send.number)
        call.spent = call.spent or (not call.idempotent and executed(outcome))
        call.session.record(outcome, self.now, send)
        self._ask(call)
        self._place_came_free()

    def _cancel(self, call: Call) -> None:
        if call.end is None:
            self._give_up(call)
            step = call.session.next(self.now)
            # A call that only waited is dropped where it stands.
            call.end = step if isinstance(step, Return | Raise) else Raise(Exception())  # type: ignore[arg-type]
            if isinstance(step, Send):
                call.session.record(Cancelled(), self.now, step)
            self._place_came_free()

    def _end(self, call: Call, end: Return | Raise) -> None:
        call.end = end
        self._give_up(call)
        assert call.session.next(self.now + 1000) is end
        attempts = end.attempts if isinstance(end, Return) else end.error.attempts
        assert len(attempts) <= call.sent
        self._place_came_free()

    def _give_up(self, call: Call) -> None:
        for send, _ in call.flights.values():
            call.session.record(Cancelled(), self.now, send)
        call.flights.clear()

    def _place_came_free(self) -> None:
        for call in self.calls:
            if call.waits_for_place and call.end is None:
                self._ask(call)


def nothing_in_flight(play: Play) -> None:
    for instance in play.instances:
        assert instance.in_flight == 0
        for learnt in instance._learnt.values():
            assert (learnt.in_flight, learnt.began, learnt.age_s(1e9)) == (0, [], 0.0)
    assert play.world.router.in_flight == {}


CONFIGS = st.builds(
    ReachConfig,
    hedge=st.sampled_from([None, HedgeConfig(min_samples=1, budget_ratio=1.0)]),
    strategy=st.sampled_from(["single", "round_robin", "weighted_random"]),
    bulkheads=st.builds(
        BulkheadConfig,
        per_tier=st.sampled_from([2, 500]),
        per_instance=st.sampled_from([1, 100]),
        adaptive=st.sampled_from([None, LimitConfig(initial=2, least=1, most=4)]),
    ),
    ejection=st.builds(
        EjectionConfig, max_share=st.sampled_from([0.5, 1.0]), panic_share=st.sampled_from([0.0, 0.5])
    ),
    scoring=st.builds(
        ScoringConfig,
        choices=st.sampled_from([2, 3]),
        weights=st.sampled_from([None, None, ScoreWeights.AGENT]),
    ),
)

CALLS = st.fixed_dictionaries(
    {
        "capability": st.sampled_from([READ, READ, WRITE]),
        "total_s": st.floats(0.01, 20),
        "retry": st.builds(
            RetryConfig,
            max_attempts=st.integers(1, 4),
            base_s=st.sampled_from([0.0, 0.2]),
            patience_s=st.sampled_from([0.0, 0.5, 5.0]),
        ),
        "context_id": st.sampled_from([None, None, "x", "y"]),
        "require_context": st.booleans(),
        "pinned": st.sampled_from([None, None, None, "a0", "a1"]),
        "purse": st.sampled_from([0, 3, 64]),
        "own_purse": st.booleans(),
        "trip_after": st.sampled_from([None, 2]),
        "cancel_after": st.none() | st.floats(0, 3),
    }
)

DEEDS = st.one_of(
    CALLS,
    CALLS,
    st.sampled_from([0.0, 0.001]) | st.floats(0, 10),
    st.tuples(st.integers(0, 5), st.sampled_from(["come", "go", "restart"])),
)


@settings(max_examples=40)
@given(
    config=CONFIGS,
    zone=st.sampled_from([None, "eu/a"]),
    count=st.integers(1, 5),
    seed=st.integers(0, 1000),
    script=st.lists(st.tuples(st.sampled_from(OUTCOMES), st.floats(0, 8)), min_size=1, max_size=40),
    deeds=st.lists(DEEDS, min_size=5, max_size=60),
)
def test_whatever_happens_to_many_calls_at_once_each_keeps_its_promises_and_nothing_is_left(
    config: ReachConfig,
    zone: str | None,
    count: int,
    seed: int,
    script: list[tuple[Outcome, float]],
    deeds: list[Any],
) -> None:
    """Attempts, time and copies within limits; what may have been executed isn't sent again; every permit comes
    back; and once the faults stop, every instance is called again and its breaker closes.
    """
    world = World(*(record(number) for number in range(count)), config=config, zone=zone, seed=seed)
    play, lives = Play(world, script), itertools.count()
    for revision, deed in enumerate(deeds, 100):
        match deed:
            case dict():
                play.begin(**deed)
            case float():
                play.until(play.now + deed)
            case (number, "go"):
                world.index.apply(Remove(NAMES[number], revision), play.now)
            case (number, what):
                life = str(next(lives)) if what == "restart" else "one"
                world.index.apply(Upsert(record(number, life), revision), play.now)
    play.finish()
    nothing_in_flight(play)
    recover(play)
    nothing_in_flight(play)


def recover(play: Play) -> None:
    """The faults are over: 400 s, a call every three, all answered. Zones play no part, or far ones had no call."""
    world, rng = play.world, random.Random(1)
    world.router.zone = None
    world.index.apply(Upsert(record(0), 10_000), play.now)
    play._script = itertools.cycle([(ok(), 0.01)])
    play.chosen.clear()
    for _ in range(135):
        play.until(play.now + 2.5 + rng.random())
        play.begin(READ, None, total_s=5.0, retry=RetryConfig())
        play.finish()
        play.calls.clear()
    for name, instance in world.index.instances.items():
        assert instance.breaker.state is BreakerState.CLOSED, name
        assert instance.breaker.available(play.now)
        # What failed often stays dear for a quarter of an hour where the share of successes is weighed.
        assert name in play.chosen or world.config.scoring.weights is not None, name


@settings(max_examples=25)
@given(
    seed=st.integers(0, 10_000),
    took=st.lists(st.floats(0.001, 4.9), min_size=3, max_size=20),
    hedged=st.booleans(),
)
def test_a_crowd_of_calls_on_few_places_all_end_and_leave_nothing(
    seed: int, took: list[float], hedged: bool
) -> None:
    """Two places in the tier, thirty calls at the same moment: they wait, get their turn or are refused in time."""
    config = ReachConfig(
        bulkheads=BulkheadConfig(per_tier=2), hedge=HedgeConfig(min_samples=1, budget_ratio=1.0) if hedged else None
    )
    world = World(*(record(number) for number in range(3)), config=config, seed=seed)
    play = Play(world, [(ok(), seconds) for seconds in took])
    for _ in range(30):
        play.begin(READ, None, total_s=15.0, retry=RetryConfig())
        assert sum(world.router.in_flight.values()) <= 2
    play.finish()
    assert any(isinstance(call.end, Return) for call in play.calls)
    nothing_in_flight(play)
