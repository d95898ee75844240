"""Where the announcer and the watcher run.

A blocking registry gets a daemon thread with an event loop of its own, so that neither a blocked application
loop nor traffic can starve a keep-alive. Any other registry shares the application's loop, where a manual clock
drives it. Either way the hosted coroutine is the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from agent_reach.config import RegistryConfig
from agent_reach.errors import Forbidden, ReachError, RegistryUnavailable, Unauthorized
from agent_reach.ports import Clock, SystemClock

__all__ = ["Backoff", "Host", "Signal", "unavailable"]

_log = logging.getLogger(__name__)

T = TypeVar("T")


class Host:
    """Runs one coroutine until it is told to stop.

    `main` returns once `stopping` is True; it waits only by `pause`. It is started again if it fails by a bug.
    """

    # After a bug of ours: often enough to heal, too seldom to fill a log.
    _RESTART_S = 1.0

    def __init__(
        self, name: str, main: Callable[[], Coroutine[Any, Any, None]], *, threaded: bool, clock: Clock
    ) -> None:
        self.stopping = False
        # A thread waits on real sockets, so only the machine's clock makes sense there.
        self.clock: Clock = SystemClock() if threaded else clock
        self._name = name
        self._main = main
        self._threaded = threaded
        self._owner: asyncio.AbstractEventLoop | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._wakeup = asyncio.Event()
        self._ended = asyncio.Event()

    @property
    def started(self) -> bool:
        """True once `start` was called."""
        return self._owner is not None

    def start(self) -> None:
        """Run `main`; the running loop becomes the owner, to which `post` brings things."""
        self._owner = asyncio.get_running_loop()
        if self._threaded:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._run_thread, args=(self._loop,), name=self._name, daemon=True).start()
        else:
            self._loop = self._owner
            self._task = self._owner.create_task(self._run(), name=self._name)

    async def stop(self, timeout_s: float) -> bool:
        """Ask `main` to end and wait for it, at most `timeout_s` seconds; False if it still runs.

        What still runs is stuck in a request; it ends by itself right after, and does nothing more.
        """
        self.stopping = True
        if not self.started:
            return True
        self.wake()
        try:
            await asyncio.wait_for(self._ended.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    def post(self, function: Callable[..., object], *args: object) -> None:
        """Call `function` on the owner's loop, in the order of posting; nothing happens if that loop is closed."""
        _call_in(self._owner, function, *args)

    def wake(self) -> None:
        """End the `pause` of `main`, or the next one. From any thread, also after the end."""
        _call_in(self._loop, self._wakeup.set)

    async def pause(self, seconds: float) -> None:
        """Inside `main`: return after `seconds`, or sooner if `wake` or `stop` came."""
        if self.stopping or self._wakeup.is_set():
            pass
        elif isinstance(self.clock, SystemClock):
            # The same as below without tasks: at 100 changes/s they were most of what a change cost.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, seconds)):
                    await self._wakeup.wait()
        else:
            tasks = {
                asyncio.ensure_future(self.clock.sleep(max(0.0, seconds))),
                asyncio.ensure_future(self._wakeup.wait()),
            }
            try:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in tasks:
                    task.cancel()
        self._wakeup.clear()
        if self._owner is not None and self._owner.is_closed():
            # Whoever started us is gone without stopping us: an agent that serves no more must not look alive.
            self.stopping = True

    async def _run(self) -> None:
        try:
            while not self.stopping:
                try:
                    await self._main()
                except Exception:  # noqa: BLE001 - outermost: a bug must neither end it for good nor go unheard
                    _log.exception("%s failed; it starts again in %g s", self._name, self._RESTART_S)
                    await self.pause(self._RESTART_S)
        finally:
            self.post(self._ended.set)

    def _run_thread(self, loop: asyncio.AbstractEventLoop) -> None:
        # Not in debug mode, whatever the application's is: this loop blocks on purpose, one request at a time.
        with asyncio.Runner(debug=False, loop_factory=lambda: loop) as runner:
            runner.run(self._run())


def _call_in(loop: asyncio.AbstractEventLoop | None, function: Callable[..., object], *args: object) -> None:
    if loop is None:
        return
    try:
        loop.call_soon_threadsafe(function, *args)
    except RuntimeError:
        # Closed: the process or the client is on its way out, and nobody is left to tell.
        _log.debug("a message came after its event loop was closed")


class Backoff:
    """Jittered, doubling delays in seconds, from `backoff_base_s` to `backoff_max_s`.

    Full jitter above the base (AWS Architecture Blog, "Exponential Backoff And Jitter"). tenacity's own draws
    from the module's randomness, which a test can't seed per client.
    """

    # A wrong password mends itself only by hand, and each login costs etcd a slow hash.
    _REFUSED_MAX_S = 30.0

    def __init__(self, config: RegistryConfig, rng: random.Random) -> None:
        self._base_s = config.backoff_base_s
        self._max_s = config.backoff_max_s
        self._rng = rng
        self.failures = 0

    def next(self) -> float:
        """One more failure: how long to wait now."""
        return self._next(self._max_s)

    def after(self, error: ReachError) -> float:
        """One more failure: how long to wait, as this error asks for."""
        # 0 says that nothing stands in the way, and not that it would help.
        if isinstance(error, RegistryUnavailable) and error.retry_after_s:
            self.failures += 1
            return error.retry_after_s
        return self._next(self._REFUSED_MAX_S if isinstance(error, Unauthorized | Forbidden) else self._max_s)

    def reset(self) -> None:
        """It works again."""
        self.failures = 0

    def _next(self, max_s: float) -> float:
        self.failures += 1
        # 2**64 is past any cap; the bound keeps the power from growing for years.
        cap = min(max_s, self._base_s * 2.0 ** min(self.failures, 64))
        return self._rng.uniform(self._base_s, cap)


class Signal:
    """Wakes everybody who waits, each time it fires. Belongs to one event loop."""

    def __init__(self) -> None:
        self._waiters: set[asyncio.Future[None]] = set()

    def fire(self) -> None:
        """Wake them."""
        waiters, self._waiters = self._waiters, set()
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def wait_for(self, check: Callable[[], T | None], clock: Clock, timeout_s: float = math.inf) -> T | None:
        """Return the first result of `check` that isn't None, asked now and each time this fires.

        None when `timeout_s` seconds of `clock` are over.
        """
        sleeper = asyncio.ensure_future(clock.sleep(timeout_s))
        try:
            while (result := check()) is None and not sleeper.done():
                # Made before anything else can run, so that nothing fires unheard.
                waiter = asyncio.get_running_loop().create_future()
                self._waiters.add(waiter)
                try:
                    await asyncio.wait({sleeper, waiter}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    self._waiters.discard(waiter)
            return result
        finally:
            sleeper.cancel()


def unavailable(address: str, timeout_s: float, what: str, last: BaseException | None) -> RegistryUnavailable:
    """The error of a wait that ran out; it names the address once, also where `last` doesn't."""
    message = f"{what} within {timeout_s:g} s"
    if last is None or address not in str(last):
        message += f"; the registry is {address}"
    if last is not None:
        message += f": {last}"
    return RegistryUnavailable(message, endpoints=(address,))
