"""Whether what is known and what the store says belong together."""

from __future__ import annotations

import random

import pytest

from agent_reach.ports import Deleted, Listing, Probe, Put, RawRecord, WatchChanges
from agent_reach.registry.mirror import Mirror
from agent_reach.registry.trust import Trust
from tests.registry.support import info


def raw(agent_id: str, revision: int, lease: int = 7, incarnation: str = "i1") -> RawRecord:
    return RawRecord(agent_id, info(agent_id, incarnation=incarnation).to_bytes(), revision, lease)


def probe(revision: int, count: int, *changed: str, cluster_id: int = 1) -> Probe:
    return Probe(cluster_id, revision, count, frozenset(changed))


@pytest.fixture
def mirror() -> Mirror:
    made = Mirror("prod", Trust(lease_s=15.0, confirm_s=15.0), allow_local=False)
    made.take_list(Listing(1, 10, (raw("a", 3), raw("b", 5), raw("c", 9))), 0.0)
    return made


def sample(mirror: Mirror) -> tuple[RawRecord, ...]:
    return mirror.sample(random.Random(1), 4)


def test_the_newest_is_in_each_sample_and_over_time_everybody(mirror: Mirror) -> None:
    rng, seen = random.Random(1), set()
    for _ in range(50):
        drawn = [record.agent_id for record in mirror.sample(rng, 1)]
        assert drawn[0] == "c"
        assert len(drawn) == len(set(drawn)) <= 2
        seen.update(drawn)
    assert seen == {"a", "b", "c"}
    assert Mirror("prod", Trust(lease_s=15.0, confirm_s=15.0), allow_local=False).sample(rng, 4) == ()


@pytest.mark.parametrize(
    ("said", "same"),
    [
        (probe(10, 3), True),
        (probe(500, 3), True),
        (probe(10, 3, "a", "c"), True),
        (probe(10, 3, "a", "b", "c"), False),
        (probe(9, 3), False),
        (probe(10, 3, cluster_id=2), False),
    ],
)
def test_a_store_is_the_same_if_it_went_on_and_holds_a_record_that_we_know(
    mirror: Mirror, said: Probe, same: bool
) -> None:
    assert mirror.take_probe(sample(mirror), said, 1.0) is same


def test_a_store_that_is_behind_what_an_earlier_probe_said_began_anew(mirror: Mirror) -> None:
    """Its revision counts other namespaces too, so it may lie behind without being behind the last change here."""
    assert mirror.take_probe(sample(mirror), probe(100, 3), 1.0)
    assert not mirror.take_probe(sample(mirror), probe(99, 3), 2.0)


def test_changes_behind_the_probe_are_not_in_its_count(mirror: Mirror) -> None:
    drawn, said = sample(mirror), probe(11, 4)
    assert mirror.take_probe(drawn, said, 1.0)
    assert not mirror.matches(drawn, said)
    mirror.take_changes(WatchChanges(11, (Put(raw("d", 11)),)), 1.0)
    mirror.take_changes(WatchChanges(12, (Deleted("a", 12), Deleted("b", 12))), 1.0)
    mirror.take_changes(WatchChanges(13, (Put(raw("e", 13)), Put(raw("d", 13)))), 1.0)
    mirror.take_changes(WatchChanges(11, (Deleted("c", 11),)), 1.0)
    assert mirror.matches(drawn, said), "older than what is known, so it says nothing"


def test_what_changed_there_must_have_changed_here(mirror: Mirror) -> None:
    drawn, said = sample(mirror), probe(11, 3, "a")
    assert mirror.take_probe(drawn, said, 1.0)
    assert not mirror.matches(drawn, said)
    mirror.take_changes(WatchChanges(11, (Put(raw("a", 11, incarnation="i2")),)), 1.0)
    assert mirror.matches(drawn, said)


def test_changes_are_remembered_only_while_a_probe_waits_for_its_answer(mirror: Mirror) -> None:
    def change(revision: int) -> None:
        mirror.take_changes(WatchChanges(revision, (Put(raw(f"x{revision}", revision)),)), 1.0)

    change(20)
    assert not mirror._steps
    drawn, said = sample(mirror), probe(20, 4)
    assert mirror.take_probe(drawn, said, 1.0)
    change(21)
    assert mirror._steps == [(21, 1)]
    assert mirror.matches(drawn, said)
    assert not mirror._steps
    mirror.take_probe(drawn, said, 1.0)
    change(22)
    mirror.take_list(Listing(1, 23, ()), 1.0)
    assert not mirror._steps
