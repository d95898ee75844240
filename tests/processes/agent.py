"""A small agent for tests with real processes: `python -m tests.processes.agent --registry URL --count-file F`."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
from pathlib import Path

from agent_reach import ReachClient, ReachConfig, RegistryConfig, ServingConfig, register_agent

COUNT_FILE = Path(os.devnull)


@register_agent("echo.say.v1", idempotent=True)
async def say(text: str, wait_s: float = 0.0) -> dict[str, object]:
    """Give the text back after a while, with the pid."""
    await asyncio.sleep(wait_s)
    return {"text": text, "pid": os.getpid()}


@register_agent("echo.count.v1")
async def count(key: str, wait_s: float = 0.0) -> str:
    """Not idempotent: each execution leaves a line behind."""
    with COUNT_FILE.open("a") as file:
        file.write(f"{key}\n")
    await asyncio.sleep(wait_s)
    return key


@register_agent("echo.deaf.v1")
async def deaf() -> None:
    """Ignore every cancellation."""
    while True:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(3600)


def main() -> None:
    """Serve until told to stop."""
    global COUNT_FILE
    parser = argparse.ArgumentParser()
    parser.add_argument("--registry", required=True)
    parser.add_argument("--namespace", required=True)
    parser.add_argument("--id")
    parser.add_argument("--listen", default="127.0.0.1:0")
    parser.add_argument("--count-file", type=Path, default=COUNT_FILE)
    parser.add_argument("--ttl", type=float, default=2.0)
    parser.add_argument("--linger", type=float, default=1.0)
    parser.add_argument("--drain", type=float, default=30.0)
    options = parser.parse_args()
    COUNT_FILE = options.count_file
    config = ReachConfig(
        registry=RegistryConfig(lease_ttl_s=options.ttl),
        serving=ServingConfig(linger_s=options.linger, drain_s=options.drain),
    )
    ReachClient(
        options.id,
        handlers=[say, count, deaf],
        registry=options.registry,
        namespace=options.namespace,
        listen=options.listen,
        config=config,
    ).run()


if __name__ == "__main__":
    main()
