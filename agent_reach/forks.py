"""What a fork does to a process that holds clients: the child has copies of everything, and may use none of it."""

from __future__ import annotations

import asyncio
import logging
import os
import selectors
import sys
import threading
from collections.abc import Callable
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from agent_reach.errors import ConfigError

__all__ = ["leave_loop", "note_use", "on_fork"]

_log = logging.getLogger(__name__)

T = TypeVar("T")

# What gRPC takes for "no" in its environment variables.
_NO = ("0", "f", "false", "n", "no")

# glibc's default for a thread where the limit is infinite is less, and where there is a limit it is the limit.
_USUAL_STACK_BYTES = 8 * 1024 * 1024
_LARGER_BYTES = 256 * 1024


def on_fork(thing: T, tell: Callable[[T], None]) -> None:
    """Have `tell(thing)` called after each fork, in the child, for as long as `thing` lives.

    Before any other code of the child, on its only thread: locks may be held there by threads that are gone.
    """
    _told[thing] = tell


def leave_loop(loop: asyncio.AbstractEventLoop | None) -> None:
    """In a child: part the copy of an event loop from the parent's.

    Both have one epoll object, and one socket by which other threads wake the loop. Were the child to close its
    loop, as it does when `sys.exit` passes through `asyncio.run`, the parent's would never be woken again
    (https://github.com/python/cpython/issues/66197).
    """
    if isinstance(loop, asyncio.SelectorEventLoop) and not loop.is_closed() and hasattr(loop, "_selector"):
        loop._selector = selectors.DefaultSelector()
        loop._close_self_pipe()  # type: ignore[attr-defined]
        loop._make_self_pipe()  # type: ignore[attr-defined]


def note_use(address: str) -> None:
    """Note that the registry at `address` is used in this process.

    Raises ConfigError where every request would hang, because of a fork.
    """
    if not address.startswith(("etcd://", "etcds://")):
        return
    if _Grpc.used_before_fork and os.environ.get("GRPC_ENABLE_FORK_SUPPORT", "").lower() in _NO:
        raise ConfigError(
            f"the registry {address} can't be used here: this process was forked from one that had used etcd, and "
            "GRPC_ENABLE_FORK_SUPPORT turns gRPC's support for that off, so every request would hang. Take that "
            "variable out of the environment, or start this process by spawn, or open clients after the fork only"
        )
    _Grpc.used = True


# Of the process, as a fork is. Nothing is kept alive by it.
_told: WeakKeyDictionary[Any, Callable[[Any], None]] = WeakKeyDictionary()


class _Grpc:
    """What this process, and those that it was forked from, did with gRPC, whose state is the process's too."""

    used = False
    used_before_fork = False


def _in_child() -> None:
    if _Grpc.used:
        _Grpc.used_before_fork = True
        _avoid_old_stacks()
    for thing, tell in list(_told.items()):
        try:
            tell(thing)
        except Exception:  # noqa: BLE001 - a fork can't fail, and the others must be told all the same
            _log.exception("%r wasn't readied for a forked child", thing)


def _avoid_old_stacks() -> None:
    """Let new threads have stacks where none of the parent's had its own.

    gRPC keeps the address of the thread that polls, and this address is on that thread's stack. In the child that
    thread is gone, but is still noted. glibc gives its stack to the next new thread of the same stack size; if
    that one polls too, gRPC finds that it is noted already, and aborts the process ("Check failed:
    g_active_poller != worker": 6 of 80 children of a busy parent, none of 180 with larger stacks). A stack is
    address space, not memory, until it is used.
    """
    sizes = [threading.stack_size(), _USUAL_STACK_BYTES]
    if sys.platform != "win32":
        import resource

        soft, _ = resource.getrlimit(resource.RLIMIT_STACK)
        if 0 < soft != resource.RLIM_INFINITY:
            sizes.append(soft)
    threading.stack_size(max(sizes) // 4096 * 4096 + _LARGER_BYTES)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
