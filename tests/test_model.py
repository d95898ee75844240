"""Registry records and addresses: good ones route, bad ones are refused with the reason."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agent_reach.model import MAX_RECORD_BYTES, AgentInfo, Endpoint, check_agent_id, check_url
from tests.routing.world import agent


@pytest.mark.parametrize(
    "url",
    ["http://10.0.0.7:9101", "https://kb.internal", "http://[::1]:9101", "http://127.0.0.1:80/agents/kb",
     "http://kb-1.default.svc.cluster.local:8000/", "http://[fd00::5]:1"],
)  # fmt: skip
def test_an_address_that_peers_can_dial_is_taken(url: str) -> None:
    assert check_url(url) == url.rstrip("/")


@pytest.mark.parametrize(
    "url",
    ["http://0.0.0.0:9101", "http://[::]:9101", "http://0:9101", "http://169.254.169.254/latest", "http://2852039166/",
     "http://0xa9fea9fe/", "http://169.254.43518/", "http://[::ffff:169.254.169.254]/", "http://[fe80::1]:1",
     "http://224.0.0.1:1", "file:///etc/passwd", "ftp://host", "http://user:secret@evil:1", "http://user@evil",
     "http://host/../admin", "http://host/%2e%2e/admin", "http://host/?token=x", "http://host/#x", "http://",
     "host:1", "http://::1:9101", "http://host:99999", "http://host:0", "http://ho st", "http://hö.de",
     "http://host\n", ""],
)  # fmt: skip
def test_an_address_that_could_lead_astray_is_refused(url: str) -> None:
    """R11, Z01."""
    with pytest.raises(ValueError, match="url"):
        check_url(url)


def test_user_info_is_not_repeated_in_the_refusal() -> None:
    with pytest.raises(ValueError, match="user info") as caught:
        check_url("http://user:secret@evil:1")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("bad", ["", ".", "..", "a/b", "a..b", "-a", "ü", "a" * 129, "a b", "a\n"])
def test_an_id_that_could_escape_its_prefix_is_refused(bad: str) -> None:
    """R10."""
    with pytest.raises(ValueError, match="agent id"):
        check_agent_id(bad)


def test_a_record_survives_the_round_trip() -> None:
    info = agent("kb-1", zone="eu-1/a", weight=2.5, metadata={"team": "blue"})
    assert AgentInfo.from_bytes(info.to_bytes()) == info
    assert b'"schema":1' in info.to_bytes()


def record(**changes: Any) -> bytes:
    body = json.loads(agent("kb-1").to_bytes())
    body.update(changes)
    return json.dumps(body).encode()


def test_unknown_fields_are_tolerated() -> None:
    assert AgentInfo.from_bytes(record(future={"x": 1})).agent_id == "kb-1"


@pytest.mark.parametrize(
    "body",
    [b"", b"nonsense", b"\xff", b"[]", record(schema=2), record(weight=0), record(weight=-1), record(weight="x"),
     record(weight=float("nan")), record(capabilities=[{"name": 7}]), record(endpoint={"url": "http://0.0.0.0:1"}),
     record(agent_id="../x"), record(incarnation=""), record(metadata={"a": {"b": 1}}),
     b" " * (MAX_RECORD_BYTES + 1)],
)  # fmt: skip
def test_a_bad_record_is_refused_with_the_reason(body: bytes) -> None:
    """R11."""
    with pytest.raises(ValueError, match="record"):
        AgentInfo.from_bytes(body)


def test_a_refused_record_doesnt_repeat_its_values() -> None:
    with pytest.raises(ValueError, match="weight") as caught:
        AgentInfo.from_bytes(record(weight="hunter2"))
    assert "hunter2" not in str(caught.value)


def test_a_record_that_is_too_large_is_refused_before_it_is_written() -> None:
    with pytest.raises(ValueError, match="shorten"):
        agent("kb-1", metadata={"x": "y" * MAX_RECORD_BYTES}).to_bytes()


def test_a_local_endpoint_is_told_by_its_scheme() -> None:
    assert Endpoint(protocol="local", url="local://kb-1").url == "local://kb-1"
