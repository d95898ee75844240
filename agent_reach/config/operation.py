"""The registry, and the callee's half."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

from agent_reach.config import checks
from agent_reach.errors import ConfigError

__all__ = ["RegistryConfig", "ServingConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistryConfig:
    """Registration and the cached index (DESIGN section 4)."""

    # A dead process is gone from every index within this; kept alive every third of it, two may be lost.
    lease_ttl_s: float = 15.0
    # Knowledge is fresh for refresh_s + U(0, refresh_jitter_s) after its last proof.
    refresh_s: float = 15.0
    refresh_jitter_s: float = 5.0
    # How long the last good index is served while etcd can't answer: longer than it takes a person to be called and
    # to bring it back.
    stale_grace_s: float = 900.0
    # One etcd request; a healthy etcd answers in 3 ms, an election takes 1 to 2 s.
    request_timeout_s: float = 3.0
    # Jittered back-off between attempts to reach etcd: never gives up, never a stampede. While nothing answers the
    # pause is half to the whole of it: about 15 dials in 30 s, and an agent is back within 3 s of etcd.
    backoff_base_s: float = 0.1
    backoff_max_s: float = 2.5
    # A file that keeps the last good view, for a process that starts while etcd can't be reached. One file for each
    # namespace; several processes may share it.
    snapshot_path: str | os.PathLike[str] | None = None
    # Older than this it isn't used: addresses have been given to others by then. A night's outage is covered.
    snapshot_max_age_s: float = 86_400.0
    # What entering the client does while etcd can't be reached.
    on_unavailable: Literal["keep_trying", "fail"] = "keep_trying"
    # What a contract clash with a live instance of the same capability does.
    schema_policy: Literal["warn", "refuse", "ignore"] = "warn"

    def __post_init__(self) -> None:
        # etcd counts leases in whole seconds; below 2 s three keep-alives don't fit an election.
        checks.number(self, "lease_ttl_s", least=2.0)
        checks.number(self, "refresh_s")
        checks.number(self, "refresh_jitter_s", least=0.0)
        checks.number(self, "stale_grace_s", least=0.0)
        checks.number(self, "request_timeout_s")
        checks.number(self, "backoff_base_s")
        checks.number(self, "backoff_max_s", least=self.backoff_base_s)
        checks.number(self, "snapshot_max_age_s")
        if self.snapshot_path is not None:
            checks.file(self, "snapshot_path")
        if self.on_unavailable not in ("keep_trying", "fail"):
            raise ConfigError(
                f"RegistryConfig.on_unavailable is {self.on_unavailable!r}; use 'keep_trying' or 'fail'"
            )
        if self.schema_policy not in ("warn", "refuse", "ignore"):
            raise ConfigError(
                f"RegistryConfig.schema_policy is {self.schema_policy!r}; use 'warn', 'refuse' or 'ignore'"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingConfig:
    """The callee's half (DESIGN section 6)."""

    # Each way, for callers too; a page of text is 10 KB, a long document 1 MB. Past it: 413.
    max_body_bytes: int = 8 * 1024 * 1024
    # Waiting places per running call; at 3 x the last in the queue waits about three service times.
    queue_factor: int = 3
    # After withdrawing, go on accepting: watchers learn within about a second.
    linger_s: float = 3.0
    # The whole drain: linger, running calls, close.
    drain_s: float = 30.0
    # How long a finished answer is kept for a repeat with the same explicit idempotency key: longer than any caller
    # goes on repeating. And how many: at 1 KB an answer that is 1 MB.
    dedupe_ttl_s: float = 300.0
    dedupe_entries: int = 1024

    def __post_init__(self) -> None:
        checks.whole(self, "max_body_bytes", least=1024)
        checks.whole(self, "queue_factor", least=0)
        checks.number(self, "linger_s", least=0.0)
        checks.number(self, "drain_s", least=self.linger_s)
        checks.number(self, "dedupe_ttl_s")
        checks.whole(self, "dedupe_entries", least=1)
