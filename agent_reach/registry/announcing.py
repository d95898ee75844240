"""Our own entry in the registry: register, keep alive, heal, withdraw.

One coroutine does it all, over and over: renew the lease (or grant one), then write the record if none is there.
So whatever went wrong, a lost lease, a wiped store or a key deleted by hand, the next heartbeat mends it.
"""

from __future__ import annotations

import copy
import logging
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias, assert_never

from agent_reach.config import RegistryConfig
from agent_reach.errors import AgentIdInUse, ConfigError, Forbidden, ReachError, RegistryUnavailable, Unauthorized
from agent_reach.events import Event, RegistrationChanged
from agent_reach.model import AgentInfo
from agent_reach.ports import Clock, Created, LeaseLost, Occupied, RawRecord, Registry
from agent_reach.registry.holder import Holder
from agent_reach.registry.hosting import Backoff, Host, Signal, unavailable

__all__ = ["Announcer", "RegistrationState", "Status"]

_log = logging.getLogger(__name__)

Status: TypeAlias = Literal["idle", "registering", "registered", "lost", "refused", "withdrawn"]

# How often another holder's lease is looked at. etcd tells whole seconds, so oftener shows nothing new.
_LOOK_S = 1.0


@dataclass(frozen=True, slots=True)
class RegistrationState:
    """Where our registration stands since `since_s` (seconds, monotonic). `error` is why it isn't `registered`."""

    status: Status = "idle"
    detail: str = ""
    since_s: float = 0.0
    error: ReachError | None = None


class Announcer:
    """Keeps one agent's record in the registry for as long as it runs; it never gives up by itself.

    `record` is asked for the record at each write; it may be called from a thread. `emit` and all changes of
    `state` happen on the loop that called `start`.
    """

    def __init__(
        self,
        registry: Registry,
        record: Callable[[], AgentInfo],
        *,
        config: RegistryConfig,
        clock: Clock,
        rng: random.Random,
        emit: Callable[[Event], None],
    ) -> None:
        self._registry = registry
        self._record = record
        self._config = config
        self._clock = clock
        self._rng = rng
        self._emit = emit
        self._host = Host("agent-reach-announcer", self._run, threaded=registry.blocking, clock=clock)
        self._backoff = Backoff(config, rng)
        self._changed = Signal()
        self._state = RegistrationState(since_s=clock.now())
        self._agent_id = ""
        # How often the record was said to have changed, and the last of these that was written.
        self._wanted = self._written = 0
        self._emitted = ""
        self._was_registered = False
        # What follows belongs to the host.
        self._lease: int | None = None
        self._writing = 0
        # When the last heartbeat began; the last that renewed our lease; the last that found or wrote our entry.
        self._beat_at = self._there_at = 0.0
        self._renewed_at = -math.inf
        # The last heartbeat failed, though we count as registered still.
        self._troubled = False
        self._holder: Holder | None = None
        self._status: Status = "idle"

    @property
    def state(self) -> RegistrationState:
        """Where the registration stands now."""
        return self._state

    def start(self) -> None:
        """Begin to register. Needs a running event loop; returns at once."""
        self._agent_id = self._record().agent_id
        self._host.start()

    async def first_attempt(self) -> None:
        """Return once the first attempt ended: registered, or the registry failed and we keep trying (see `state`).

        Raises what `wait_registered` raises, but for a registry that can't be reached. While it isn't clear whether
        another holder of the id lives, this waits, about as long as that holder's lease.
        """

        def ended() -> RegistrationState | None:
            state = self._state
            return state if state.error is not None or state.status in ("registered", "withdrawn") else None

        state = await self._changed.wait_for(ended, self._clock)
        if state is not None and state.error is not None and not isinstance(state.error, RegistryUnavailable):
            raise copy.copy(state.error)

    async def wait_registered(self, timeout_s: float) -> None:
        """Return once the record is in the registry.

        Raises `AgentIdInUse` if another live process holds the id, `ConfigError` if the record can't be written,
        `Unauthorized` or `Forbidden` if the registry refuses us, `RegistryUnavailable` after `timeout_s` seconds.
        """

        def settled() -> RegistrationState | None:
            state = self._state
            ended = state.status in ("registered", "refused", "withdrawn")
            return state if ended or isinstance(state.error, Unauthorized | Forbidden) else None

        state = await self._changed.wait_for(settled, self._clock, timeout_s)
        if state is not None and state.status == "registered":
            return
        if state is not None and state.error is not None:
            raise copy.copy(state.error)
        raise unavailable(
            self._registry.address, timeout_s, f"agent {self._agent_id} was not registered", self._state.error
        )

    async def rewrite(self, timeout_s: float) -> None:
        """The record changed: write it over the old one, under the same lease. Returns once it is there.

        Raises what `wait_registered` raises; it is written all the same, as soon as that is possible. Before the
        start this does nothing.
        """
        if not self._host.started:
            return
        self._wanted = wanted = self._wanted + 1
        self._host.wake()

        def settled() -> bool | None:
            refused = isinstance(self._state.error, Unauthorized | Forbidden)
            over = self._state.status in ("refused", "withdrawn") or refused
            return self._written >= wanted or (False if over else None)

        if await self._changed.wait_for(settled, self._clock, timeout_s):
            return
        if self._state.error is not None and not isinstance(self._state.error, RegistryUnavailable):
            raise copy.copy(self._state.error)
        what = f"the new record of agent {self._agent_id} was not written"
        raise unavailable(self._registry.address, timeout_s, what, self._state.error)

    async def withdraw(self, timeout_s: float) -> None:
        """Take the record out: stop keeping alive and revoke the lease, within `timeout_s` seconds. Idempotent.

        If the registry doesn't answer in time, the record ends with its lease, which nothing renews any more.
        """
        ended = await self._host.stop(timeout_s)
        detail = "" if ended else f"no answer within {timeout_s:g} s; the entry ends with its lease"
        # No news if the host told so already; it doesn't if it was stopped before it began.
        self._take("withdrawn", detail, None, "withdrawn")

    # --- hosted -------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        while not self._host.stopping:
            await self._host.pause(self._beat())
        self._give_up_lease()

    def _beat(self) -> float:
        """Do one heartbeat and return the seconds until the next."""
        self._writing = self._wanted
        # The registry counts from when a request arrived, so from before it at the earliest.
        self._beat_at = self._host.clock.now()
        try:
            info = self._record()
            value = info.to_bytes()
        except ValueError as error:
            self._tell("refused", str(error), ConfigError(str(error)), "refused")
            return self._config.lease_ttl_s / 3
        if self._status == "idle":
            self._tell("registering", "")
        try:
            self._renew()
            if self._host.stopping:
                return 0.0
            assert self._lease is not None
            delay_s = self._write(info, value, self._lease)
        except LeaseLost as error:
            self._lease = None
            if self._status == "registered":
                self._tell("lost", f"the lease is gone: {error}", event="lost")
            # The first time at once; a lease that is lost as soon as it is granted is a fault like any other.
            delay_s = self._backoff.next()
            return 0.0 if self._backoff.failures == 1 else delay_s
        except ReachError as error:
            return self._failed(error)
        self._backoff.reset()
        return delay_s

    def _write(self, info: AgentInfo, value: bytes, lease: int) -> float:
        """See to it that our record is there under this lease; return the seconds until the next look."""
        held = self._registry.get(info.namespace, info.agent_id)
        if held is None:
            held = self._create(info, value, lease)
            if held is None:
                return self._settled(info)
        try:
            holder = AgentInfo.from_bytes(held.value)
        except ValueError:
            return self._occupied(info, held, "a process whose record can't be read")
        if holder.incarnation != info.incarnation:
            return self._occupied(info, held, f"the process at {holder.endpoint.url}")
        # Our own entry; but perhaps it says what was so earlier, or hangs on an older lease of ours that is ending.
        stands = held.lease == lease and held.value == value
        if stands or self._registry.replace(info.namespace, held, value, lease):
            return self._settled(info)
        # It went between the two requests.
        return 0.0

    def _create(self, info: AgentInfo, value: bytes, lease: int) -> RawRecord | None:
        """Write the entry; return who was quicker, if somebody was."""
        try:
            outcome = self._registry.create(info.namespace, info.agent_id, value, lease)
        except ReachError as error:
            if self._status == "registered":
                self._tell("lost", f"the entry is gone and can't be written: {error}", error, event="lost")
            raise
        match outcome:
            case Created():
                return None
            case Occupied(holder):
                return holder
            case _:
                assert_never(outcome)

    def _renew(self) -> None:
        """Renew our lease, or grant one if there is none."""
        if self._lease is None:
            self._lease = self._registry.grant(self._config.lease_ttl_s)
        elif not self._registry.keep_alive(self._lease):
            raise LeaseLost("it ended before it was renewed")
        self._renewed_at = self._beat_at

    def _settled(self, info: AgentInfo) -> float:
        self._holder = None
        self._there_at = self._beat_at
        if self._writing:
            self._host.post(self._wrote, self._writing)
        if self._status != "registered" or self._troubled:
            names = ", ".join(capability.name for capability in info.capabilities)
            self._troubled = False
            self._tell("registered", f"at {info.endpoint.url} in {info.namespace!r}: {names}", event="registered")
        # A third of the lease, or a little less: agents that registered together, after an outage, part ways.
        return self._config.lease_ttl_s / 3 * self._rng.uniform(0.8, 1.0)

    def _failed(self, error: ReachError) -> float:
        # Leases may have been lengthened while the registry was away: what was seen before counts no more.
        self._holder = None
        now, ttl_s = self._host.clock.now(), self._config.lease_ttl_s
        silent_s = now - self._there_at
        if self._status in ("registering", "lost"):
            self._tell(self._status, str(error), error, "waiting" if self._status == "registering" else None)
        elif self._status == "registered" and silent_s >= ttl_s:
            # The registry must be taken to have ended the lease. Whether it did, it says itself at the next
            # renewal: after a restart it may still live, and then nobody need see us go and come back.
            self._tell("lost", f"not seen for {silent_s:.1f} s: {error}", error, "lost")
        elif self._status == "registered":
            self._troubled = True
            self._tell("registered", f"not seen for {silent_s:.1f} s: {error}", error)
        delay_s = self._backoff.after(error)
        # However long others would wait: a lease that may still live must be renewed.
        return min(delay_s, ttl_s / 3) if now - self._renewed_at < ttl_s else delay_s

    def _occupied(self, info: AgentInfo, held: RawRecord, who: str) -> float:
        """Somebody else's record is there: a dead process's, or a living rival's."""
        if held.lease == 0:
            return self._refused(info, f"{who}, by a record without a lease")
        if self._holder is None or self._holder.revision != held.revision:
            self._holder = Holder(held.revision)
        asked_at = self._host.clock.now()
        left_s = self._registry.time_left(held.lease)
        self._holder = self._holder.seen(asked_at, self._host.clock.now(), left_s)
        if self._holder.lives:
            return self._refused(info, who)
        if self._status != "refused":
            detail = f"agent id {info.agent_id!r} is held by {who}; waiting for its lease to end"
            self._tell("registering", detail, event="waiting")
        return _LOOK_S

    def _refused(self, info: AgentInfo, who: str) -> float:
        message = (
            f"agent id {info.agent_id!r} in namespace {info.namespace!r} is held by {who}; stop that process, or "
            "give this one another agent_id (leave it out for one that never collides)"
        )
        if self._status != "refused":
            self._tell("refused", message, AgentIdInUse(message, agent_id=info.agent_id), "refused")
        # It may leave one day, so go on looking.
        return self._config.lease_ttl_s / 3

    def _give_up_lease(self) -> None:
        """Revoke, so that peers hear of it now and not when the lease ends."""
        detail = ""
        for last in (False, True):
            if self._lease is None:
                break
            try:
                self._registry.revoke(self._lease)
                self._lease = None
            except ReachError as error:
                # One lost connection is common after a quiet time; a second failure means that it is down.
                if last:
                    detail = f"not revoked, so the entry ends with its lease: {error}"
                    _log.warning("agent %s: %s", self._agent_id, detail)
        self._tell("withdrawn", detail, event="withdrawn")

    def _tell(self, status: Status, detail: str, error: ReachError | None = None, event: str | None = None) -> None:
        self._status = status
        self._host.post(self._take, status, detail, error, event)

    # --- on the owner's loop --------------------------------------------------------------------------------

    def _take(self, status: Status, detail: str, error: ReachError | None, event: str | None) -> None:
        if self._state.status == "withdrawn":
            # Late news of a thread that was given up.
            return
        since_s = self._state.since_s if status == self._state.status else self._clock.now()
        self._state = RegistrationState(status, detail, since_s, error)
        self._changed.fire()
        self._was_registered |= status == "registered"
        if event == "withdrawn" and not self._was_registered:
            # Nobody ever saw an entry of ours, so none went.
            return
        if event is not None and event != self._emitted:
            self._emitted = event
            self._emit(RegistrationChanged(agent_id=self._agent_id, status=event, detail=detail))

    def _wrote(self, number: int) -> None:
        self._written = max(self._written, number)
        self._changed.fire()
