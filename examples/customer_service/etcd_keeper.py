"""Keeps the demo's etcd in a process of its own, so that it ends with the demo even if that is killed outright.

Takes a line at a time on stdin, `start` or `stop`, and answers each with one line. When stdin closes, which the
death of the demo does too, it stops etcd, removes the folder with all the demo's files, and ends.
"""

from __future__ import annotations

import signal
import sys
import tempfile
from pathlib import Path

from agent_reach import ConfigError, ReachError
from agent_reach.testing.etcd import EtcdServer


def main() -> None:
    # SIGTERM must end in the clean-up below too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory(prefix="customer-service-", ignore_cleanup_errors=True) as folder:
        try:
            server = EtcdServer(Path(folder) / "etcd")
        except ConfigError as error:
            _say("failed", f"{error}. It comes with an etcd for Linux on x86-64 only; elsewhere the demo can't run")
            return
        _say("ready", server.url, folder)
        try:
            for line in sys.stdin:
                _obey(server, line.strip())
        finally:
            server.stop()


def _obey(server: EtcdServer, command: str) -> None:
    try:
        if command == "start":
            server.start()
        elif command == "stop":
            server.stop()
        else:
            raise ValueError(f"no command {command!r}; there are start and stop")
    except (ReachError, ValueError, OSError) as error:
        _say("failed", str(error))
    else:
        _say("done")


def _say(*words: str) -> None:
    print("\t".join(" ".join(word.splitlines()) for word in words), flush=True)


if __name__ == "__main__":
    main()
