"""Virtual time."""

from __future__ import annotations

from typing import Any

import pytest

from agent_reach.testing.simulation import EventHeap


def test_events_happen_in_order_of_time_and_those_of_one_moment_as_scheduled() -> None:
    heap = EventHeap()
    seen: list[tuple[float, str]] = []

    def note(name: str) -> None:
        seen.append((heap.now, name))

    for time_s, name in ((2.0, "c"), (1.0, "a"), (1.0, "b"), (3.0, "late")):
        heap.at(time_s, note, name)
    heap.run(until_s=2.0)
    assert seen == [(1.0, "a"), (1.0, "b"), (2.0, "c")]
    assert heap.now == 2.0
    assert len(heap) == 1


def test_a_cancelled_event_never_happens_and_cancelling_twice_or_late_is_harmless() -> None:
    heap = EventHeap()
    seen: list[str] = []
    kept = heap.at(1.0, seen.append, "kept")
    dropped = heap.at(1.0, seen.append, "dropped")
    heap.cancel(dropped)
    heap.cancel(dropped)
    heap.run()
    heap.cancel(kept)
    assert seen == ["kept"]
    assert len(heap) == 0


def test_cancelled_events_are_swept_out_and_the_order_of_the_others_stays() -> None:
    heap = EventHeap()
    seen: list[tuple[int, int]] = []
    handles = [heap.at(float(i % 97), seen.append, (i % 97, i)) for i in range(5000)]
    for i, handle in enumerate(handles):
        if i % 5:
            heap.cancel(handle)
    assert len(heap) == 1000
    heap.run()
    assert seen == sorted((i % 97, i) for i in range(0, 5000, 5))


def test_an_event_that_cancels_another_of_the_same_moment_wins() -> None:
    heap = EventHeap()
    seen: list[str] = []
    victims: list[list[Any]] = []
    heap.at(1.0, lambda: heap.cancel(victims[0]))
    victims.append(heap.at(1.0, seen.append, "victim"))
    heap.run()
    assert seen == []


@pytest.mark.parametrize("time_s", [0.5, float("inf"), float("nan")])
def test_the_past_and_the_end_of_time_are_refused(time_s: float) -> None:
    heap = EventHeap()
    heap.run(until_s=1.0)
    with pytest.raises(ValueError, match="can't be scheduled"):
        heap.at(time_s, print)
