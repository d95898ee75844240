"""The index: exact lookup, aliases, order of revisions, what is kept and what is dropped."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from agent_reach.routing.index import Change, Index, Remove, Reset, Upsert
from tests.routing.world import CAPABILITY, agent


def ids(index: Index, capability: str = CAPABILITY) -> set[str]:
    return {candidate.agent_id for candidate in index.lookup(capability).candidates}


def test_v1_never_means_v10() -> None:
    index = Index()
    index.apply(Upsert(agent("a", ["x.y.v1"]), 1), 0.0)
    index.apply(Upsert(agent("b", ["x.y.v10"]), 2), 0.0)
    assert ids(index, "x.y.v1") == {"a"}


def test_a_soft_alias_answers_only_while_no_instance_of_the_version_is_there() -> None:
    index = Index()
    index.apply(Upsert(agent("new", ["x.y.v2"], aliases=("v1",)), 1), 0.0)
    assert ids(index, "x.y.v1") == {"new"}
    assert index.lookup("x.y.v1").deprecated
    index.apply(Upsert(agent("old", ["x.y.v1"]), 2), 0.0)
    assert ids(index, "x.y.v1") == {"old"}
    assert not index.lookup("x.y.v1").deprecated
    index.apply(Remove("old", 3), 0.0)
    assert ids(index, "x.y.v1") == {"new"}


def test_a_bad_alias_in_a_record_harms_nobody() -> None:
    index = Index()
    index.apply(Upsert(agent("a", ["x.y.v2"], aliases=("nonsense", "v1")), 1), 0.0)
    assert ids(index, "x.y.v1") == {"a"}


def test_what_was_learnt_survives_a_changed_record_but_not_a_restart() -> None:
    index = Index()
    index.apply(Upsert(agent("a"), 1), 0.0)
    index.lookup(CAPABILITY).candidates[0].latency.observe(2.0, 0.0)
    index.apply(Upsert(agent("a", weight=3.0), 2), 1.0)
    (changed,) = index.lookup(CAPABILITY).candidates
    assert (changed.latency.samples, changed.instance.info.weight) == (1, 3.0)
    index.apply(Upsert(agent("a", incarnation="two"), 3), 2.0)
    assert index.lookup(CAPABILITY).candidates[0].latency.samples == 0


def test_departure_drops_what_was_learnt() -> None:
    index = Index()
    index.apply(Upsert(agent("a"), 1), 0.0)
    index.lookup(CAPABILITY).candidates[0].latency.observe(2.0, 0.0)
    index.apply(Remove("a", 2), 0.0)
    index.apply(Upsert(agent("a"), 3), 0.0)
    assert index.lookup(CAPABILITY).candidates[0].latency.samples == 0


def test_an_older_list_never_overwrites_a_newer_event() -> None:
    index = Index()
    index.apply(Upsert(agent("a"), 5), 0.0)
    index.apply(Remove("a", 7), 0.0)
    assert not index.apply(Reset((agent("a"),), revision=6, epoch=0), 0.0)
    assert ids(index) == set()


def test_a_new_history_wins_although_its_revisions_are_lower() -> None:
    index = Index()
    index.apply(Upsert(agent("a"), 500), 0.0)
    assert index.apply(Reset((agent("b"),), revision=3, epoch=1), 0.0)
    assert ids(index) == {"b"}
    assert index.apply(Upsert(agent("c"), 4), 0.0)
    assert ids(index) == {"b", "c"}


def test_a_list_that_is_not_believed_yet_adds_but_drops_nobody() -> None:
    index = Index()
    index.apply(Upsert(agent("a"), 1), 0.0)
    index.apply(Reset((agent("b"),), revision=9, epoch=0, drop_missing=False), 0.0)
    assert ids(index) == {"a", "b"}


def test_a_change_leaves_tuples_already_handed_out_and_other_capabilities_alone() -> None:
    index = Index()
    index.apply(Upsert(agent("a"), 1), 0.0)
    index.apply(Upsert(agent("z", ["other.thing.v1"]), 2), 0.0)
    handed_out = index.lookup(CAPABILITY).candidates
    other = index.lookup("other.thing.v1").candidates
    index.apply(Upsert(agent("b"), 3), 0.0)
    assert [c.agent_id for c in handed_out] == ["a"]
    assert index.lookup("other.thing.v1").candidates is other


def test_a_record_that_repeats_a_capability_counts_once() -> None:
    index = Index()
    index.apply(Upsert(agent("a", [CAPABILITY, CAPABILITY]), 1), 0.0)
    assert len(index.lookup(CAPABILITY).candidates) == 1
    index.apply(Remove("a", 2), 0.0)
    assert index.lookup(CAPABILITY).candidates == ()
    assert not list(index.capabilities)


NAMES = st.sampled_from(["x.y.v1", "x.y.v2", "p.q.v1"])
INFOS = st.builds(
    lambda i, caps, inc: agent(i, caps, incarnation=inc),
    st.sampled_from("abcd"),
    st.lists(NAMES, max_size=3),
    st.sampled_from(["one", "two"]),
)


@given(st.lists(st.tuples(st.booleans(), INFOS, st.booleans()), max_size=30))
def test_the_index_equals_a_model_after_any_history(history: list[tuple[bool, object, bool]]) -> None:
    """A store with revisions; events and, now and then, lists that may come late: the end state is the store's."""
    index, store = Index(), {}
    snapshots: list[Reset] = []
    for revision, (put, info, relist) in enumerate(history, 1):
        change: Change
        if put:
            store[info.agent_id] = info
            change = Upsert(info, revision)
        else:
            store.pop(info.agent_id, None)
            change = Remove(info.agent_id, revision)
        index.apply(change, 0.0)
        snapshots.append(Reset(tuple(store.values()), revision, 0))
        if relist:
            # An older list arrives after newer events, then the current one.
            index.apply(snapshots[len(snapshots) // 2], 0.0)
            index.apply(snapshots[-1], 0.0)
    assert {i: inst.info for i, inst in index.instances.items()} == store
    for name in ["x.y.v1", "x.y.v2", "p.q.v1"]:
        expected = {i for i, info in store.items() if name in {c.name for c in info.capabilities}}
        assert ids(index, name) == expected


def test_a_change_of_many_instances_rebuilds_each_tuple_once() -> None:
    """10,000 agents of one capability that all restarted: rebuilding for each of them would be 10^8 steps."""
    before = tuple(agent(f"a{n}") for n in range(3000))
    after = tuple(agent(f"a{n}", incarnation="two") for n in range(3000))
    index = Index()
    index.apply(Reset(before, 1, 0), 0.0)
    steps = 0

    class Counting(dict[str, object]):
        def get(self, *args: object) -> object:
            nonlocal steps
            steps += 1
            return super().get(*args)  # type: ignore[arg-type]

    index._exact = Counting(index._exact)  # type: ignore[assignment]
    index.apply(Reset(after, 2, 0), 0.0)
    assert len(ids(index)) == 3000
    assert steps <= 2
