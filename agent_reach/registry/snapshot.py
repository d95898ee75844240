"""The last good view of a namespace as a file, so that a process that starts while the registry is down can call.

One JSON object: `schema` 1, `registry` (for people), `namespace`, `cluster_id`, `revision`, `saved_at` (when it was
proved, epoch seconds), and `records`, each with `agent_id`, `value` (the record as text), `revision` and `lease`.
"""

from __future__ import annotations

import json
import logging
import os
import random
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from agent_reach.config import RegistryConfig
from agent_reach.ports import Listing, RawRecord
from agent_reach.registry.mirror import Mirror

__all__ = ["Snapshot", "SnapshotFile", "SnapshotKeeper"]

_log = logging.getLogger(__name__)

_SCHEMA = 1
# At 1,000 instances a snapshot is 1 MB; whoever starts doesn't mind that it misses the last minute.
_EVERY_S = 60.0


class _Record(BaseModel):
    model_config = ConfigDict(strict=True)
    agent_id: str
    value: str
    revision: int
    lease: int


class _Content(BaseModel):
    model_config = ConfigDict(strict=True)
    namespace: str
    cluster_id: int
    revision: int
    saved_at: Annotated[float, Field(allow_inf_nan=False)]
    records: list[_Record]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A view that was proved `age_s` seconds ago."""

    listing: Listing
    age_s: float


class SnapshotFile:
    """One client's snapshot. What goes wrong with it is logged, once for each reason: it is only a help."""

    def __init__(self, path: str | os.PathLike[str], *, registry: str, namespace: str, max_age_s: float) -> None:
        self._path = Path(path)
        self._registry = registry
        self._namespace = namespace
        self._max_age_s = max_age_s
        self._complained = ""

    def load(self, wall: float) -> Snapshot | None:
        """Read it; None if there is none that can be used. `wall` is now, in epoch seconds."""
        try:
            content = _parse(self._path.read_bytes())
            records = tuple(RawRecord(r.agent_id, _bytes(r.value), r.revision, r.lease) for r in content.records)
            # Not the registry's address: members may have been replaced because of this very outage.
            if content.namespace != self._namespace:
                raise ValueError(f"it is of namespace {content.namespace!r}; each needs a file of its own")
            # The clock may have been set back meanwhile.
            age_s = max(0.0, wall - content.saved_at)
            if age_s > self._max_age_s:
                raise ValueError(f"it is older than {self._max_age_s:g} s")
        except FileNotFoundError:
            return None
        except OSError as error:
            self._complain(f"the snapshot {self._path} can't be read: {error.strerror}")
            return None
        except ValueError as error:
            self._complain(f"the snapshot {self._path} isn't used: {error}")
            return None
        return Snapshot(Listing(content.cluster_id, content.revision, records), age_s)

    def save(self, *, cluster_id: int, revision: int, records: Iterable[RawRecord], wall: float) -> None:
        """Write it, readable to its owner only, all or nothing: whoever reads meanwhile gets the one before."""
        head = {
            "schema": _SCHEMA,
            "registry": self._registry,
            "namespace": self._namespace,
            "cluster_id": cluster_id,
            "revision": revision,
            "saved_at": wall,
        }
        try:
            with tempfile.NamedTemporaryFile(
                "w", encoding="utf-8", dir=self._path.parent, prefix=f".{self._path.name}.", delete=False
            ) as file:
                try:
                    file.writelines(_lines(head, records))
                    file.flush()
                    os.fsync(file.fileno())
                    os.replace(file.name, self._path)
                except BaseException:
                    with suppress(OSError):
                        os.unlink(file.name)
                    raise
        except OSError as error:
            self._complain(f"the snapshot {self._path} can't be written: {error.strerror}")

    def _complain(self, problem: str) -> None:
        if problem != self._complained:
            self._complained = problem
            _log.warning("%s", problem)


class SnapshotKeeper:
    """Whether and when a snapshot is written; does nothing where the settings name no file."""

    def __init__(self, config: RegistryConfig, *, registry: str, namespace: str, rng: random.Random) -> None:
        self._file: SnapshotFile | None = None
        if config.snapshot_path is not None:
            max_age_s = config.snapshot_max_age_s
            self._file = SnapshotFile(
                config.snapshot_path, registry=registry, namespace=namespace, max_age_s=max_age_s
            )
        self._rng = rng
        self._save_at = 0.0

    def load(self, wall: float) -> Snapshot | None:
        """Read it; None if there is none that can be used."""
        return None if self._file is None else self._file.load(wall)

    def keep(self, mirror: Mirror, proved_at: float, *, now: float, at_once: bool) -> None:
        """Write what is known, if it is time; `proved_at` in epoch seconds."""
        if self._file is None or mirror.cluster_id is None or (now < self._save_at and not at_once):
            return
        self._save_at = now + self._rng.uniform(_EVERY_S / 2, _EVERY_S)
        self._file.save(
            cluster_id=mirror.cluster_id, revision=mirror.revision, records=mirror.records, wall=proved_at
        )


def _lines(head: Mapping[str, Any], records: Iterable[RawRecord]) -> Iterator[str]:
    """One JSON object, a record a line: encoded at once, 10,000 would hold up every other thread."""
    yield f'{json.dumps(head)[:-1]}, "records": ['
    separator = "\n"
    for raw in records:
        record = {"agent_id": raw.agent_id, "value": _text(raw.value), "revision": raw.revision, "lease": raw.lease}
        yield f"{separator}{json.dumps(record)}"
        separator = ",\n"
    yield "\n]}\n"


def _parse(data: bytes) -> _Content:
    try:
        raw = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it isn't JSON ({error})") from None
    if not isinstance(raw, dict):
        raise ValueError("it isn't a JSON object")  # noqa: TRY004 - told like any other fault of the file
    if (schema := raw.get("schema")) != _SCHEMA:
        raise ValueError(f"its schema is {schema!r}; this version reads {_SCHEMA}")
    try:
        return _Content.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ValueError(f"{where}: {first['msg']}") from None


def _text(value: bytes) -> str:
    # Also what isn't UTF-8 must come back as it was: a record that is unreadable is known to be there all the same.
    return value.decode(errors="surrogateescape")


def _bytes(text: str) -> bytes:
    """Raise ValueError for what `_text` never makes."""
    return text.encode(errors="surrogateescape")
