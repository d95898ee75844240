"""`make bench`: what the library's own parts cost, as ratios within one run.

The machine may be shared, so absolute times are printed for orientation only. Each figure is the median of several
rounds that alternate between the contenders.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

import httpx

from agent_reach import MemoryRegistry, ReachClient, ReachConfig, register_agent
from agent_reach.dialing.local import LocalDialer
from agent_reach.routing.decisions import DecisionLog
from agent_reach.routing.index import Index, Upsert
from agent_reach.routing.instance import Candidate
from agent_reach.routing.scoring import ExpectedTimeScorer
from agent_reach.routing.selection import pick
from agent_reach.routing.steps import Send
from tests.routing.world import CAPABILITY, World, agent, ok

ROUNDS = 7


def cpu_us(work: Callable[[], None], times: int) -> float:
    """CPU time of one `work`, in microseconds."""
    began = time.process_time()
    for _ in range(times):
        work()
    return (time.process_time() - began) / times * 1e6


def alternating(works: dict[str, Callable[[], float]]) -> dict[str, float]:
    """Median of each contender over rounds that take turns."""
    results: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(ROUNDS):
        for name, work in works.items():
            results[name].append(work())
    return {name: statistics.median(values) for name, values in results.items()}


def import_s(statement: str) -> float:
    """Wall time of a fresh interpreter that runs `statement`, less that of one that runs nothing."""

    def run(code: str) -> float:
        began = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
        return time.perf_counter() - began

    return run(statement) - run("pass")


def bench_import() -> None:
    figures = alternating(
        {
            "import agent_reach": lambda: import_s("import agent_reach"),
            "from agent_reach import ReachClient": lambda: import_s("from agent_reach import ReachClient"),
            "theirs": lambda: import_s("import pydantic, httpx"),
        }
    )
    theirs = figures.pop("theirs")
    for statement, seconds in figures.items():
        print(f"{statement:<38}{seconds * 1e3:8.1f} ms   {seconds / theirs:.2f} x import pydantic, httpx")


def bench_pick() -> None:
    rng, config = random.Random(1), ReachConfig().scoring
    scorer = ExpectedTimeScorer(config)
    works: dict[str, Callable[[], float]] = {}
    for count in (10, 1_000, 10_000):
        index = Index()
        for number in range(count):
            index.apply(Upsert(agent(f"a{number}"), number + 1), 0.0)
        candidates = index.lookup(CAPABILITY).candidates

        def one(candidates: Sequence[Candidate] = candidates) -> None:
            pick(candidates, lambda c: c.instance.breaker.available(1.0), scorer, 1.0, rng, config.choices)

        works[str(count)] = lambda one=one: cpu_us(one, 2_000)
    figures = alternating(works)
    for count, us in figures.items():
        print(f"pick among {count:>6} instances           {us:8.2f} us   {us / figures['10']:.2f} x among 10")


class Silent(DecisionLog):
    """Notes nothing."""

    def note(self, *_args: object) -> None:
        """Do nothing."""


def bench_decisions() -> None:
    """A whole call's decisions without network, and what noting them adds: the log is always on."""

    def calls(count: int, *, noted: bool) -> Callable[[], float]:
        world, now = World(*(agent(f"a{number}") for number in range(count))), 100.0
        if not noted:
            world.router.decisions = Silent(lambda: None, world.config.scoring)

        def call() -> None:
            nonlocal now
            now += 0.001
            session = world.session(now=now, deadline=now + 30)
            step = session.next(now)
            assert isinstance(step, Send)
            session.record(ok(step.candidate.agent_id), now + 0.0005)
            session.next(now + 0.0005)

        return lambda: cpu_us(call, 1_000)

    figures = alternating(
        {f"{count} {noted}": calls(count, noted=noted) for count in (3, 10) for noted in (True, False)}
    )
    for count in (3, 10):
        on, off = figures[f"{count} True"], figures[f"{count} False"]
        print(
            f"decisions of a call, {count:>2} instances     {on:8.2f} us   {on / off:.2f} x without the log of them"
        )


def bench_index(count: int = 100_000) -> None:
    index = Index()
    for number in range(count):
        index.apply(Upsert(agent(f"a{number}", [f"d{number % 10_000}.x.v1"]), number + 1), 0.0)
    revision = count + 1

    def change() -> None:
        nonlocal revision
        revision += 1
        index.apply(Upsert(agent("a7", ["d7.x.v1"], weight=revision), revision), 0.0)

    figures = alternating(
        {
            "lookup": lambda: cpu_us(lambda: index.lookup("d7.x.v1"), 20_000),
            "change": lambda: cpu_us(change, 500),
            "record": lambda: cpu_us(lambda: agent("a7", ["d7.x.v1"], weight=2.0), 500),
        }
    )
    print(f"index of {count:,}: lookup              {figures['lookup']:8.2f} us")
    change_us = figures["change"] - figures["record"]
    print(f"index of {count:,}: one change          {change_us:8.2f} us   without building the record")


@register_agent(CAPABILITY, idempotent=True)
async def echo(text: str) -> str:
    """Give it back."""
    return text


async def bench_call(rounds: int = 300) -> None:
    """A call with the network taken out, against a plain httpx call into the same ASGI app."""
    registry, payload = MemoryRegistry(), {"text": "x" * 2000}
    async with ReachClient("kb-1", handlers=[echo], registry=registry) as reach:
        app = next(iter(registry.apps.values()))
        transport = httpx.ASGITransport(app=app)  # type: ignore[arg-type]
        captured: list[bytes] = []
        original = LocalDialer.send

        async def capture(self: LocalDialer, request: object) -> object:
            captured.append(request.body)  # type: ignore[attr-defined]
            return await original(self, request)  # type: ignore[arg-type]

        LocalDialer.send = capture  # type: ignore[method-assign,assignment]
        await reach.call(CAPABILITY, payload)
        LocalDialer.send = original  # type: ignore[method-assign]
        async with httpx.AsyncClient(transport=transport, base_url="http://kb") as client:
            headers = {"content-type": "application/json"}

            async def ours() -> float:
                began = time.process_time()
                for _ in range(rounds):
                    await reach.call(CAPABILITY, payload)
                return (time.process_time() - began) / rounds * 1e6

            async def plain() -> float:
                began = time.process_time()
                for _ in range(rounds):
                    (await client.post("/invoke", content=captured[0], headers=headers)).raise_for_status()
                return (time.process_time() - began) / rounds * 1e6

            figures: dict[str, list[float]] = {"ours": [], "plain": []}
            for _ in range(ROUNDS):
                figures["ours"].append(await ours())
                figures["plain"].append(await plain())
    ours_us, plain_us = (statistics.median(figures[name]) for name in ("ours", "plain"))
    ratio = ours_us / plain_us
    print(f"reach.call in process, 2 KB           {ours_us:8.1f} us   {ratio:.2f} x plain httpx into the same app")


def main() -> None:
    """Run everything."""
    bench_import()
    bench_pick()
    bench_decisions()
    bench_index()
    asyncio.run(bench_call())


if __name__ == "__main__":
    main()
