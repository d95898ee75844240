"""Leaving: the order, the bounds, and what happens when a part of it fails or hangs."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest

from agent_reach.config import ServingConfig
from agent_reach.serving.drain import drain
from agent_reach.testing import ManualClock


@dataclass
class Scene:
    """An app and a server that note when what was asked of them; work ends at `idle_at`."""

    clock: ManualClock = field(default_factory=ManualClock)
    hurry: asyncio.Event = field(default_factory=asyncio.Event)
    idle_at: float = 0.0
    withdraw_takes: float = 0.0
    withdraw_raises: Exception | None = None
    uses_all_its_time: bool = False
    log: list[tuple[float, str]] = field(default_factory=list)

    def note(self, what: str) -> None:
        self.log.append((round(self.clock.now(), 3), what))

    def begin_drain(self) -> None:
        self.note("draining")

    async def wait_idle(self, timeout_s: float) -> bool:
        wait = max(0.0, self.idle_at - self.clock.now())
        await self.clock.sleep(min(wait, timeout_s))
        self.note("idle" if wait <= timeout_s else "not idle")
        return wait <= timeout_s

    async def stop(self, cleanup_s: float) -> None:
        self.note("app stopped")
        await self.clock.sleep(cleanup_s if self.uses_all_its_time else 0.0)

    async def withdraw(self) -> None:
        self.note("withdraw")
        if self.withdraw_raises is not None:
            raise self.withdraw_raises
        await self.clock.sleep(self.withdraw_takes)
        self.note("withdrawn")

    async def stop_server(self, timeout_s: float) -> None:
        self.note(f"server stopped, {timeout_s:g} s")
        await self.clock.sleep(timeout_s if self.uses_all_its_time else 0.0)

    def begin(self, **config: Any) -> asyncio.Task[None]:
        return asyncio.ensure_future(
            drain(
                app=self,
                withdraw=self.withdraw,
                stop_server=self.stop_server,
                clock=self.clock,
                config=ServingConfig(**{"linger_s": 3.0, "drain_s": 30.0} | config),
                hurry=self.hurry,
            )
        )


async def test_the_order_is_say_withdraw_linger_wait_close() -> None:
    scene = Scene(idle_at=10.0, withdraw_takes=0.5)
    task = scene.begin()
    await scene.clock.advance(60)
    await task
    assert scene.log == [
        (0.0, "draining"),
        (0.0, "withdraw"),
        (0.5, "withdrawn"),
        (10.0, "idle"),
        (10.0, "app stopped"),
        (10.0, "server stopped, 2 s"),
    ]


async def test_an_idle_agent_still_lingers_for_callers_that_have_not_heard() -> None:
    scene = Scene()
    task = scene.begin()
    await scene.clock.advance(2.9)
    assert not task.done()
    await scene.clock.advance(0.2)
    await task
    assert scene.log[-1] == (3.0, "server stopped, 2 s")


async def test_without_linger_an_idle_agent_is_gone_at_once() -> None:
    scene = Scene()
    await asyncio.wait_for(scene.begin(linger_s=0.0), 5)
    assert scene.log[-1] == (0.0, "server stopped, 2 s")


async def test_work_that_never_ends_is_cut_at_the_bound() -> None:
    scene = Scene(idle_at=1e9)
    task = scene.begin(drain_s=8.0)
    await scene.clock.advance(60)
    await task
    # A quarter of a short drain is kept back for closing.
    assert scene.log[-2:] == [(6.0, "app stopped"), (6.0, "server stopped, 2 s")]


@pytest.mark.parametrize("drain_s", [0.0, 1.0, 3.0, 8.0, 30.0])
@pytest.mark.parametrize("withdraw_takes", [0.0, 1.5, 1e9])
async def test_the_whole_ends_in_its_time_however_slow_the_parts(drain_s: float, withdraw_takes: float) -> None:
    scene = Scene(idle_at=1e9, withdraw_takes=withdraw_takes, uses_all_its_time=True)
    task = scene.begin(drain_s=drain_s, linger_s=min(3.0, drain_s))
    await scene.clock.advance(drain_s)
    await asyncio.wait_for(task, 1)
    assert [what for _, what in scene.log][:2] == ["draining", "withdraw"]
    assert "app stopped" in [what for _, what in scene.log]


async def test_a_withdrawal_that_fails_is_logged_and_stops_nothing(caplog: pytest.LogCaptureFixture) -> None:
    scene = Scene(withdraw_raises=ConnectionError("etcd is down"))
    task = scene.begin()
    await scene.clock.advance(60)
    await task
    assert scene.log[-1] == (3.0, "server stopped, 2 s")
    assert "withdrawing from the registry failed" in caplog.text


async def test_a_withdrawal_that_hangs_is_left_behind() -> None:
    scene = Scene(withdraw_takes=1e9)
    task = scene.begin()
    await scene.clock.advance(60)
    await task
    assert scene.log[-1] == (28.0, "server stopped, 2 s")


@pytest.mark.parametrize("when", [0.0, 1.0, 5.0])
async def test_a_second_signal_skips_the_waits_but_not_the_steps(when: float) -> None:
    scene = Scene(idle_at=1e9, withdraw_takes=2.0)
    task = scene.begin()
    await scene.clock.advance(when)
    scene.hurry.set()
    await scene.clock.settle()
    await asyncio.wait_for(task, 5)
    assert scene.log[1] == (0.0, "withdraw")
    assert scene.log[-2:] == [(when, "app stopped"), (when, "server stopped, 0 s")]
