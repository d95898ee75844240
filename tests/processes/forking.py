"""Programs that fork, for tests: `python -m tests.processes.forking SCENARIO --registry URL --namespace N --out F`.

Each writes what it found as one JSON line per process into the file, and prints `ready` when it waits for a line of
input.
"""

from __future__ import annotations

import argparse
import asyncio
import faulthandler
import gc
import json
import multiprocessing
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agent_reach import (
    ReachClient,
    ReachConfig,
    ReachError,
    RegistryConfig,
    ServingConfig,
    SyncReachClient,
    register_agent,
)


def config(lease_ttl_s: float) -> ReachConfig:
    """Lists so seldom that only the watch can bring news in time."""
    return ReachConfig(
        registry=RegistryConfig(lease_ttl_s=lease_ttl_s, refresh_s=120.0),
        serving=ServingConfig(linger_s=0.0, drain_s=5.0),
    )


# A lease that no load on the machine ends; one that is revoked goes at once, whatever its length.
CONFIG = config(10.0)
# Where the end of a lease is waited for.
SHORT = config(2.0)
# Who holds connections to etcd, from the registry down to gRPC.
HOLDERS = ("EtcdRegistry", "EtcdWatch", "MultiEndpointEtcd3Client", "Endpoint")
# A child that hangs must not outlive its test.
CHILD_S = 40


@register_agent("echo.say.v1", idempotent=True)
async def say(text: str) -> dict[str, object]:
    """Give the text back, with the pid."""
    return {"text": text, "pid": os.getpid()}


class Program:
    """One run: where the registry is, and where reports go."""

    def __init__(self, registry: str, namespace: str, out: Path) -> None:
        self.registry, self.namespace, self.out = registry, namespace, out
        self.events: list[str] = []

    def on_event(self, event: Any) -> None:
        """Keep what happened to the parent's watch and entry."""
        self.events.append(f"{type(event).__name__} {getattr(event, 'status', '')}".strip())

    def arguments(
        self, agent_id: str | None = None, *, serves: bool = True, config: ReachConfig = CONFIG
    ) -> dict[str, Any]:
        return {
            "agent_id": agent_id,
            "handlers": [say] if serves else [],
            "listen": "127.0.0.1:0" if serves else None,
            "registry": self.registry,
            "namespace": self.namespace,
            "config": config,
        }

    def report(self, **found: object) -> None:
        with self.out.open("a") as file:
            file.write(json.dumps({"pid": os.getpid(), **found}) + "\n")

    async def at_a_sign(self) -> None:
        """Return when the test says so."""
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.readline)


def limit() -> None:
    """End this child if it hangs, and say where it did."""
    faulthandler.dump_traceback_later(CHILD_S - 1)
    signal.alarm(CHILD_S)


def fork(child: Callable[[], None]) -> int:
    """Fork; the child runs `child` and leaves by `os._exit`, unless it leaves by itself."""
    pid = os.fork()
    if pid:
        return pid
    limit()
    code = 1
    try:
        child()
        code = 0
    except SystemExit:
        raise
    except BaseException as error:
        print(f"child: {error!r}", file=sys.stderr, flush=True)
    os._exit(code)


async def end_of(pids: list[int]) -> list[int]:
    """Wait for children, and return their exit codes."""
    return [os.waitstatus_to_exitcode((await asyncio.to_thread(os.waitpid, pid, 0))[1]) for pid in pids]


def outcome(action: Callable[[], object]) -> str:
    """The name of what `action` raised, or `ok`."""
    try:
        action()
    except ReachError as error:
        return type(error).__name__
    return "ok"


def uses(reach: ReachClient) -> dict[str, Callable[[], object]]:
    """Every method that needs an open client."""
    return {
        "call": lambda: asyncio.run(reach.call("echo.say.v1", {"text": "x"})),
        "resolve": lambda: asyncio.run(reach.resolve("echo.say.v1")),
        "wait_for": lambda: asyncio.run(reach.wait_for("echo.say.v1")),
        "serve_forever": lambda: asyncio.run(reach.serve_forever()),
        "enter": lambda: asyncio.run(reach.__aenter__()),
        "explain": lambda: reach.explain("echo.say.v1"),
        "agents": lambda: reach.agents(),
        "state": lambda: reach.state,
        # Once more after closing, which does nothing in a child.
        "close": lambda: asyncio.run(reach.aclose()),
        "call after close": lambda: asyncio.run(reach.call("echo.say.v1", {"text": "x"})),
        "enter after close": lambda: asyncio.run(reach.__aenter__()),
    }


async def own_client(program: Program) -> dict[str, object]:
    """Register, call the parent and oneself, leave."""
    async with ReachClient(**program.arguments()) as reach:
        deadline = time.monotonic() + 30
        while not (reach.state.registered and any(info.agent_id == reach.agent_id for info in reach.agents())):
            assert time.monotonic() < deadline, reach.state
            await asyncio.sleep(0.02)
        own = await reach.call("echo.say.v1", {"text": "own"}, agent_id=reach.agent_id)
        parents = await reach.call("echo.say.v1", {"text": "parent"}, agent_id="parent")
        return {"agent_id": reach.agent_id, "own": own.data["pid"], "parent": parents.data["pid"]}


async def with_load(program: Program, what: Callable[[ReachClient], Any]) -> None:
    """Run `what` beside calls of the parent to itself, then wait for a sign and tell how the parent stands."""
    async with ReachClient(**program.arguments("parent"), observers=[program]) as reach:
        await reach.wait_for("echo.say.v1")
        # The entry as the first child will find it.
        await program.at_a_sign()
        failed: list[str] = []

        async def load() -> None:
            while True:
                try:
                    await reach.call("echo.say.v1", {"text": "x"}, agent_id="parent")
                except ReachError as error:
                    failed.append(repr(error))
                await asyncio.sleep(0.002)

        calls = [asyncio.ensure_future(load()) for _ in range(2)]
        codes = await what(reach)
        await program.at_a_sign()
        deadline = time.monotonic() + 20
        while not any(info.agent_id == "newcomer" for info in reach.agents()) and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        program.report(
            role="parent",
            codes=codes,
            failed=failed,
            events=[event for event in program.events if event.startswith("Reg")],
            sees_newcomer=any(info.agent_id == "newcomer" for info in reach.agents()),
            registered=reach.state.registered,
        )
        await program.at_a_sign()


async def leave(program: Program, way: str) -> None:
    """Children that were given the parent's open client leave in one way."""

    async def forks(reach: ReachClient) -> list[int]:
        pids = []
        for _ in range(3):
            pids.append(fork(lambda: go(reach)))
            await asyncio.sleep(0.05)
        return await end_of(pids)

    def go(reach: ReachClient) -> None:
        if way == "_exit":
            os._exit(0)
        if way == "sys.exit":
            # Through `async with`, asyncio.run and the exit handlers.
            sys.exit(0)
        # All that holds connections of the parent loses what it holds, and is collected.
        del reach
        for thing in gc.get_objects():
            if type(thing).__name__ in HOLDERS:
                vars(thing).clear()
        del thing
        gc.collect()

    await with_load(program, forks)


async def methods(program: Program) -> None:
    """Every method of the parent's open client, in children that were forked under load."""

    def child(reach: ReachClient) -> None:
        found = {}
        for name, use in uses(reach).items():
            started = time.monotonic()
            found[name] = [outcome(use), time.monotonic() - started]
        program.report(role="child", found=found)

    async def forks(reach: ReachClient) -> list[int]:
        pids = []
        for _ in range(8):
            pids.append(fork(lambda: child(reach)))
            await asyncio.sleep(0.02)
        return await end_of(pids)

    await with_load(program, forks)


async def own(program: Program) -> None:
    """Children with clients of their own."""

    def child() -> None:
        program.report(role="child", **asyncio.run(own_client(program)))

    async def forks(reach: ReachClient) -> list[int]:
        codes = []
        for _ in range(3):
            pids = [fork(child), fork(child)]
            codes += await end_of(pids)
        return codes

    await with_load(program, forks)


async def unsupported(program: Program) -> None:
    """What a child is told where gRPC can't be used after a fork."""

    def child() -> None:
        started = time.monotonic()
        try:
            asyncio.run(own_client(program))
        except ReachError as error:
            took_s = time.monotonic() - started
            program.report(role="child", error=type(error).__name__, text=str(error), took_s=took_s)

    async def forks(reach: ReachClient) -> list[int]:
        return await end_of([fork(child)])

    await with_load(program, forks)


def in_worker(program: Program) -> None:
    """The target of a multiprocessing child."""
    limit()
    program.report(role="child", **asyncio.run(own_client(program)))


async def multi(program: Program, method: str) -> None:
    """Children of `multiprocessing`."""

    async def forks(reach: ReachClient) -> list[int]:
        context = multiprocessing.get_context(method)
        plain = Program(program.registry, program.namespace, program.out)
        workers = [context.Process(target=in_worker, args=(plain,)) for _ in range(2)]
        for worker in workers:
            worker.start()
        for worker in workers:
            await asyncio.to_thread(worker.join)
        return [worker.exitcode for worker in workers]

    await with_load(program, forks)


async def outlive(program: Program) -> None:
    """A child that lives on when its parent is killed."""

    def child() -> None:
        program.report(role="child")
        signal.pause()

    async with ReachClient(**program.arguments("parent", config=SHORT)) as reach:
        (info,) = await reach.wait_for("echo.say.v1")
        fork(child)
        program.report(role="parent", url=info.endpoint.url)
        await program.at_a_sign()


def sync(program: Program) -> None:
    """A SyncReachClient that threads use while its process forks."""
    with SyncReachClient(**program.arguments("parent")) as reach:
        reach.wait_for("echo.say.v1")
        print("ready", flush=True)
        sys.stdin.readline()
        over = threading.Event()

        def load() -> None:
            while not over.is_set():
                reach.call("echo.say.v1", {"text": "x"}, agent_id="parent")

        threads = [threading.Thread(target=load) for _ in range(3)]
        for thread in threads:
            thread.start()

        def child() -> None:
            found = {}
            for name, use in {
                "call": lambda: reach.call("echo.say.v1", {"text": "x"}),
                "resolve": lambda: reach.resolve("echo.say.v1"),
                "explain": lambda: reach.explain("echo.say.v1"),
                "agents": lambda: reach.agents(),
                "wait_for": lambda: reach.wait_for("echo.say.v1"),
                "state": lambda: reach.state,
                "enter": lambda: reach.__enter__(),
                "close": lambda: reach.close(),
                "call after close": lambda: reach.call("echo.say.v1", {"text": "x"}),
                "enter after close": lambda: reach.__enter__(),
            }.items():
                started = time.monotonic()
                found[name] = [outcome(use), time.monotonic() - started]
            with SyncReachClient(**program.arguments(serves=False)) as mine:
                mine.wait_for("echo.say.v1")
                parent = mine.call("echo.say.v1", {"text": "x"}, agent_id="parent").data["pid"]
            program.report(role="child", found=found, parent=parent)

        codes = []
        for number in range(6):
            pid = fork(child if number else lambda: sys.exit(0))
            codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        over.set()
        for thread in threads:
            thread.join()
        program.report(role="parent", codes=codes, registered=reach.state.registered)
        print("ready", flush=True)
        sys.stdin.readline()


def prepared(program: Program, agent_id: str | None) -> None:
    """A client that is made before the fork and opened after it, in two children at once, as a pre-load does."""
    reach = ReachClient(**program.arguments(agent_id, config=SHORT))
    made = reach.agent_id

    async def serve() -> None:
        async with reach:
            deadline = time.monotonic() + 30
            while reach.state.registration not in ("registered", "refused") and time.monotonic() < deadline:
                await asyncio.sleep(0.02)
            program.report(
                role="child",
                agent_id=reach.agent_id,
                registration=reach.state.registration,
                error=type(reach.state.registry_error).__name__,
                random=reach._runtime.rng.random(),
            )
            await program.at_a_sign()

    reading, writing = os.pipe()

    def child() -> None:
        os.dup2(reading, 0)
        os.close(writing)
        asyncio.run(serve())

    pids = [fork(child), fork(child)]
    sys.stdin.readline()
    os.close(reading)
    os.close(writing)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    program.report(role="parent", codes=codes, made=made, agent_id=reach.agent_id, random=random.random())


SCENARIOS = {"methods": methods, "own": own, "outlive": outlive, "unsupported": unsupported}


def main() -> None:
    """Run one scenario."""
    parser = argparse.ArgumentParser()
    parser.add_argument("scenario")
    parser.add_argument("--registry", required=True)
    parser.add_argument("--namespace", required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    program = Program(options.registry, options.namespace, options.out)
    name, _, argument = options.scenario.partition(":")
    match name:
        case "leave":
            asyncio.run(leave(program, argument))
        case "multi":
            asyncio.run(multi(program, argument))
        case "prepared":
            prepared(program, argument or None)
        case "sync":
            sync(program)
        case _:
            asyncio.run(SCENARIOS[name](program))


if __name__ == "__main__":
    main()
