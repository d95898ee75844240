"""A session that sends a second copy while the first is under way."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest

from agent_reach.errors import ReachError
from agent_reach.routing.index import Change
from agent_reach.routing.outcomes import Cancelled, Outcome, Succeeded
from agent_reach.routing.router import Router
from agent_reach.routing.steps import Raise, Return, Send
from agent_reach.testing.simulation import CallRequest, FailFast, Slow
from tests.simulation.engine.support import Small


@dataclass(frozen=True, slots=True)
class HedgedSend(Send):
    hedge_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class Await:
    seconds: float | None


class Hedger:
    """Sends to the first instance and, once `after_s` are over, to the second one too."""

    def __init__(self, after_s: float = 0.2, ask_again_s: float | None = None) -> None:
        self.router = Router(rng=random.Random(1))
        self.after_s = after_s
        self.ask_again_s = ask_again_s
        self.asked: list[float] = []
        self.recorded: list[tuple[float, int, str]] = []

    def apply(self, change: Change, now: float) -> None:
        self.router.index.apply(change, now)

    def open(self, request: CallRequest) -> HedgedSession:
        return HedgedSession(self, request)


class HedgedSession:
    def __init__(self, owner: Hedger, request: CallRequest) -> None:
        self.owner = owner
        self.candidates = owner.router.lookup(request.capability).candidates
        self.open: list[Send] = []
        self.sent = 0
        self.end: Return | Raise | None = None

    def next(self, now: float) -> Any:
        self.owner.asked.append(now)
        if self.end is not None:
            return self.end
        if self.sent == 0 or (self.sent == 1 and (not self.open or len(self.owner.asked) > 1)):
            send = HedgedSend(self.candidates[self.sent], self.sent + 1, 2.0, 0, self.owner.after_s)
            self.sent += 1
            self.open.append(send)
            return send
        return Await(self.owner.ask_again_s) if self.open else Raise(ReachError("both failed"))

    def record(self, outcome: Outcome, now: float, send: Send | None = None) -> None:
        assert send is not None
        self.open.remove(send)
        self.owner.recorded.append((round(now, 4), send.number, type(outcome).__name__))
        if isinstance(outcome, Succeeded) and self.end is None:
            self.end = Return(outcome.reply, ())
        elif not isinstance(outcome, Cancelled) and not self.open and self.sent == 2:
            self.end = Raise(ReachError("both failed"))


def hedged(hedger: Hedger) -> Small:
    small = Small(hedger, count=2)
    small.sim.inject(Slow(10.0), small.server)
    return small


def test_the_first_answer_wins_and_the_other_copy_is_cancelled_at_its_server() -> None:
    hedger = Hedger()
    small = hedged(hedger)
    small.call(1.0)
    running: list[int] = []
    for at_s in (1.25, 1.31):
        small.sim.heap.at(at_s, lambda: running.append(small.server.running))
    metrics = small.run()
    assert hedger.recorded == [(1.301, 2, "Succeeded"), (1.301, 1, "Cancelled")]
    assert running == [1, 0]
    assert small.errors == [None]
    counts = metrics.counts()
    assert (counts.attempts, counts.executions, counts.duplicates, counts.unsafe_duplicates) == (2, 2, 1, 0)
    assert small.client.in_flight == 0


def test_an_attempt_that_ends_in_time_is_not_hedged() -> None:
    hedger = Hedger(after_s=0.2)
    small = Small(hedger, count=2)
    small.call(1.0)
    metrics = small.run()
    assert hedger.recorded == [(1.101, 1, "Succeeded")]
    assert metrics.counts().attempts == 1
    assert hedger.asked == pytest.approx([1.0, 1.101])


def test_a_copy_that_fails_while_the_other_is_under_way_ends_nothing() -> None:
    hedger = Hedger()
    small = hedged(hedger)
    small.sim.inject(FailFast(), small.servers[1])
    small.call(1.0)
    small.run()
    assert [r[1:] for r in hedger.recorded] == [(2, "Rejected"), (1, "Succeeded")]
    assert small.errors == [None]


def test_an_await_with_seconds_asks_again_and_one_without_does_not() -> None:
    asked = {}
    for ask_again_s in (0.03, None):
        hedger = Hedger(ask_again_s=ask_again_s)
        small = Small(hedger, count=2)
        small.sim.inject(Slow(10.0), small.servers)
        small.call(1.0)
        small.run()
        asked[ask_again_s] = [round(at, 3) for at in hedger.asked if at < 1.5]
    # The second copy has a time after which it might be hedged too.
    assert asked[None] == [1.0, 1.2, 1.4]
    assert asked[0.03] == [1.0, 1.2, 1.4, 1.43, 1.46, 1.49]


def test_the_deadline_of_the_first_copy_leaves_the_second_one_running() -> None:
    hedger = Hedger(after_s=1.85)
    small = Small(hedger, count=2)
    small.sim.inject(Slow(100.0), small.server)
    small.call(1.0)
    small.run()
    assert hedger.recorded == [(2.901, 1, "Rejected"), (2.951, 2, "Succeeded")]
    assert small.errors == [None]


def test_a_call_that_its_caller_gives_up_records_every_copy_as_cancelled() -> None:
    hedger = Hedger()
    small = hedged(hedger)
    small.call(1.0)
    small.sim.heap.at(1.25, small.give_up)
    small.run()
    assert hedger.recorded == [(1.25, 1, "Cancelled"), (1.25, 2, "Cancelled")]
    assert small.errors == []
    assert (small.client.in_flight, small.client.calls_open) == (0, 0)
