"""`make sim-real`: does the simulator agree with reality? The same worlds, with real processes and simulated.

Exits with 1 if they differ by more than was promised, or if the machine was too busy to tell. It takes two to three
minutes; `--runs 2` lives each world twice, with other arrivals.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from agent_reach.testing.etcd import EtcdServer
from tests.simulation.compared import Called, Figures, Trouble, World, differences
from tests.simulation.real_world import Lived, live, measure_rtt_s
from tests.simulation.simulated_world import arrivals, simulate

__all__ = ["WORLDS"]

SIMULATED_SEEDS = (1, 2, 3)

# Half of what a call takes. Later than that, callers waited for a processor, which isn't what is compared: the run
# is done once more, or it is no proof. With so many seconds gone there is no time for another one.
_KEPT_UP_S = 0.1
_REPEAT_UNTIL_S = 120.0

WORLDS = (
    World(name="steady", title="nothing goes wrong"),
    World(
        name="slow",
        title="work-1 is killed at 8 s, work-2 takes ten times as long from 14 to 20 s",
        kill_s=8.0,
        trouble=Trouble(from_s=14.0, until_s=20.0, slower=10.0),
    ),
    World(
        name="failing",
        title="work-1 is killed at 8 s, work-2 fails from 14 to 20 s",
        kill_s=8.0,
        trouble=Trouble(from_s=14.0, until_s=20.0),
    ),
    World(
        name="unsafe",
        title="the same, and calls mustn't be repeated",
        unsafe=True,
        kill_s=8.0,
        trouble=Trouble(from_s=14.0, until_s=20.0),
    ),
)


def report(world: World, lived: Sequence[Lived], simulated: Sequence[list[Called]]) -> bool:
    """Print a world's figures, run by run and all together; return whether reality and simulator agree."""
    real = [run.calls for run in lived]
    columns = {f"real {n}": Figures.of(calls) for n, calls in enumerate(real, 1)}
    columns |= {f"simulated {n}": Figures.of(calls) for n, calls in enumerate(simulated, 1)}
    all_real = Figures.of([call for calls in real for call in calls])
    all_simulated = Figures.of([call for calls in simulated for call in calls])
    columns |= {"REAL": all_real, "SIMULATED": all_simulated}
    print(f"\n{world.name}: {world.title}; {world.load:.0%} of capacity")
    _row("", list(columns))
    shown = list(columns.values())
    _row("calls", [f"{f.calls}" for f in shown])
    _row("success", [f"{f.success:.2%}" for f in shown])
    _row("p50, ms", [f"{f.p50_s * 1000:.1f}" for f in shown])
    _row("p90, ms", [f"{f.p90_s * 1000:.1f}" for f in shown])
    _row("p99, ms", [f"{f.p99_s * 1000:.1f}" for f in shown])
    _row("attempts a call", [f"{f.attempts:.3f}" for f in shown])
    for agent_id in world.agent_ids():
        # As shares, since not all columns have as many calls.
        _row(f"sent to {agent_id}", [f"{f.share_of(agent_id):.1%}" for f in shown])
    for failure in sorted({name for f in shown for name in f.failures}):
        _row(failure, [f"{f.failures.get(failure, 0)}" for f in shown])
    for number, run in enumerate(lived, 1):
        print(f"real {number}: 99 % of the calls were begun within {run.late_s * 1000:.1f} ms of their time")
        if run.gone_s is not None and world.kill_s is not None:
            # A real lease counts from its last renewal, a simulated one from the death.
            simulated_s = world.kill_s + world.lease_ttl_s
            print(f"real {number}: work-1's entry was gone at {run.gone_s:.1f} s, simulated at {simulated_s:.1f} s")
    found = differences(all_real, all_simulated)
    kept_up = all(run.late_s <= _KEPT_UP_S for run in lived)
    if not kept_up:
        print("NO VERDICT: the machine was too busy with something else; run it again")
    elif found:
        print("DIFFERS, " + "; ".join(found))
    else:
        apart_ms = (all_real.success - all_simulated.success) * 100
        p50 = all_real.p50_s / all_simulated.p50_s - 1
        print(f"agrees: success {apart_ms:+.2f} points (1 allowed), p50 {p50:+.1%} (20 % allowed)")
    return kept_up and not found


def _row(name: str, cells: Sequence[str]) -> None:
    print(f"{name:<20}" + "".join(f"{cell:>13}" for cell in cells), flush=True)


async def compare(worlds: Sequence[World], runs: int) -> int:
    """Live and simulate worlds; return in how many both agree."""
    loop, agreeing = asyncio.get_running_loop(), 0
    began = loop.time()
    with tempfile.TemporaryDirectory() as name, EtcdServer(Path(name) / "etcd") as etcd:
        folder = Path(name)
        rtt_s = await measure_rtt_s(etcd, folder)
        print(
            f"calibrated: a real call that has nothing to do takes {rtt_s * 1000:.2f} ms in an idle world, most of "
            "it processor time;\nthe simulator's network takes as long, and everything else is as it is by default"
        )
        for world in worlds:
            lived = []
            for seed in SIMULATED_SEEDS[:runs]:
                run = await live(world, seed, arrivals(world, seed), etcd, folder)
                if run.late_s > _KEPT_UP_S and loop.time() < began + _REPEAT_UNTIL_S * runs:
                    print(
                        f"\n{world.name}: once more, since 1 % of the calls were begun over {run.late_s:.2f} s late"
                    )
                    run = await live(world, seed, arrivals(world, seed), etcd, folder)
                lived.append(run)
            simulated = [simulate(world, seed, rtt_s) for seed in SIMULATED_SEEDS]
            agreeing += report(world, lived, simulated)
    return agreeing


def main() -> None:
    """Compare, and exit with 1 if anything differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("worlds", nargs="*", metavar="world", help=", ".join(world.name for world in WORLDS))
    parser.add_argument("--runs", type=int, default=1, choices=range(1, len(SIMULATED_SEEDS) + 1))
    options = parser.parse_args()
    unknown = set(options.worlds) - {world.name for world in WORLDS}
    if unknown:
        parser.error(f"no such world: {', '.join(sorted(unknown))}")
    worlds = [world for world in WORLDS if not options.worlds or world.name in options.worlds]
    # Breakers that open are what these worlds are about.
    logging.getLogger("agent_reach").setLevel(logging.ERROR)
    agreeing = asyncio.run(compare(worlds, options.runs))
    print(f"\nsimulator and reality agree in {agreeing} of {len(worlds)} worlds")
    sys.exit(0 if agreeing == len(worlds) else 1)


if __name__ == "__main__":
    main()
