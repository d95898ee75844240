"""The file that lets a process start while the registry is down."""

from __future__ import annotations

import json
import logging
import os
import stat
from pathlib import Path

import pytest

from agent_reach.config import RegistryConfig
from agent_reach.errors import ConfigError, Unauthorized
from agent_reach.ports import RawRecord
from agent_reach.registry.memory import MemoryRegistry
from agent_reach.registry.snapshot import SnapshotFile
from agent_reach.testing import ManualClock
from tests.registry.support import Watched, info

RECORDS = (RawRecord("a", info("a").to_bytes(), 5, 77), RawRecord("b", "{bäd".encode(), 7))


def snapshot_file(path: Path, namespace: str = "prod", max_age_s: float = 100.0) -> SnapshotFile:
    return SnapshotFile(path, registry="etcd://h:2379", namespace=namespace, max_age_s=max_age_s)


def saved(path: Path, records: tuple[RawRecord, ...] = RECORDS) -> Path:
    snapshot_file(path).save(cluster_id=3, revision=9, records=records, wall=1000.0)
    return path


def test_what_is_saved_is_loaded_with_its_age(tmp_path: Path) -> None:
    loaded = snapshot_file(saved(tmp_path / "s.json")).load(1060.0)
    assert loaded is not None
    assert (loaded.listing.cluster_id, loaded.listing.revision, loaded.listing.records) == (3, 9, RECORDS)
    assert loaded.age_s == 60.0
    early = snapshot_file(tmp_path / "s.json").load(10.0)
    assert early is not None
    assert early.age_s == 0.0, "the clock was set back"


def test_it_is_for_its_owner_only_and_leaves_nothing_else_in_the_folder(tmp_path: Path) -> None:
    path = saved(saved(tmp_path / "s.json"))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [p.name for p in tmp_path.iterdir()] == ["s.json"]


def test_a_write_that_fails_half_way_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = saved(tmp_path / "s.json")
    before = path.read_bytes()

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    ours = snapshot_file(path)
    for _ in range(3):
        ours.save(cluster_id=3, revision=10, records=(), wall=2000.0)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["s.json"]
    assert caplog.text.count("No space left") == 1, "said once, not at each attempt"


def test_what_is_unreadable_comes_back_as_it_was(tmp_path: Path) -> None:
    """It is known to be there; left out, it would look like another history when the registry is back."""
    records = (*RECORDS, RawRecord("c", bytes(range(256)), 8))
    loaded = snapshot_file(saved(tmp_path / "s.json", records)).load(1000.0)
    assert loaded is not None
    assert loaded.listing.records == records


def test_one_trouble_is_told_once_however_often_it_comes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved(tmp_path / "s.json")
    old = snapshot_file(tmp_path / "s.json")
    lost = snapshot_file(tmp_path / "gone" / "s.json")
    for second in range(5):
        assert old.load(2000.0 + second) is None
        lost.save(cluster_id=1, revision=1, records=(), wall=0.0)
    assert len(caplog.records) == 2


def test_none_is_there_so_none_is_loaded_and_nobody_complains(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert snapshot_file(tmp_path / "s.json").load(0.0) is None
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda _: b"", "isn't JSON"),
        (lambda _: b"[" * 100_000, "isn't JSON"),
        (lambda _: b"\xff\xfe", "isn't JSON"),
        (lambda _: b"[]", "isn't a JSON object"),
        (lambda s: s[:-20], "isn't JSON"),
        (lambda s: s.replace(b'"schema": 1', b'"schema": 2'), "its schema is 2; this version reads 1"),
        (lambda s: s.replace(b'"schema": 1, ', b""), "its schema is None"),
        (lambda s: s.replace(b'"revision": 9', b'"revision": "9"'), "revision"),
        (lambda s: s.replace(b'"revision": 5', b'"revision": null'), "records.0.revision"),
        (lambda s: s.replace(b'"namespace": "prod"', b'"namespace": "test"'), "of namespace 'test'"),
        (lambda s: s.replace(b"1000.0", b"10.0"), "older than 100 s"),
        (lambda s: s.replace(b"1000.0", b"NaN"), "saved_at"),
        (lambda s: s.replace(b'"value": "', b'"value": "\\ud800', 1), "isn't used"),
    ],
)
def test_a_file_that_cannot_be_used_says_why_and_is_passed_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, change: object, said: str
) -> None:
    path = saved(tmp_path / "s.json")
    path.write_bytes(change(path.read_bytes()))  # type: ignore[operator]
    with caplog.at_level(logging.WARNING):
        assert snapshot_file(path).load(1000.0) is None
    assert said in caplog.text


def test_unknown_fields_are_tolerated(tmp_path: Path) -> None:
    path = saved(tmp_path / "s.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"later": True}))
    assert snapshot_file(path).load(1000.0) is not None


@pytest.mark.parametrize("path", ["", 7, "/nowhere/at/all/s.json", os.curdir])
def test_a_path_that_cannot_be_is_refused_when_the_settings_are_made(path: object) -> None:
    with pytest.raises(ConfigError, match="snapshot_path"):
        RegistryConfig(snapshot_path=path)  # type: ignore[arg-type]


# --- how it is used ---------------------------------------------------------------------------------------


class Run:
    """One run of a watcher on a registry, with a snapshot."""

    def __init__(self, registry: MemoryRegistry, clock: ManualClock, path: Path, **settings: float) -> None:
        self.registry, self.clock = registry, clock
        self.watched = Watched(registry, clock, RegistryConfig(snapshot_path=path, **settings))

    async def __aenter__(self) -> Watched:
        self.watched.watcher.start()
        await self.watched.watcher.first_attempt()
        await self.clock.settle()
        return self.watched

    async def __aexit__(self, *_: object) -> None:
        await self.watched.watcher.stop()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def registry(clock: ManualClock) -> MemoryRegistry:
    return MemoryRegistry(clock)


def put(registry: MemoryRegistry, *agent_ids: str) -> None:
    for agent_id in agent_ids:
        registry.put_raw("prod", agent_id, info(agent_id).to_bytes(), 1)


async def test_who_starts_while_the_registry_is_down_begins_with_what_the_last_run_knew(
    clock: ManualClock, registry: MemoryRegistry, tmp_path: Path
) -> None:
    put(registry, "a", "b")
    async with Run(registry, clock, tmp_path / "s") as first:
        put(registry, "c")
        await clock.settle()
        assert first.ids == ["a", "b", "c"]
    registry.down()
    await clock.advance(60)
    async with Run(registry, clock, tmp_path / "s") as second:
        assert second.ids == ["a", "b", "c"], "the end of a run saves too"
        assert second.status == "stale"
        assert second.watcher.view.proof_at == pytest.approx(clock.now() - 60.0)
        assert not second.watcher.view.connected
        registry.up()
        put(registry, "d")
        await clock.advance(3)
        assert second.ids == ["a", "b", "c", "d"]
        assert second.status == "fresh"


async def test_who_left_meanwhile_is_dropped_with_the_first_list(
    clock: ManualClock, registry: MemoryRegistry, tmp_path: Path
) -> None:
    put(registry, "a", "b", "c", "d")
    async with Run(registry, clock, tmp_path / "s"):
        pass
    registry.down()
    async with Run(registry, clock, tmp_path / "s") as second:
        assert second.ids == ["a", "b", "c", "d"]
        registry.up()
        registry.delete("prod", "a")
        await clock.advance(3)
        assert second.ids == ["b", "c", "d"]


async def test_a_registry_that_comes_back_empty_is_not_believed_at_once(
    clock: ManualClock, registry: MemoryRegistry, tmp_path: Path
) -> None:
    put(registry, "a", "b")
    async with Run(registry, clock, tmp_path / "s"):
        pass
    registry.down()
    async with Run(registry, clock, tmp_path / "s") as second:
        registry.wipe()
        registry.up()
        await clock.advance(3)
        assert (second.ids, second.status) == (["a", "b"], "stale")
        await clock.advance(20)
        assert (second.ids, second.status) == ([], "fresh")


async def test_a_registry_that_answers_is_believed_and_not_the_file(
    clock: ManualClock, registry: MemoryRegistry, tmp_path: Path
) -> None:
    put(registry, "a")
    async with Run(registry, clock, tmp_path / "s"):
        pass
    registry.delete("prod", "a")
    async with Run(registry, clock, tmp_path / "s") as second:
        assert (second.ids, second.status) == ([], "fresh")


async def test_whoever_is_refused_gets_nothing_from_the_file_either(
    clock: ManualClock, registry: MemoryRegistry, tmp_path: Path
) -> None:
    put(registry, "a")
    async with Run(registry, clock, tmp_path / "s"):
        pass
    registry.fail_next("list", Unauthorized("wrong password"), times=3)
    async with Run(registry, clock, tmp_path / "s") as second:
        assert (second.ids, second.status) == ([], "starting")


async def test_the_grace_counts_from_the_start_and_the_age_from_the_last_proof(
    clock: ManualClock, registry: MemoryRegistry, tmp_path: Path
) -> None:
    put(registry, "a")
    async with Run(registry, clock, tmp_path / "s"):
        await clock.advance(300)
    registry.down()
    await clock.advance(80)
    async with Run(registry, clock, tmp_path / "s", stale_grace_s=50.0, snapshot_max_age_s=110.0) as second:
        await clock.advance(49)
        assert (second.ids, second.status) == (["a"], "stale")
        for _ in range(10):
            await clock.advance(2)
            assert (second.ids, second.status) == ([], "expired")
    async with Run(registry, clock, tmp_path / "s", snapshot_max_age_s=110.0) as third:
        assert (third.ids, third.status) == ([], "starting")


async def test_what_is_not_proved_is_not_saved(
    clock: ManualClock, registry: MemoryRegistry, tmp_path: Path
) -> None:
    put(registry, "a", "b")
    async with Run(registry, clock, tmp_path / "s") as first:
        await clock.advance(200)
        before = (tmp_path / "s").read_text()
        registry.down()
        await clock.advance(200)
        assert first.status == "stale"
    assert (tmp_path / "s").read_text() == before
