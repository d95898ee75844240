"""`SyncReachClient`: the same client for plain threads, scripts and notebooks."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import os
import threading
from collections.abc import Callable, Coroutine, Mapping
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack, overload

from pydantic import BaseModel

from agent_reach.client import CallKeywords, ReachClient
from agent_reach.errors import ClientNotOpen, ReachError
from agent_reach.model import AgentInfo
from agent_reach.reply import ClientState, Reply
from agent_reach.routing.explain import Explanation, Route

__all__ = ["SyncReachClient"]

T = TypeVar("T")
R = TypeVar("R")


class SyncReachClient:
    """`ReachClient` without `await`: takes the same arguments and runs it on an event loop in its own thread.

    Use it as `with SyncReachClient(...) as reach`. Any number of threads may call at once. It serves handlers to
    this process only, on a memory registry; an agent for others is `ReachClient(...).run()`, sync handlers and all.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._client = ReachClient(*args, **kwargs)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pid = os.getpid()
        self._thread: threading.Thread | None = None

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
            self._loop = self._thread = None
            return
        try:
            self._wait(self._client.aclose)
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

    def resolve(self, capability: str) -> Route:
        """Return the ranked candidates; see `ReachClient.resolve`."""
        return self._wait(lambda: self._client.resolve(capability))

    def explain(self, capability: str) -> Explanation:
        """Return what a call would see now; see `ReachClient.explain`."""
        return self._ask(lambda: self._client.explain(capability))

    def agents(self, capability: str | None = None) -> tuple[AgentInfo, ...]:
        """Return the instances known now; see `ReachClient.agents`."""
        return self._ask(lambda: self._client.agents(capability))

    def wait_for(self, capability: str, timeout: float = 30.0) -> tuple[AgentInfo, ...]:
        """Return the instances of `capability` as soon as there is one; see `ReachClient.wait_for`."""
        return self._wait(lambda: self._client.wait_for(capability, timeout))

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
        if threading.current_thread() is self._thread:
            raise ReachError("SyncReachClient would wait for itself: use ReachClient and await in async code")
        if self._pid != os.getpid():
            raise ClientNotOpen(
                f"SyncReachClient {self.agent_id} was opened before a fork, and its thread stayed with the parent: "
                "open one in each process"
            )
        context = contextvars.copy_context()

        async def run_in_context() -> R:
            return await asyncio.get_running_loop().create_task(start(), context=context)

        coroutine = run_in_context()
        try:
            future = asyncio.run_coroutine_threadsafe(coroutine, loop)
        except RuntimeError:
            coroutine.close()
            raise self._closed_meanwhile() from None
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise self._closed_meanwhile() from None
        except BaseException:
            future.cancel()
            raise

    def _closed_meanwhile(self) -> ClientNotOpen:
        return ClientNotOpen(f"SyncReachClient {self.agent_id} was closed while it was being used")

    def _stop(self) -> None:
        loop, self._loop = self._loop, None
        if loop is not None and self._thread is not None:
            loop.call_soon_threadsafe(loop.stop)
            self._thread.join()


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
        pending = asyncio.all_tasks(loop)
        for task in pending:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*pending, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        asyncio.set_event_loop(None)
        loop.close()
