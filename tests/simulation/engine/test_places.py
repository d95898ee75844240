"""Calls that wait for a place: in their order, at the client."""

from __future__ import annotations

import random
from functools import partial

from agent_reach.testing.simulation import Bursts, CallRequest, Constant, Poisson, Simulation
from agent_reach.testing.simulation.heap import EventHeap
from agent_reach.testing.simulation.places import Places
from tests.simulation.engine.support import CAPABILITY, Small, agent_reach, assert_nothing_left


def test_each_place_wakes_the_one_who_has_waited_longest_and_a_newcomer_goes_behind() -> None:
    heap = EventHeap()
    order: list[tuple[str, bool]] = []
    places = Places(heap)

    def note(name: str, woken: bool) -> None:
        order.append((name, woken))

    for name in "abc":
        places.wait("k", partial(note, name), 100.0)
    places.freed()
    assert places.crowded("k")
    heap.run(1.0)
    assert order == [("a", True)]
    places.wait("k", partial(note, "a again"), 100.0, again=True)
    for _ in range(4):
        places.freed()
        heap.run(1.0)
    assert [name for name, _ in order] == ["a", "a again", "b", "c"]
    assert not places.crowded("k")


def test_who_waits_too_long_is_told_and_leaves_the_queue() -> None:
    heap = EventHeap()
    order: list[tuple[float, bool]] = []
    places = Places(heap)
    places.wait("k", lambda woken: order.append((heap.now, woken)), 2.0)
    heap.run(10.0)
    assert order == [(2.0, False)]
    assert not places.crowded("k")


def test_a_place_that_a_caller_who_left_was_woken_for_goes_to_the_next() -> None:
    heap = EventHeap()
    order: list[int] = []
    places = Places(heap)
    first = places.wait("k", lambda woken: order.append(1), 100.0)
    second = places.wait("k", lambda woken: order.append(2), 100.0)
    places.freed()
    places.leave(first)
    heap.run(1.0)
    assert order == [2]
    places.leave(places.wait("k", lambda woken: order.append(3), 100.0))
    heap.run(1.0)
    assert order == [2]
    assert len(places) == 0
    assert second.woken


def test_those_who_find_every_instance_full_are_served_in_their_order() -> None:
    sim = Simulation(1)
    (server,) = sim.fleet(CAPABILITY, 1, service=Constant(0.05), slots=1)
    (client,) = sim.clients(1, agent_reach)
    ended: list[str] = []

    def call(number: int) -> None:
        request = CallRequest(capability=CAPABILITY, request_id=str(number), started=sim.heap.now)
        client.call(request, number, lambda call, error: ended.append(f"{call.request.request_id} {error}"))

    for number in range(12):
        # The client sends four at a time, one running and three queued; the others wait at the client.
        sim.heap.at(1.0 + 0.001 * number, call, number)
    waiting: list[int] = []
    sim.heap.at(1.02, lambda: waiting.append(client.waiting))
    sim.run(10.0)
    assert waiting == [8]
    assert ended == [f"{n} None" for n in range(12)]
    assert server.in_flight == 0
    assert_nothing_left(sim)


def test_waiting_ends_after_the_connect_timeout_with_overloaded() -> None:
    sim = Simulation(1)
    sim.fleet(CAPABILITY, 1, service=Constant(3.0), slots=1)
    sim.load(sim.clients(1, agent_reach), CAPABILITY, Bursts(5, every_s=1000.0), from_s=1.0)
    metrics = sim.run(500.0)
    summary = metrics.summary()
    assert summary.failures["Overloaded"] >= 1
    assert_nothing_left(sim)


def test_with_five_times_the_load_nothing_is_left_over_and_nobody_waits_for_ever() -> None:
    sim = Simulation(1)
    sim.fleet(CAPABILITY, 2, service=Constant(0.1), slots=1)
    sim.load(sim.clients(3, agent_reach), CAPABILITY, Poisson(100), until_s=3.0)
    summary = sim.run(3.0).summary()
    assert summary.successes >= 2 * 3 / 0.1 * 0.9
    assert set(summary.failures) <= {"Overloaded", "DeadlineExceeded"}
    assert_nothing_left(sim)


def test_a_call_of_another_capability_does_not_queue_behind_them() -> None:
    small = Small(agent_reach(random.Random(1), None), slots=1, service=Constant(0.5))
    small.sim.fleet("other.do.v1", 1, service=Constant(0.01))
    small.sim.load([small.client], CAPABILITY, Bursts(8, every_s=1000.0), from_s=1.0)
    small.sim.load([small.client], "other.do.v1", Bursts(1, every_s=1000.0), from_s=1.1)
    metrics = small.run(500.0)
    assert metrics.summary("other.do.v1").ok_mean_s < 0.02


def test_one_end_lets_in_as_many_as_there_is_room_for_now() -> None:
    sim = Simulation(1)
    sim.fleet(CAPABILITY, 1, service=Constant(0.3), slots=1)
    (newcomer,) = sim.fleet(CAPABILITY, 1, service=Constant(0.3), slots=4, name="newcomer", start_s=1.1)
    sim.load(sim.clients(1, agent_reach), CAPABILITY, Bursts(9, every_s=1000.0), from_s=1.0)
    running: list[int] = []
    for at_s in (1.29, 1.31):
        sim.heap.at(at_s, lambda: running.append(newcomer.running))
    summary = sim.run(500.0).summary()
    # Five wait at the client when the newcomer is heard of. The first answer, at 1.301, wakes one, that the next:
    # one goes to the place that came free, and four to the newcomer.
    assert running == [0, 4]
    assert summary.failed == 0
