"""`SyncReachClient`: the same client for plain threads, scripts and notebooks."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import logging
import os
import threading
from collections.abc import Callable, Coroutine, Mapping
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack, overload

from pydantic import BaseModel

from agent_reach.client import ReachClient
from agent_reach.config import RetryConfig, Strategy
from agent_reach.errors import ClientNotOpen, ReachError
from agent_reach.model import AgentInfo
from agent_reach.options import CallKeywords
from agent_reach.reply import ClientState, Outcome, Reply
from agent_reach.routing.decisions import Decision
from agent_reach.routing.explain import Explanation, Route

__all__ = ["SyncReachClient"]

_log = logging.getLogger("agent_reach.calls")

# For tasks to end once they are cancelled; a handler that ignores that must not keep its client from closing.
_CLEANUP_S = 1.0

T = TypeVar("T")
R = TypeVar("R")


class SyncReachClient:
    """`ReachClient` without `await`: takes the same arguments and runs it on an event loop in its own thread.

    Use it as `with SyncReachClient(...) as reach`. Any number of threads may call at once. Handlers are served
    while it is open, on `listen` or (memory registry) in this process; for a program that does nothing else there
    is `ReachClient(...).run()`, sync handlers and all.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._client = ReachClient(*args, **kwargs)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pid = os.getpid()
        self._thread: threading.Thread | None = None
        self._handing_over = threading.Lock()

    def __repr__(self) -> str:
        return f"<Sync{repr(self._client)[1:]}"

    @property
    def agent_id(self) -> str:
        """This instance's id."""
        return self._client.agent_id

    @property
    def namespace(self) -> str:
        """The namespace that this client announces to and calls in."""
        return self._client.namespace

    def __enter__(self) -> Self:
        if self._loop is not None:
            self._require_own_process()
            raise ClientNotOpen(f"{self.agent_id} is open already: enter a client once, or make a second one")
        self._pid = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=_run_loop, args=(self._loop,), name=f"agent-reach-{self.agent_id}", daemon=True
        )
        self._thread.start()
        try:
            self._wait(self._client.__aenter__)
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Withdraw, stop watching, close connections, end the thread. Safe to call twice."""
        if self._loop is None:
            return
        if self._pid != os.getpid():
            # The thread stayed with the parent, and so does everything that could be closed.
            return
        try:
            self._wait(self._client.aclose)
        except ClientNotOpen:
            return  # another thread was faster
        finally:
            self._stop()

    @overload
    def call(
        self,
        capability: str | Route,
        payload: Mapping[str, Any] | BaseModel | None = None,
        *,
        response_model: type[T],
        **keywords: Unpack[CallKeywords],
    ) -> Reply[T]: ...

    @overload
    def call(
        self,
        capability: str | Route,
        payload: Mapping[str, Any] | BaseModel | None = None,
        *,
        response_model: Any = None,
        **keywords: Unpack[CallKeywords],
    ) -> Reply[Any]: ...

    def call(
        self,
        capability: str | Route,
        payload: Mapping[str, Any] | BaseModel | None = None,
        *,
        response_model: Any = None,
        **keywords: Unpack[CallKeywords],
    ) -> Reply[Any]:
        """Send one request and wait for its answer; see `ReachClient.call`."""
        return self._wait(lambda: self._client.call(capability, payload, response_model=response_model, **keywords))

    def fan_out(
        self,
        capability: str,
        payload: Mapping[str, Any] | BaseModel | None = None,
        n: int = 3,
        *,
        timeout: float | None = None,
        strategy: Strategy | None = None,
        retry: RetryConfig | None = None,
        response_model: Any = None,
        metadata: Mapping[str, str] | None = None,
    ) -> list[Outcome[Any]]:
        """Ask `n` different instances at once; see `ReachClient.fan_out`."""
        return self._wait(
            lambda: self._client.fan_out(
                capability,
                payload,
                n,
                timeout=timeout,
                strategy=strategy,
                retry=retry,
                response_model=response_model,
                metadata=metadata,
            )
        )

    def resolve(self, capability: str, *, context_id: str | None = None) -> Route:
        """Return the ranked candidates; see `ReachClient.resolve`."""
        return self._wait(lambda: self._client.resolve(capability, context_id=context_id))

    def decisions(self, capability: str | None = None) -> tuple[Decision, ...]:
        """Return the latest decisions; see `ReachClient.decisions`."""
        return self._ask(lambda: self._client.decisions(capability))

    def explain(self, capability: str) -> Explanation:
        """Return what a call would see now; see `ReachClient.explain`."""
        return self._ask(lambda: self._client.explain(capability))

    def agents(self, capability: str | None = None) -> tuple[AgentInfo, ...]:
        """Return the instances known now; see `ReachClient.agents`."""
        return self._ask(lambda: self._client.agents(capability))

    def wait_for(self, capability: str, timeout: float = 30.0) -> tuple[AgentInfo, ...]:
        """Return the instances of `capability` as soon as there is one; see `ReachClient.wait_for`."""
        return self._wait(lambda: self._client.wait_for(capability, timeout))

    def update(
        self, *, metadata: Mapping[str, str] | None = None, weight: float | None = None, timeout: float = 5.0
    ) -> None:
        """Change what this agent says of itself in the registry; see `ReachClient.update`."""
        return self._wait(lambda: self._client.update(metadata=metadata, weight=weight, timeout=timeout))

    @property
    def state(self) -> ClientState:
        """How this client stands; see `ReachClient.state`."""
        return self._ask(lambda: self._client.state)

    def _ask(self, question: Callable[[], R]) -> R:
        """Ask on the client's own loop, where nothing changes meanwhile."""

        async def answer() -> R:
            return question()

        return self._wait(answer)

    def _wait(self, start: Callable[[], Coroutine[Any, Any, R]]) -> R:
        """Run a coroutine on the client's loop with this thread's context, so that nested calls carry theirs on.

        Interrupting the wait (Ctrl-C) cancels it.
        """
        loop = self._loop
        if loop is None:
            raise ClientNotOpen(
                f"SyncReachClient {self.agent_id} isn't open: use it inside `with SyncReachClient(...) as reach:`"
            )
        self._require_own_process()
        if threading.current_thread() is self._thread:
            raise ReachError("SyncReachClient would wait for itself: use ReachClient and await in async code")
        context = contextvars.copy_context()

        async def run_in_context() -> R:
            return await asyncio.get_running_loop().create_task(start(), context=context)

        # Under the lock: what is handed to a loop that has been told to stop is never finished.
        with self._handing_over:
            if self._loop is not loop:
                raise self._closed_meanwhile()
            future = asyncio.run_coroutine_threadsafe(run_in_context(), loop)
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise self._closed_meanwhile() from None
        except BaseException:
            future.cancel()
            raise

    def _require_own_process(self) -> None:
        if self._pid != os.getpid():
            raise ClientNotOpen(
                f"SyncReachClient {self.agent_id} was opened before a fork, and its thread stayed with the parent: "
                "open one in each process"
            )

    def _closed_meanwhile(self) -> ClientNotOpen:
        return ClientNotOpen(f"SyncReachClient {self.agent_id} was closed while it was being used")

    def _stop(self) -> None:
        with self._handing_over:
            loop, self._loop = self._loop, None
            if loop is not None:
                loop.call_soon_threadsafe(loop.stop)
        if loop is not None and self._thread is not None:
            self._thread.join(_CLEANUP_S + 1.0)


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
        pending = asyncio.all_tasks(loop)
        for task in pending:
            task.cancel()
        if pending:
            _, stubborn = loop.run_until_complete(asyncio.wait(pending, timeout=_CLEANUP_S))
            for task in stubborn:
                _log.error("left behind, for it ignores its cancellation: %s", task.get_name())
                # Said once; asyncio would say it again when the task is collected.
                task._log_destroy_pending = False  # type: ignore[attr-defined]
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        asyncio.set_event_loop(None)
        loop.close()
