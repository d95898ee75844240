"""Watch agents find and call each other while one is killed, others are replaced and etcd is stopped.

Run it with `python -m examples.customer_service.demo`. It exits with 0 only if no call was lost.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import signal
import sys
from collections.abc import Awaitable
from pathlib import Path

from agent_reach import ReachClient
from agent_reach.events import BreakerChanged, Event, RegistryChanged
from examples.customer_service.processes import NAMESPACE, DemoFailed, Etcd, Fleet
from examples.customer_service.tally import COLUMNS, Facts, Tally, problems
from examples.customer_service.timeline import TimeLine
from examples.customer_service.traffic import Traffic
from examples.customer_service.view import View, plain_table, watching

_REFRESH_S = 0.25


class Teller:
    """An observer: tells of what the caller's own client notices."""

    def __init__(self, view: View) -> None:
        self._view = view

    def on_event(self, event: Event) -> None:
        match event:
            case BreakerChanged(agent_id=agent_id, before=before, after=after, reason=reason):
                self._view.say(f"  caller: breaker of {agent_id} {before} -> {after} ({reason})")
            case RegistryChanged(status=status):
                self._view.say(f"  caller: registry {status}")
            case _:
                pass


async def demo(etcd: Etcd, options: argparse.Namespace) -> tuple[Tally, Facts]:
    """Run it all and return what became of the calls. Leaves stopping etcd to the caller."""
    _cancel_on_signals()
    tally = Tally()
    with watching(tally) as view:
        view.say("start etcd and ten agents: two of each kind, each in its own process")
        await etcd.open()
        _log_to(etcd.folder / "caller.log")
        with contextlib.closing(Fleet(etcd.folder, etcd.url)) as fleet:
            async with ReachClient(
                "caller", registry=etcd.url, namespace=NAMESPACE, observers=[Teller(view)]
            ) as reach:
                traffic = Traffic(reach, tally, options.rate)
                line = TimeLine(reach, fleet, etcd, traffic, tally, view.say, options.pause, options.outage)
                await _while_refreshing(view, _act(line, traffic))
                return tally, line.facts


async def _act(line: TimeLine, traffic: Traffic) -> None:
    await line.open()
    line.say("calls begin")
    enough = asyncio.Event()
    calling = asyncio.ensure_future(traffic.run(enough))
    try:
        await line.play()
    except BaseException:
        calling.cancel()
        raise
    enough.set()
    line.say("no new calls; wait for the last answers")
    await calling


async def _while_refreshing(view: View, work: Awaitable[None]) -> None:
    async def refresh() -> None:
        while True:
            view.refresh()
            await asyncio.sleep(_REFRESH_S)

    refreshing = asyncio.ensure_future(refresh())
    try:
        await work
        view.refresh()
    finally:
        refreshing.cancel()


def _cancel_on_signals() -> None:
    """Let Ctrl-C end the demo by cancelling it, which cleans up; every further one hurries the cleaning."""
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)


def report(tally: Tally, facts: Facts) -> int:
    """Print the table and the verdict; return the exit status."""
    print(f"\n{plain_table([COLUMNS, *tally.rows()])}\n")
    answered, unknown = len(tally.of(outcome="ok")), len(tally.of(outcome="unknown"))
    if facts.outage is not None:
        away_s, calls = facts.outage.until - facts.outage.since, len(tally.within(facts.outage))
        print(f"etcd was away for {away_s:.0f} s; {calls} calls were made meanwhile")
    if facts.killed is not None:
        print(f"calls in flight on {facts.killed.agent_id} when it was killed, their outcome unknown: {unknown}")
    found = problems(tally, facts)
    if not found:
        print(
            f"nothing was lost: of {tally.started} calls {answered} were answered, and the caller knows the others"
        )
        return 0
    print(f"NOT as it should be, {len(found)} problems:")
    for problem in found[:10]:
        print(f"  - {problem}")
    return 1


def _log_to(path: Path) -> None:
    """Send the caller's own log to a file: on the terminal it would tear the table apart."""
    logging.basicConfig(filename=path, level=logging.WARNING)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.customer_service.demo", description=__doc__)
    parser.add_argument("--rate", type=float, default=40.0, help="calls a second (default: 40)")
    parser.add_argument("--pause", type=float, default=3.0, help="quiet seconds between events (default: 3)")
    parser.add_argument("--outage", type=float, default=20.0, help="seconds without etcd (default: 20)")
    options = parser.parse_args()
    if options.rate <= 0 or options.pause < 0 or options.outage <= 0:
        parser.error("--rate and --outage must be more than 0, --pause 0 or more")
    etcd = Etcd()
    try:
        tally, facts = asyncio.run(demo(etcd, options))
        return report(tally, facts)
    except (KeyboardInterrupt, asyncio.CancelledError):
        print("\nstopped")
        return 130
    except DemoFailed as error:
        print(f"\nthe demo can't go on: {error}", file=sys.stderr)
        return 2
    finally:
        # A further Ctrl-C must not cut this short; it takes a second or two.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        etcd.close()


if __name__ == "__main__":
    sys.exit(main())
