"""Answers must come as they are: no compression."""

from __future__ import annotations

from collections.abc import Mapping

from agent_reach.ports import BadAnswer

__all__ = ["refuse_encoding"]


def refuse_encoding(status: int, headers: Mapping[str, str]) -> BadAnswer | None:
    """Return why an encoded answer can't be taken, or None. `headers` have lower-case names or ignore case.

    Compressed, it could unpack to a thousand times what the bound on answers allows.
    """
    encoding = headers.get("content-encoding", "identity").strip().lower()
    if encoding in ("", "identity"):
        return None
    return BadAnswer(status, f"the answer has content-encoding {encoding!r}; only identity was asked for")
