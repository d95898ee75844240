"""Serve one agent: `python -m examples.customer_service.agents knowledge --registry etcd://127.0.0.1:2379`.

Ctrl-C or SIGTERM ends it cleanly: it leaves the registry, finishes what it is doing, and goes.
"""

from __future__ import annotations

import argparse
import logging
import os
import threading

from agent_reach import ReachClient
from examples.customer_service.agents import intent, knowledge, profiles, summary, tickets

NAMES = ("intent", "knowledge", "profiles", "summary", "tickets")


def handler(name: str) -> object:
    """What serves the agent of that name: a function, or an object with methods."""
    match name:
        case "intent":
            return intent.detect
        case "knowledge":
            return knowledge.retrieve
        case "profiles":
            return profiles.read
        case "summary":
            return summary.Summariser()
        case "tickets":
            return tickets.TicketDesk()
        case _:
            raise ValueError(f"no agent {name!r}; there are {', '.join(NAMES)}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.customer_service.agents", description=__doc__)
    parser.add_argument("name", choices=NAMES)
    parser.add_argument("--id", help="this instance's id (default: the name and eight random hex digits)")
    parser.add_argument("--registry", help="like etcd://127.0.0.1:2379 (default: AGENT_REACH_REGISTRY)")
    parser.add_argument("--namespace", help="default: AGENT_REACH_NAMESPACE, else 'default'")
    parser.add_argument("--listen", default="127.0.0.1:0", help="host:port; port 0 takes a free one")
    parser.add_argument(
        "--until-stdin-closes", action="store_true", help="die with the process that started this one"
    )
    arguments = parser.parse_args()
    if arguments.until_stdin_closes:
        threading.Thread(target=_die_with_parent, name="parent-watch", daemon=True).start()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    for chatty in ("agent_reach.calls", "httpx"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    served = handler(arguments.name)
    reach = ReachClient(
        arguments.id,
        registry=arguments.registry,
        namespace=arguments.namespace,
        handlers=[served],
        listen=arguments.listen,
    )
    if isinstance(served, summary.Summariser):
        served.reach = reach
    reach.run()


def _die_with_parent() -> None:
    """The parent holds the other end of our stdin: when it is gone, however it went, reading ends."""
    # os.read rather than sys.stdin, whose lock would be held while the interpreter shuts down.
    while os.read(0, 1024):
        pass
    os._exit(0)


if __name__ == "__main__":
    main()
