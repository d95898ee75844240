"""An agent in a process of its own, as slow as a simulated one: `python -m tests.simulation.real_agent`.

SIGUSR1 begins its trouble, SIGUSR2 ends it.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
from pathlib import Path

from agent_reach import ReachClient, ReachConfig, RegistryConfig, register_agent
from agent_reach.testing.simulation import LogNormal
from agent_reach.testing.simulation.draws import stream

WORK, NOTHING = "work.do.v1", "work.nothing.v1"


@register_agent(NOTHING, idempotent=True)
async def nothing() -> None:
    """Cost nothing but the call itself."""


def main() -> None:
    """Serve until told to stop."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--registry", required=True)
    parser.add_argument("--namespace", required=True)
    parser.add_argument("--id", required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--median", type=float, required=True, help="seconds that half of the calls don't exceed")
    parser.add_argument("--sigma", type=float, required=True)
    parser.add_argument("--slots", type=int, required=True)
    parser.add_argument("--unsafe", action="store_true", help="its calls mustn't be repeated")
    parser.add_argument("--ttl", type=float, required=True)
    parser.add_argument("--slower", type=float, help="its trouble: so many times slower; without, it fails")
    parser.add_argument("--count-file", type=Path, required=True, help="gets one byte for each execution")
    options = parser.parse_args()
    service, luck = LogNormal(options.median, options.sigma), stream(options.seed, options.id)
    count = options.count_file.open("ab", buffering=0)
    in_trouble = False

    def trouble(number: int, _frame: object) -> None:
        nonlocal in_trouble
        in_trouble = number == signal.SIGUSR1

    @register_agent(WORK, idempotent=not options.unsafe, max_concurrency=options.slots)
    async def work() -> None:
        """Take as long as drawn."""
        count.write(b".")
        if in_trouble and options.slower is None:
            raise RuntimeError("in trouble")
        await asyncio.sleep(service.draw(luck) * (options.slower if in_trouble else 1.0))

    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, trouble)
    with count:
        ReachClient(
            options.id,
            handlers=[work, nothing],
            registry=options.registry,
            namespace=options.namespace,
            listen="127.0.0.1:0",
            config=ReachConfig(registry=RegistryConfig(lease_ttl_s=options.ttl)),
        ).run()


if __name__ == "__main__":
    main()
