"""A small agent in a process of its own: `python -m tests.faults.agent --registry URL --namespace N --id I`."""

from __future__ import annotations

import argparse
import json
import logging
import os

from agent_reach import ReachClient, ReachConfig, RegistryConfig, ServingConfig, register_agent


@register_agent("echo.say.v1", idempotent=True, timeout=2.0)
async def say(text: str) -> dict[str, object]:
    """Give the text back, with the pid."""
    return {"text": text, "pid": os.getpid()}


def main() -> None:
    """Serve until told to stop; the log goes to stderr."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--registry", required=True)
    parser.add_argument("--namespace", required=True)
    parser.add_argument("--id", required=True)
    parser.add_argument("--listen", default="127.0.0.1:0")
    parser.add_argument("--config", type=json.loads, default={}, help="fields of RegistryConfig, as JSON")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    ReachClient(
        options.id,
        handlers=[say],
        registry=options.registry,
        namespace=options.namespace,
        listen=options.listen,
        config=ReachConfig(registry=RegistryConfig(**options.config), serving=ServingConfig(linger_s=0.2)),
    ).run()


if __name__ == "__main__":
    main()
