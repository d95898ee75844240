"""What may enter the index: decoding and checking of registry records."""

from __future__ import annotations

from agent_reach.model import AgentInfo
from agent_reach.ports import RawRecord

__all__ = ["decode"]


def decode(raw: RawRecord, namespace: str, *, allow_local: bool) -> AgentInfo:
    """Return the record, or raise ValueError with the reason why its instance can't be routed to.

    `local://` endpoints are calls inside this process: from any store that others can write to
    (`allow_local` False) they are refused.
    """
    info = AgentInfo.from_bytes(raw.value)
    if info.agent_id != raw.agent_id:
        raise ValueError(f"the record under {raw.agent_id!r} says agent_id {info.agent_id!r}")
    if info.namespace != namespace:
        raise ValueError(f"the record lies in namespace {namespace!r} and says {info.namespace!r}")
    is_local = info.endpoint.protocol == "local" or info.endpoint.url.startswith("local://")
    if is_local and not allow_local:
        raise ValueError(f"endpoint {info.endpoint.url!r} is local; from a shared registry only http counts")
    return info
