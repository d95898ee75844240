"""The example's data files; `README.md` beside them says where they come from."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

__all__ = ["Message", "articles", "examples", "messages"]


@dataclass(frozen=True, slots=True)
class Message:
    """What a customer wrote, and what it is about according to the people who labelled it."""

    text: str
    intent: str


def messages() -> list[Message]:
    """The messages that the demo sends."""
    return [Message(**row) for row in _load("messages.json")["messages"]]


def examples() -> dict[str, list[str]]:
    """Example phrases by intent; none of them is among `messages`."""
    found: dict[str, list[str]] = _load("messages.json")["examples"]
    return found


def articles() -> list[tuple[str, str]]:
    """Title and text of each article of the help centre."""
    return [(row["title"], row["text"]) for row in _load("articles.json")]


def _load(name: str) -> Any:
    return json.loads(files(__name__).joinpath(name).read_text(encoding="utf-8"))
