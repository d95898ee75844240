"""Where records lie in a key-value store: `/agent-reach/v1/{namespace}/agents/{agent_id}`, names quoted."""

from __future__ import annotations

from urllib.parse import quote, unquote

__all__ = ["ROOT", "agent_id_of", "key_of", "prefix_of"]

ROOT = "/agent-reach/v1"


def prefix_of(namespace: str) -> bytes:
    """The keys of a namespace; the closing slash keeps 'prod' apart from 'prod2'."""
    return f"{ROOT}/{quote(namespace, safe='')}/agents/".encode()


def key_of(namespace: str, agent_id: str) -> bytes:
    """The key of one record."""
    return prefix_of(namespace) + quote(agent_id, safe="").encode()


def agent_id_of(prefix: bytes, key: bytes) -> str:
    """The agent id of a key. A key that we wouldn't have written so is returned as it is: no id looks like it."""
    raw = key[len(prefix) :].decode("utf-8", errors="backslashreplace")
    agent_id = unquote(raw)
    return agent_id if quote(agent_id, safe="") == raw else raw
