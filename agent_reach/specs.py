"""One capability and the code behind it: binding, running, encoding."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from agent_reach.context import CallContext
from agent_reach.model import CapabilityInfo
from agent_reach.signatures import Signature, label

__all__ = ["HandlerSpec"]

# Threads of one sync handler without `max_concurrency`. They mostly wait for something else, and each holds some
# 100 KB: Python's own pool has 32 at most, a web server's 40, and a caller sends one instance 100 calls at most.
_SYNC_AT_ONCE = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class HandlerSpec:
    """One capability and the code behind it.

    `queue` is the number of waiting places (None: the serving default). `agent_name`, `agent_version`, `weight`
    and `metadata` belong to the agent as a whole and are the same in every spec that `specs_of` returns.
    """

    info: CapabilityInfo
    input_schema: Mapping[str, Any]
    output_schema: Mapping[str, Any]
    queue: int | None = None
    agent_name: str | None = None
    agent_version: str = "1.0.0"
    weight: float = 1.0
    metadata: Mapping[str, str] = field(default_factory=dict)
    function: Callable[..., Any] = field(repr=False)
    signature: Signature = field(repr=False)

    @property
    def max_running(self) -> int | None:
        """How many calls may run at a time; None: any number.

        `max_concurrency` says so; without it a sync handler, which takes a thread for each, has 64.
        """
        if self.info.max_concurrency is not None or inspect.iscoroutinefunction(self.function):
            return self.info.max_concurrency
        return _SYNC_AT_ONCE

    def bind(self, payload: Mapping[str, Any], context: CallContext) -> dict[str, Any]:
        """Turn a payload into keyword arguments.

        Raises InvalidPayload whose `problems` and message name each field at fault; an unknown key is one,
        unless the handler has `**kwargs`.
        """
        return self.signature.bind(payload, context)

    async def invoke(self, arguments: Mapping[str, Any]) -> Any:
        """Run the handler and return its result; what it raises comes through.

        A sync handler runs in a thread of its own with the caller's context variables. Such a thread can't be
        stopped: the first cancellation lets it finish, so that its place counts as taken, the second leaves it.
        """
        if inspect.iscoroutinefunction(self.function):
            return await self.function(**arguments)
        result = await _in_thread(self.function, arguments)
        return await result if inspect.isawaitable(result) else result

    def encode(self, result: Any) -> bytes:
        """Turn a result into JSON by the return annotation. Raises InvalidReply naming the field at fault."""
        return self.signature.encode(result)


async def _in_thread(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """Run `function` in a thread of its own.

    Not in the loop's executor: that has a handful of threads for the whole process, so it would be a second,
    hidden concurrency limit, and the interpreter waits at exit for a thread of it that hangs.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[tuple[bool, Any]] = loop.create_future()
    context = contextvars.copy_context()

    def finish(ended: tuple[bool, Any]) -> None:
        if not done.done():
            done.set_result(ended)

    def work() -> None:
        try:
            ended = True, context.run(function, **arguments)
        except BaseException as error:  # noqa: BLE001 - raised again in the task that waits for it
            ended = False, error
        try:
            loop.call_soon_threadsafe(finish, ended)
        except RuntimeError:
            return  # the loop was closed meanwhile: nobody waits any more

    threading.Thread(target=work, name=f"reach-{label(function)}", daemon=True).start()
    try:
        ok, value = await asyncio.shield(done)
    except asyncio.CancelledError:
        ok, value = await asyncio.shield(done)
    if ok:
        return value
    raise value
