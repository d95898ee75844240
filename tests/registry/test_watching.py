"""The local view: what is in the registry gets into the index, and stays while the registry is away."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import threading
import time
from collections.abc import Callable, Sequence

import pytest

from agent_reach.config import RegistryConfig
from agent_reach.errors import Forbidden, RegistryUnavailable
from agent_reach.events import RecordSkipped
from agent_reach.ports import (
    Listing,
    Probe,
    Put,
    RawRecord,
    SystemClock,
    Watch,
    WatchChanges,
    WatchMessage,
    WatchProgress,
)
from agent_reach.registry.mailbox import Mailbox
from agent_reach.registry.memory import MemoryRegistry
from agent_reach.testing import ManualClock
from tests.registry.support import Watched, eventually, info


class Counting(MemoryRegistry):
    """Notes when it was listed, probed and watched; `before` runs before a list or a probe, `between` before the
    answer of a list is used.
    """

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(clock)
        self.listed: list[float] = []
        self.probed: list[float] = []
        self.watched: list[int] = []
        self.before: Callable[[], None] = lambda: None
        self.between: Callable[[], None] = lambda: None
        self.watches_fail = False

    def list(self, namespace: str) -> Listing:
        self.listed.append(self.clock.now())
        self.before()
        listing = super().list(namespace)
        self.between()
        return listing

    def probe(self, namespace: str, known: Sequence[RawRecord]) -> Probe:
        self.probed.append(self.clock.now())
        self.before()
        return super().probe(namespace, known)

    def watch(self, namespace: str, from_revision: int, deliver: Callable[[WatchMessage], None]) -> Watch:
        self.watched.append(from_revision)
        if self.watches_fail:
            raise RegistryUnavailable("no watch for you")
        return super().watch(namespace, from_revision, deliver)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def registry(clock: ManualClock) -> Counting:
    return Counting(clock)


def put(registry: MemoryRegistry, agent_id: str, lease: int = 0, **fields: str) -> None:
    registry.put_raw("prod", agent_id, info(agent_id, **fields).to_bytes(), lease)


async def loaded(registry: MemoryRegistry, clock: ManualClock, config: RegistryConfig | None = None) -> Watched:
    watched = Watched(registry, clock, config)
    watched.watcher.start()
    await watched.watcher.wait_loaded(5)
    await clock.settle()
    return watched


# --- list and watch ---------------------------------------------------------------------------------------


async def test_what_is_there_is_loaded_and_changes_follow_at_once(clock: ManualClock, registry: Counting) -> None:
    put(registry, "a")
    put(registry, "b")
    watched = await loaded(registry, clock)
    assert watched.ids == ["a", "b"]
    assert watched.status == "fresh"
    assert watched.watcher.view.connected
    put(registry, "c")
    registry.delete("prod", "a")
    await clock.settle()
    assert watched.ids == ["b", "c"]
    assert clock.now() == 0
    assert watched.said == ["connected"]
    await watched.watcher.stop()


async def test_a_peer_that_comes_or_goes_between_list_and_watch_is_not_missed(
    clock: ManualClock, registry: Counting
) -> None:
    registry.put_raw("prod", "a", b"not readable")
    put(registry, "c")

    def change() -> None:
        registry.between = lambda: None
        registry.delete("prod", "a")
        put(registry, "b")

    registry.between = change
    watched = await loaded(registry, clock)
    assert watched.ids == ["b", "c"]
    assert watched.watcher.view.skipped == {}
    assert len(registry.listed) == 1
    await watched.watcher.stop()


async def test_an_empty_registry_counts_as_loaded(clock: ManualClock, registry: Counting) -> None:
    watched = await loaded(registry, clock)
    assert watched.ids == []
    assert watched.status == "fresh"
    await watched.watcher.stop()


async def test_other_namespaces_stay_out(clock: ManualClock, registry: Counting) -> None:
    watched = await loaded(registry, clock)
    registry.put_raw("prod2", "far", info("far", namespace="prod2").to_bytes())
    await clock.settle()
    assert watched.ids == []
    await watched.watcher.stop()


async def test_after_a_cut_and_a_compaction_a_departure_in_the_gap_is_seen(
    clock: ManualClock, registry: Counting
) -> None:
    put(registry, "a")
    put(registry, "b")
    watched = await loaded(registry, clock)
    registry.drop_watches("cut")
    registry.delete("prod", "a")
    for _ in range(100):
        put(registry, "b")
    registry.compact()
    await clock.advance(1)
    assert watched.ids == ["b"]
    assert watched.said == ["connected", "lost", "connected"]
    await watched.watcher.stop()


async def test_a_compacted_watch_lists_again_and_doesnt_loop(clock: ManualClock, registry: Counting) -> None:
    put(registry, "a")
    watched = await loaded(registry, clock)
    registry.drop_watches("compacted", compacted=True)
    await clock.advance(4)
    assert len(registry.listed) == 2
    assert watched.watcher.view.connected
    await watched.watcher.stop()


async def test_a_watch_that_fails_again_and_again_backs_off(clock: ManualClock, registry: Counting) -> None:
    put(registry, "a")
    watched = await loaded(registry, clock)
    for _ in range(600):
        registry.drop_watches("again")
        await clock.advance(0.1)
    # At the cap of 2.5 s the mean wait is 1.3 s: about 46 in 60 s.
    assert len(registry.watched) < 100
    await watched.watcher.stop()


async def test_while_watches_fail_lists_go_on_at_their_own_pace_and_loss_is_told_once(
    clock: ManualClock, registry: Counting
) -> None:
    registry.watches_fail = True
    watched = await loaded(registry, clock)
    await clock.advance(60)
    assert len(registry.listed) <= 5, "one each 15 to 20 s"
    assert 25 <= len(registry.watched) <= 90, "at the cap of 2.5 s the mean wait is 1.3 s"
    assert watched.said == ["lost"]
    assert (watched.status, watched.watcher.view.connected) == ("fresh", False)
    assert "no watch for you" in str(watched.watcher.view.error)
    put(registry, "a")
    await clock.advance(20)
    assert watched.ids == ["a"], "the lists bring it"
    put(registry, "b")
    registry.watches_fail = False
    await clock.advance(2)
    assert watched.ids == ["a", "b"]
    assert watched.said == ["lost", "connected"]
    assert watched.watcher.view.connected
    assert watched.watcher.view.error is None
    await watched.watcher.stop()


@pytest.mark.parametrize("new_cluster", [False, True])
async def test_a_registry_that_is_replaced_while_watches_fail_is_noticed_when_they_work_again(
    clock: ManualClock, registry: Counting, new_cluster: bool
) -> None:
    for agent_id in "abc":
        put(registry, agent_id)
    registry.watches_fail = True
    watched = await loaded(registry, clock)
    registry.wipe(new_cluster=new_cluster)
    put(registry, "d")
    registry.watches_fail = False
    await clock.advance(2)
    assert "d" in watched.ids
    assert watched.index.epoch == 1
    assert watched.watcher.view.connected
    assert len(registry.listed) == 2
    put(registry, "e")
    await clock.settle()
    assert "e" in watched.ids
    await watched.watcher.stop()


async def test_lists_that_come_back_without_the_watch_are_no_connection(
    clock: ManualClock, registry: Counting
) -> None:
    watched = await loaded(registry, clock)
    registry.down()
    await clock.advance(30)
    registry.watches_fail = True
    registry.up()
    await clock.advance(30)
    assert watched.status == "fresh"
    assert watched.said == ["connected", "lost", "stale", "lost"]
    await watched.watcher.stop()


@pytest.mark.parametrize("by", ["an event", "a refresh"])
async def test_what_works_again_is_tried_soon_when_it_fails_next(
    clock: ManualClock, registry: Counting, by: str
) -> None:
    put(registry, "a")
    watched = await loaded(registry, clock)
    for _ in range(20):
        registry.drop_watches("again")
        await clock.advance(2)
    if by == "an event":
        put(registry, "a")
    await clock.advance(0 if by == "an event" else 20)
    for _ in range(5):
        watches = len(registry.watched)
        registry.drop_watches("once")
        await clock.advance(0.2)
        assert len(registry.watched) == watches + 1
        put(registry, "a")
        await clock.settle()
    await watched.watcher.stop()


@pytest.mark.parametrize("new_cluster", [False, True])
async def test_a_wiped_registry_is_a_new_history_whose_newcomers_route_within_two_seconds(
    clock: ManualClock, registry: Counting, new_cluster: bool
) -> None:
    for agent_id in "abc":
        put(registry, agent_id)
    watched = await loaded(registry, clock)
    registry.wipe(new_cluster=new_cluster)
    put(registry, "d")
    await clock.advance(2)
    assert "d" in watched.ids
    assert watched.index.epoch == 1
    put(registry, "e")
    await clock.settle()
    assert "e" in watched.ids, "low revisions count now"
    await watched.watcher.stop()


async def test_a_silently_dead_watch_is_found_by_the_refresh(clock: ManualClock, registry: Counting) -> None:
    for _ in range(10):
        put(registry, "a")
    watched = await loaded(registry, clock)
    registry.wipe(silent=True)
    put(registry, "b")
    await clock.advance(20)
    assert watched.ids == ["a", "b"], "a is missing after trouble, so it isn't believed gone yet"
    put(registry, "c")
    await clock.settle()
    assert "c" in watched.ids, "watched anew"
    await clock.advance(40)
    assert watched.ids == ["b", "c"]
    await watched.watcher.stop()


async def test_late_mail_of_another_history_is_not_read(clock: ManualClock, registry: Counting) -> None:
    put(registry, "a")
    watched = await loaded(registry, clock)

    def replace_the_store() -> None:
        registry.before = lambda: None
        put(registry, "z")
        registry.wipe(silent=True)
        put(registry, "b")

    registry.before = replace_the_store
    await clock.advance(20)
    assert watched.ids == ["a", "b"]
    await watched.watcher.stop()


async def test_another_history_is_noticed_also_when_its_revisions_have_passed_ours(
    clock: ManualClock, registry: Counting
) -> None:
    for agent_id in "abc":
        put(registry, agent_id)
    watched = await loaded(registry, clock)
    registry.wipe()
    for agent_id in "defgh":
        put(registry, agent_id)
    await clock.advance(1)
    assert watched.index.epoch == 1
    assert watched.ids == list("abcdefgh"), "and so those who are missing get the time to come back"
    await watched.watcher.stop()


async def test_frozen_watches_delay_news_by_one_refresh_at_most(clock: ManualClock, registry: Counting) -> None:
    watched = await loaded(registry, clock)
    registry.freeze_watches()
    put(registry, "a")
    await clock.advance(20)
    assert watched.ids == ["a"]
    await watched.watcher.stop()


async def test_a_new_incarnation_replaces_the_old_one(clock: ManualClock, registry: Counting) -> None:
    put(registry, "a", incarnation="one")
    watched = await loaded(registry, clock)
    put(registry, "a", incarnation="two")
    await clock.settle()
    assert watched.index.instances["a"].info.incarnation == "two"
    await watched.watcher.stop()


async def test_an_unchanged_refresh_brings_nothing_to_the_index(clock: ManualClock, registry: Counting) -> None:
    put(registry, "a")
    watched = await loaded(registry, clock)
    await clock.advance(300)
    assert len(registry.probed) > 10
    assert watched.said == ["connected"]
    assert len(registry.listed) == 1
    assert len(watched.changes) == 1
    assert len(registry.watched) == 1
    assert watched.status == "fresh"
    await watched.watcher.stop()


async def test_a_watch_that_is_lost_goes_on_from_the_last_change_without_a_list(
    clock: ManualClock, registry: Counting
) -> None:
    for agent_id in "abc":
        put(registry, agent_id)
    watched = await loaded(registry, clock)
    put(registry, "d")
    await clock.settle()
    registry.drop_watches("cut")
    registry.delete("prod", "a")
    put(registry, "e")
    await clock.advance(2)
    assert watched.ids == ["b", "c", "d", "e"]
    assert registry.watched == [4, 5], "from the last change that was read"
    assert len(registry.listed) == 1
    assert watched.watcher.view.connected
    assert watched.status == "fresh"
    await watched.watcher.stop()


async def test_a_watch_that_goes_on_in_another_history_is_not_read(clock: ManualClock, registry: Counting) -> None:
    """Everything looks as before: the same ids, as many, at the same revisions; but under other leases."""
    for lease, agent_id in enumerate("abc", start=1):
        put(registry, agent_id, lease)
    watched = await loaded(registry, clock)
    registry.drop_watches("restarted")
    registry.wipe()
    for lease, agent_id in enumerate("abc", start=11):
        put(registry, agent_id, lease, incarnation="other")
    await clock.advance(2)
    assert {i.info.incarnation for i in watched.index.instances.values()} == {"other"}
    assert watched.index.epoch == 1
    await watched.watcher.stop()


async def test_a_probe_that_fails_on_a_new_watch_ends_that_watch_unread(
    clock: ManualClock, registry: Counting
) -> None:
    put(registry, "a")
    watched = await loaded(registry, clock)
    registry.drop_watches("cut")
    for request in ("probe", "list"):
        registry.fail_next(request, RegistryUnavailable("slow"), times=1000)
    put(registry, "b")
    await clock.advance(10)
    assert len(registry.watched) > 2
    assert watched.ids == ["a"], "nobody knows whether this is still the same store"
    registry._faults.clear()
    await clock.advance(5)
    assert watched.ids == ["a", "b"]
    assert watched.said == ["connected", "lost", "connected"]
    await watched.watcher.stop()


async def test_busy_watches_put_no_refresh_off(clock: ManualClock, registry: Counting) -> None:
    put(registry, "a")
    watched = await loaded(registry, clock)
    for number in range(100):
        put(registry, "a", incarnation=str(number))
        await clock.advance(1)
    assert 5 <= len(registry.probed) <= 8
    assert len(registry.listed) == 1
    await watched.watcher.stop()


async def test_a_change_that_the_watch_lost_is_found_by_the_count(
    clock: ManualClock, registry: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    for agent_id in "abc":
        put(registry, agent_id)
    watched = await loaded(registry, clock)
    with monkeypatch.context() as patched:
        patched.setattr(Mailbox, "put", lambda self, message: None)
        registry.delete("prod", "a")
    await clock.advance(22)
    assert watched.ids == ["b", "c"]
    assert len(registry.listed) == 2
    await watched.watcher.stop()


async def test_a_replacement_that_the_watch_lost_is_found_by_comparing(
    clock: ManualClock, registry: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    for agent_id in "abc":
        put(registry, agent_id)
    watched = await loaded(registry, clock)
    with monkeypatch.context() as patched:
        patched.setattr(Mailbox, "put", lambda self, message: None)
        put(registry, "a", incarnation="other")
    await clock.advance(22)
    assert watched.index.instances["a"].info.incarnation == "other"
    assert len(registry.listed) == 2
    await watched.watcher.stop()


async def test_once_a_watch_that_went_on_is_confirmed_the_trouble_is_over(
    clock: ManualClock, registry: Counting
) -> None:
    for agent_id in "abc":
        put(registry, agent_id)
    watched = await loaded(registry, clock)
    registry.drop_watches("cut")
    await clock.advance(3)
    registry.freeze_watches()
    for agent_id in "abc":
        registry.delete("prod", agent_id)
    await clock.advance(24)
    assert (watched.ids, watched.status) == ([], "fresh"), "a list that says so is believed"
    await watched.watcher.stop()


async def test_while_a_watch_owes_its_answer_nothing_more_is_asked(
    clock: ManualClock, registry: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(registry, "a")
    watched = await loaded(registry, clock)
    deliver = Mailbox.put

    def put_but_progress(self: Mailbox, message: WatchMessage) -> None:
        if not isinstance(message, WatchProgress):
            deliver(self, message)

    monkeypatch.setattr(Mailbox, "put", put_but_progress)
    while len(registry.probed) < 2:
        await clock.advance(0.1)
    for number in range(25):
        put(registry, "a", incarnation=str(number))
        await clock.advance(0.1)
    assert (len(registry.probed), len(registry.listed)) == (2, 1)
    await watched.watcher.stop()


async def test_an_answer_that_comes_before_the_changes_it_speaks_of_needs_no_list(
    clock: ManualClock, registry: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As etcd 3.5.1 may do (etcd issue 15220)."""
    for agent_id in "abc":
        put(registry, agent_id)
    watched = await loaded(registry, clock)
    deliver, held = Mailbox.put, []

    def hold_changes(self: Mailbox, message: WatchMessage) -> None:
        held.append((self, message)) if isinstance(message, WatchChanges) else deliver(self, message)

    monkeypatch.setattr(Mailbox, "put", hold_changes)
    put(registry, "d")
    while len(registry.probed) < 2:
        await clock.advance(0.1)
    monkeypatch.undo()
    for mailbox, message in held:
        mailbox.put(message)
    await clock.advance(0.5)
    assert watched.ids == ["a", "b", "c", "d"]
    assert watched.watcher.view.proof_at is not None
    assert clock.now() - watched.watcher.view.proof_at < 0.5
    assert len(registry.listed) == 1
    await watched.watcher.stop()


async def test_an_answer_of_the_watch_that_is_behind_the_probe_proves_nothing(
    clock: ManualClock, registry: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(registry, "a")
    watched = await loaded(registry, clock)
    deliver = Mailbox.put

    def put_behind(self: Mailbox, message: WatchMessage) -> None:
        behind = WatchProgress(message.revision - 1) if isinstance(message, WatchProgress) else message
        deliver(self, behind)

    monkeypatch.setattr(Mailbox, "put", put_behind)
    proof_at = watched.watcher.view.proof_at
    while len(registry.probed) < 2:
        await clock.advance(0.1)
    await clock.advance(2.5)
    assert watched.watcher.view.proof_at == proof_at
    assert len(registry.listed) == 1
    await watched.watcher.stop()


async def test_a_watch_that_leaves_a_first_question_unanswered_is_asked_again(
    clock: ManualClock, registry: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    deliver, asked = Mailbox.put, []

    def put_but_the_first_progress(self: Mailbox, message: WatchMessage) -> None:
        if isinstance(message, WatchProgress):
            asked.append(clock.now())
            if len(asked) == 1:
                return
        deliver(self, message)

    monkeypatch.setattr(Mailbox, "put", put_but_the_first_progress)
    put(registry, "a")
    watched = await loaded(registry, clock)
    await clock.advance(1)
    assert len(asked) == 2
    assert len(registry.listed) == 1
    assert watched.said == ["connected"]
    await watched.watcher.stop()


async def test_after_an_outage_nothing_is_listed_if_nothing_was_missed(
    clock: ManualClock, registry: Counting
) -> None:
    for agent_id in "abc":
        put(registry, agent_id)
    watched = await loaded(registry, clock)
    registry.down()
    await clock.advance(120)
    lists = len(registry.listed)
    registry.up()
    put(registry, "d")
    await clock.advance(3)
    assert watched.ids == ["a", "b", "c", "d"]
    assert (watched.status, watched.watcher.view.connected) == ("fresh", True)
    assert len(registry.listed) == lists
    await watched.watcher.stop()


async def test_watches_that_are_refused_are_tried_more_and_more_seldom(
    clock: ManualClock, registry: Counting
) -> None:
    put(registry, "a")
    watched = await loaded(registry, clock)
    registry.fail_next("watch", Forbidden("not yours"), times=1000)
    registry.drop_watches("so that a new one is asked for")
    await clock.advance(600)
    assert 20 < len(registry.watched) < 100
    await watched.watcher.stop()


async def test_changes_between_the_probe_and_the_answer_of_the_watch_are_no_difference(
    clock: ManualClock, registry: Counting
) -> None:
    for agent_id in "abc":
        put(registry, agent_id)
    watched = await loaded(registry, clock)
    ask = registry._send_progress

    def change_first(mailbox: Mailbox) -> None:
        put(registry, "d")
        put(registry, "e")
        registry.delete("prod", "a")
        ask(mailbox)

    registry._send_progress = change_first  # type: ignore[method-assign]
    registry.drop_watches("so that the next one asks this way")
    await clock.advance(2)
    assert watched.ids == ["b", "c", "d", "e"]
    assert len(registry.listed) == 1
    assert watched.status == "fresh"
    await watched.watcher.stop()


async def test_a_watch_that_doesnt_answer_is_given_up_and_everything_listed(
    clock: ManualClock, registry: Counting
) -> None:
    put(registry, "a")
    watched = await loaded(registry, clock)
    registry.freeze_watches()
    while len(registry.probed) < 2:
        await clock.advance(0.5)
    await clock.advance(2.4)
    assert (len(registry.listed), len(registry.probed)) == (1, 2)
    assert (watched.status, watched.said) == ("fresh", ["connected"]), "it may still answer"
    await clock.advance(0.7)
    assert len(registry.listed) == 2
    assert len(registry.watched) == 2
    assert watched.said == ["connected", "lost"]
    await watched.watcher.stop()


async def test_now_and_then_everything_is_listed_though_nothing_seems_wrong(
    clock: ManualClock, registry: Counting
) -> None:
    put(registry, "a")
    watched = await loaded(registry, clock)
    for _ in range(24):
        await clock.advance(50)
    assert 2 <= len(registry.listed) - 1 <= 4, "each 5 to 10 minutes"
    assert len(watched.changes) == 1
    await watched.watcher.stop()


async def test_a_routine_list_that_fails_leaves_a_view_that_probes_prove(
    clock: ManualClock, registry: Counting
) -> None:
    """As over a way on which a whole list takes too long."""
    put(registry, "a")
    watched = await loaded(registry, clock)
    registry.fail_next("list", RegistryUnavailable("too slow"), times=1000)
    for _ in range(60):
        await clock.advance(50)
        assert watched.status == "fresh"
    assert len(registry.listed) > 3
    assert watched.ids == ["a"]
    await watched.watcher.stop()


# --- bad records ------------------------------------------------------------------------------------------

GOOD = json.loads(info("bad").to_bytes())
BAD = {
    "not json": b"{",
    "not utf-8": b"\xff\xfe",
    "empty": b"",
    "a list": b"[]",
    "wrong types": json.dumps({**GOOD, "capabilities": 7}).encode(),
    "newer schema": json.dumps({**GOOD, "schema": 2}).encode(),
    "weight nan": info("bad").to_bytes().replace(b'"weight":1.0', b'"weight":NaN'),
    "weight zero": json.dumps({**GOOD, "weight": 0}).encode(),
    "weight negative": json.dumps({**GOOD, "weight": -1}).encode(),
    "bare ipv6": json.dumps({**GOOD, "endpoint": {"url": "http://::1:9000"}}).encode(),
    "unspecified host": json.dumps({**GOOD, "endpoint": {"url": "http://0.0.0.0:9000"}}).encode(),
    "another id": info("other").to_bytes(),
    "another namespace": info("bad", namespace="dev").to_bytes(),
    "too large": b" " * 20_000,
}


@pytest.mark.parametrize("value", BAD.values(), ids=BAD.keys())
@pytest.mark.parametrize("when", ["listed", "watched"])
async def test_a_bad_record_is_skipped_and_told_once_and_the_others_route(
    clock: ManualClock, registry: Counting, value: bytes, when: str
) -> None:
    put(registry, "good-1")
    if when == "listed":
        registry.put_raw("prod", "bad", value)
    watched = await loaded(registry, clock)
    if when == "watched":
        registry.put_raw("prod", "bad", value)
    put(registry, "good-2", url="http://[::1]:9000")
    await clock.advance(100)
    assert watched.ids == ["good-1", "good-2"]
    assert list(watched.watcher.view.skipped) == ["bad"]
    skipped = [event for event in watched.events if isinstance(event, RecordSkipped)]
    assert [event.agent_id for event in skipped] == ["bad"]
    assert skipped[0].reason
    await watched.watcher.stop()


async def test_unknown_fields_are_tolerated(clock: ManualClock, registry: Counting) -> None:
    registry.put_raw("prod", "bad", json.dumps({**GOOD, "newer": {"x": 1}}).encode())
    watched = await loaded(registry, clock)
    assert watched.ids == ["bad"]
    await watched.watcher.stop()


async def test_a_bad_record_is_told_again_only_when_it_changes_and_forgotten_when_mended(
    clock: ManualClock, registry: Counting
) -> None:
    registry.put_raw("prod", "a", b"one")
    watched = await loaded(registry, clock)
    registry.put_raw("prod", "a", b"one")
    registry.put_raw("prod", "a", b"two")
    await clock.settle()
    assert sum(isinstance(event, RecordSkipped) for event in watched.events) == 2
    put(registry, "a")
    await clock.settle()
    assert watched.ids == ["a"]
    assert watched.watcher.view.skipped == {}
    await watched.watcher.stop()


async def test_a_bad_record_that_went_unseen_is_forgotten_with_the_next_list(
    clock: ManualClock, registry: Counting
) -> None:
    registry.put_raw("prod", "bad", b"{")
    watched = await loaded(registry, clock)
    assert list(watched.watcher.view.skipped) == ["bad"]
    registry.freeze_watches()
    registry.delete("prod", "bad")
    await clock.advance(25)
    assert watched.watcher.view.skipped == {}
    await watched.watcher.stop()


async def test_an_unreadable_update_takes_the_instance_out(clock: ManualClock, registry: Counting) -> None:
    put(registry, "a")
    watched = await loaded(registry, clock)
    registry.put_raw("prod", "a", b"{")
    await clock.settle()
    assert watched.ids == []
    await watched.watcher.stop()


@pytest.mark.parametrize("blocking", [False, True])
async def test_local_endpoints_count_only_in_a_registry_of_this_process(blocking: bool) -> None:
    class Kind(MemoryRegistry):
        @property
        def blocking(self) -> bool:
            return blocking

    registry = Kind()
    put(registry, "a", url="local://a")
    watched = Watched(registry, registry.clock)
    watched.watcher.start()
    await watched.watcher.wait_loaded(10)
    assert watched.ids == ([] if blocking else ["a"])
    await watched.watcher.stop()


# --- freshness --------------------------------------------------------------------------------------------


async def test_an_outage_leaves_the_view_stale_but_served_until_the_grace_ends(
    clock: ManualClock, registry: Counting
) -> None:
    for agent_id in "abc":
        put(registry, agent_id)
    config = RegistryConfig(stale_grace_s=100.0)
    watched = await loaded(registry, clock, config)
    registry.down("cable pulled")
    await clock.advance(10)
    assert (watched.status, watched.watcher.view.connected) == ("fresh", False)
    await clock.advance(15)
    assert watched.status == "stale"
    assert watched.ids == ["a", "b", "c"]
    assert "cable pulled" in str(watched.watcher.view.error)
    await clock.advance(60)
    assert watched.ids == ["a", "b", "c"]
    await clock.advance(50)
    assert watched.status == "expired"
    assert watched.ids == []
    assert watched.said == ["connected", "lost", "stale", "expired"], "each once"
    registry.up()
    await clock.advance(3)
    assert watched.status == "fresh"
    assert watched.ids == ["a", "b", "c"]
    await watched.watcher.stop()


async def test_failing_lists_beside_a_live_watch_leave_the_view_stale_too(
    clock: ManualClock, registry: Counting
) -> None:
    put(registry, "a")
    watched = await loaded(registry, clock)
    for request in ("list", "probe"):
        registry.fail_next(request, RegistryUnavailable("slow"), times=1000)
    await clock.advance(21)
    assert watched.status == "stale"
    put(registry, "b")
    await clock.settle()
    assert watched.status == "fresh", "an event is proof"
    assert watched.ids == ["a", "b"]
    await watched.watcher.stop()


async def test_progress_is_proof(clock: ManualClock, registry: Counting) -> None:
    watched = await loaded(registry, clock)
    await clock.advance(4)
    registry.progress()
    await clock.settle()
    assert watched.watcher.view.proof_at == clock.now()
    await watched.watcher.stop()


async def test_a_wiped_registry_doesnt_empty_the_index_before_its_agents_could_come_back(
    clock: ManualClock, registry: Counting
) -> None:
    for agent_id in "abc":
        put(registry, agent_id)
    watched = await loaded(registry, clock)
    registry.wipe()
    await clock.advance(5)
    assert watched.ids == ["a", "b", "c"]
    assert watched.status == "stale"
    for agent_id in "ab":
        put(registry, agent_id)
    await clock.advance(5)
    assert watched.ids == ["a", "b", "c"]
    await clock.advance(9)
    assert watched.ids == ["a", "b", "c"], "an agent whose last attempt hung comes back only now"
    await clock.advance(4)
    assert watched.ids == ["a", "b"], "confirmed a lease time, a request and a pause later"
    assert watched.status == "fresh"
    await watched.watcher.stop()


async def test_when_all_are_back_the_doubt_is_over(clock: ManualClock, registry: Counting) -> None:
    for agent_id in "abc":
        put(registry, agent_id)
    watched = await loaded(registry, clock)
    registry.wipe()
    await clock.advance(1)
    assert watched.status == "stale"
    for agent_id in "abc":
        put(registry, agent_id)
    await clock.settle()
    assert watched.status == "fresh"
    assert watched.said == ["connected", "lost", "stale", "connected"]
    await watched.watcher.stop()


async def test_an_empty_list_in_quiet_times_and_removals_by_watch_are_believed_at_once(
    clock: ManualClock, registry: Counting
) -> None:
    for agent_id in "abc":
        put(registry, agent_id)
    watched = await loaded(registry, clock)
    for agent_id in "abc":
        registry.delete("prod", agent_id)
    await clock.settle()
    assert watched.ids == []
    assert watched.status == "fresh"
    await watched.watcher.stop()


async def test_everybody_gone_after_a_lost_watch_is_not_believed_at_once(
    clock: ManualClock, registry: Counting
) -> None:
    for agent_id in "abc":
        put(registry, agent_id)
    watched = await loaded(registry, clock)
    registry.drop_watches()
    for agent_id in "abc":
        registry.delete("prod", agent_id)
    await clock.advance(2)
    assert watched.ids == ["a", "b", "c"]
    await clock.advance(22)
    assert watched.ids == []
    assert watched.status == "fresh"
    await watched.watcher.stop()


async def test_everybody_gone_after_a_failed_list_is_not_believed_at_once(
    clock: ManualClock, registry: Counting
) -> None:
    for agent_id in "abc":
        put(registry, agent_id)
    watched = await loaded(registry, clock)
    registry.freeze_watches()
    for agent_id in "abc":
        registry.delete("prod", agent_id)
    registry.fail_next("list", RegistryUnavailable("slow"))
    await clock.advance(22)
    assert watched.ids == ["a", "b", "c"]
    await clock.advance(16)
    assert watched.ids == []
    await watched.watcher.stop()


async def test_the_only_agent_may_leave_right_after_trouble(clock: ManualClock, registry: Counting) -> None:
    put(registry, "a")
    watched = await loaded(registry, clock)
    registry.down()
    await clock.advance(5)
    registry.up()
    await clock.advance(2)
    registry.delete("prod", "a")
    await clock.settle()
    assert watched.ids == []
    await watched.watcher.stop()


async def test_an_event_after_the_grace_ended_makes_no_half_empty_index_look_fresh(
    clock: ManualClock, registry: Counting
) -> None:
    put(registry, "a")
    watched = await loaded(registry, clock, RegistryConfig(stale_grace_s=10.0))
    for request in ("list", "probe"):
        registry.fail_next(request, RegistryUnavailable("slow"), times=50)
    await clock.advance(40)
    assert watched.status == "expired"
    put(registry, "b")
    await clock.settle()
    assert (watched.status, watched.ids) == ("expired", [])
    await clock.advance(120)
    assert (watched.status, watched.ids) == ("fresh", ["a", "b"])
    await watched.watcher.stop()


async def test_one_departure_during_trouble_is_believed(clock: ManualClock, registry: Counting) -> None:
    for agent_id in "abc":
        put(registry, agent_id)
    watched = await loaded(registry, clock)
    registry.down()
    registry.delete("prod", "a")
    await clock.advance(30)
    registry.up()
    await clock.advance(3)
    assert watched.ids == ["b", "c"]
    await watched.watcher.stop()


async def test_leases_that_end_all_at_once_when_a_frozen_registry_wakes_are_not_believed(
    clock: ManualClock, registry: Counting
) -> None:
    for agent_id in "abcd":
        put(registry, agent_id)
    watched = await loaded(registry, clock)
    registry.down("frozen")
    await clock.advance(30)
    registry.up()
    await clock.advance(2)
    for agent_id in "abcd":
        registry.delete("prod", agent_id)
    await clock.settle()
    assert watched.ids == ["c", "d"], "up to half is believed at once"
    assert watched.status == "stale"
    for agent_id in "abc":
        put(registry, agent_id)
    await clock.advance(22)
    assert watched.ids == ["a", "b", "c"]
    assert watched.status == "fresh"
    await watched.watcher.stop()


@pytest.mark.parametrize("trouble", ["a lost watch", "a short outage", "one failed list", "a compaction"])
async def test_clients_that_close_after_small_trouble_are_gone_at_once(
    clock: ManualClock, registry: Counting, trouble: str
) -> None:
    for agent_id in "abcd":
        put(registry, agent_id)
    watched = await loaded(registry, clock)
    match trouble:
        case "a lost watch":
            registry.drop_watches()
        case "a short outage":
            registry.down()
            await clock.advance(4)
            registry.up()
        case "one failed list":
            put(registry, "d")
            registry.fail_next("list", RegistryUnavailable("slow"))
            await clock.advance(8)
            put(registry, "d")
        case "a compaction":
            registry.drop_watches(compacted=True)
    await clock.advance(2)
    for agent_id in "abc":
        registry.delete("prod", agent_id)
    await clock.settle()
    assert watched.ids == ["d"]
    assert watched.status == "fresh"
    await watched.watcher.stop()


async def test_a_woken_registry_whose_watch_lived_on_is_guarded_before_the_next_list(
    clock: ManualClock, registry: Counting
) -> None:
    for agent_id in "abcd":
        put(registry, agent_id)
    watched = await loaded(registry, clock)
    for request in ("list", "probe"):
        registry.fail_next(request, RegistryUnavailable("frozen"), times=1000)
    await clock.advance(30)
    for agent_id in "abcd":
        registry.delete("prod", agent_id)
    await clock.settle()
    assert watched.ids == ["c", "d"]
    assert watched.status == "stale"
    await watched.watcher.stop()


async def test_each_client_refreshes_by_its_own_clock_and_never_all_in_one_second(clock: ManualClock) -> None:
    registries = [Counting(clock) for _ in range(100)]
    watchers = [Watched(registry, clock, seed=seed) for seed, registry in enumerate(registries)]
    for watched in watchers:
        watched.watcher.start()
    for _ in range(300):
        await clock.advance(1)
    for registry in registries:
        # The first probe belongs to the watch that was opened then.
        gaps = [b - a for a, b in itertools.pairwise(registry.probed)]
        assert 5 <= gaps[0] <= 20, "the first early, so that clients part ways"
        assert all(15 <= gap <= 20.001 for gap in gaps[1:])
    buckets = [0] * 301
    for registry in registries:
        for at in registry.probed[1:]:
            buckets[int(at)] += 1
    assert max(buckets) <= 15
    for watched in watchers:
        await watched.watcher.stop()


# --- waiting, stopping, errors ----------------------------------------------------------------------------


async def test_waiting_runs_out_with_the_address_and_the_reason(clock: ManualClock, registry: Counting) -> None:
    registry.down("no route")
    watched = Watched(registry, clock)
    watched.watcher.start()
    waiting = asyncio.create_task(watched.watcher.wait_loaded(5))
    await clock.advance(5)
    with pytest.raises(RegistryUnavailable, match=r"within 5 s.*memory://local.*no route"):
        await waiting
    registry.up()
    await clock.advance(3)
    await watched.watcher.wait_loaded(0)
    await watched.watcher.stop()


async def test_a_refusal_is_told_at_once(clock: ManualClock, registry: Counting) -> None:
    registry.fail_next("list", Forbidden("no read permission"))
    watched = Watched(registry, clock)
    watched.watcher.start()
    with pytest.raises(Forbidden, match="no read permission"):
        await watched.watcher.wait_loaded(5)
    await clock.advance(1)
    await watched.watcher.wait_loaded(5)
    await watched.watcher.stop()


async def test_many_waiters_share_one_list(clock: ManualClock, registry: Counting) -> None:
    watched = Watched(registry, clock)
    watched.watcher.start()
    await asyncio.gather(*(watched.watcher.wait_loaded(5) for _ in range(50)))
    assert len(registry.listed) == 1
    await watched.watcher.stop()


async def test_after_stop_nothing_is_applied(clock: ManualClock, registry: Counting) -> None:
    watched = await loaded(registry, clock)
    put(registry, "late")
    await watched.watcher.stop()
    put(registry, "later")
    await clock.advance(60)
    assert watched.ids == []
    assert len(registry.listed) == 1


async def test_with_a_blocking_registry_only_the_results_touch_the_application_loop() -> None:
    class Remote(MemoryRegistry):
        threads: set[int] = set()  # noqa: RUF012

        @property
        def blocking(self) -> bool:
            return True

        def list(self, namespace: str) -> Listing:
            self.threads.add(threading.get_ident())
            return super().list(namespace)

    registry = Remote()
    put(registry, "a")
    watched = Watched(registry, registry.clock)
    applied_on: set[int] = set()
    watched.watcher._apply = lambda change: (applied_on.add(threading.get_ident()), watched.apply(change))
    watched.watcher.start()
    await watched.watcher.wait_loaded(10)
    put(registry, "b")
    await eventually(lambda: watched.ids == ["a", "b"])
    assert registry.threads.isdisjoint({threading.get_ident()})
    assert applied_on == {threading.get_ident()}
    await watched.watcher.stop(10)
    await eventually(lambda: not any(t.name == "agent-reach-watcher" for t in threading.enumerate()))


class FromAThread(MemoryRegistry):
    """A registry whose watch is told by another thread, as a real one's is."""

    blocking = True  # type: ignore[assignment]

    def __init__(self) -> None:
        super().__init__()
        self.tell: list[Callable[[WatchMessage], None]] = []

    def watch(self, namespace: str, from_revision: int, deliver: Callable[[WatchMessage], None]) -> Watch:
        self.tell.append(deliver)
        return super().watch(namespace, from_revision, deliver)


async def test_nothing_is_lost_between_the_watchs_thread_and_the_index() -> None:
    registry = FromAThread()
    watched = Watched(registry, SystemClock())
    watched.watcher.start()
    await eventually(lambda: watched.watcher.view.connected)
    rng = random.Random(1)

    def burst() -> None:
        for revision in range(2, 1002):
            record = RawRecord(f"a{revision}", info(f"a{revision}").to_bytes(), revision, 7)
            registry.tell[0](WatchChanges(revision, (Put(record),)))
            # Each pause ends at another point of the reader's turn.
            time.sleep(rng.uniform(0.0, 0.0005))

    await asyncio.to_thread(burst)
    await eventually(lambda: watched.watcher.view.revision == 1001)
    assert len(watched.index) == 1000
    assert len(registry.tell) == 1
    await watched.watcher.stop()


async def test_ten_thousand_instances_leave_the_application_its_turns() -> None:
    registry = FromAThread()
    for number in range(10_000):
        registry.put_raw("prod", f"a{number}", info(f"a{number}").to_bytes(), 1)
    watched = Watched(registry, SystemClock())
    sizes: list[int] = []
    watched.watcher.start()
    while watched.status == "starting":
        await asyncio.sleep(0)
        sizes.append(len(watched.index))
    assert len(watched.index) == 10_000, "and it is only then that it counts as loaded"
    assert len(set(sizes)) > 30
    await watched.watcher.stop()


async def test_stopping_while_a_list_hangs_is_bounded() -> None:
    hold = threading.Event()

    class Stuck(MemoryRegistry):
        @property
        def blocking(self) -> bool:
            return True

        def list(self, namespace: str) -> Listing:
            hold.wait(20)
            return super().list(namespace)

    registry = Stuck()
    put(registry, "a")
    watched = Watched(registry, registry.clock)
    watched.watcher.start()
    await watched.watcher.stop(0.05)
    hold.set()
    await eventually(lambda: not any(t.name == "agent-reach-watcher" for t in threading.enumerate()))
    assert watched.changes == []


async def test_a_callback_that_fails_doesnt_end_the_watch(clock: ManualClock, registry: Counting) -> None:
    problems: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: problems.append(context["exception"]))
    watched = await loaded(registry, clock)
    apply, watched.watcher._apply = watched.watcher._apply, lambda change: 1 / 0  # type: ignore[return-value]
    put(registry, "a")
    await clock.settle()
    watched.watcher._apply = apply
    put(registry, "b")
    await clock.settle()
    assert watched.ids == ["b"]
    assert isinstance(problems[0], ZeroDivisionError)
    await watched.watcher.stop()


@pytest.mark.parametrize("seed", range(40))
async def test_whatever_happens_the_index_ends_up_as_the_registry(seed: int) -> None:
    clock = ManualClock()
    registry = Counting(clock)
    rng = random.Random(seed)
    watched = await loaded(registry, clock)
    for _ in range(60):
        match rng.randrange(9):
            case 0 | 1 | 2 | 3:
                put(registry, f"a{rng.randrange(8)}", incarnation=str(rng.random()))
            case 4 | 5:
                registry.delete("prod", f"a{rng.randrange(8)}")
            case 6:
                registry.drop_watches()
            case 7:
                rng.choice([registry.freeze_watches, registry.thaw_watches, registry.compact])()
            case 8:
                rng.choice([registry.down, registry.up, registry.wipe, lambda: registry.wipe(silent=True)])()
        await clock.advance(rng.choice([0, 0, 0.05, 1, 5]))
    registry.up()
    await clock.advance(120)
    there = {record.agent_id: record.value for record in MemoryRegistry.list(registry, "prod").records}
    assert {agent_id: i.info.to_bytes() for agent_id, i in watched.index.instances.items()} == there
    assert watched.status == "fresh"
    await watched.watcher.stop()
