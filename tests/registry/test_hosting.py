"""The error of a wait that ran out."""

from __future__ import annotations

import pytest

from agent_reach.errors import RegistryUnavailable
from agent_reach.registry.hosting import unavailable


@pytest.mark.parametrize(
    ("last", "message"),
    [
        (None, "no list came within 5 s; the registry is etcd://x:1"),
        (RegistryUnavailable("no route"), "no list came within 5 s; the registry is etcd://x:1: no route"),
        (
            RegistryUnavailable("the registry etcd://x:1 can't be used (no route)"),
            "no list came within 5 s: the registry etcd://x:1 can't be used (no route)",
        ),
    ],
)
def test_the_address_is_named_once(last: RegistryUnavailable | None, message: str) -> None:
    error = unavailable("etcd://x:1", 5.0, "no list came", last)
    assert error.message == message
    assert error.endpoints == ("etcd://x:1",)
