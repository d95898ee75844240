"""Every Python block of README and docs runs, and prints what the page says it prints.

Blocks of one page share their names, as a reader would type them one after the other. A ```text block after a
Python block is its output (`...` stands for anything). A block below `<!-- not run: reason -->` is only compiled.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import doctest
import inspect
import io
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
FENCE = re.compile(
    r"(?P<skip><!-- not run: (?P<reason>[^\n]+) -->\n)?```(?P<kind>\w*)\n(?P<text>.*?)```", re.DOTALL
)


@dataclass
class Block:
    """A Python block, what it should print, and its line."""

    code: str
    line: int
    skipped: bool
    prints: str | None = None


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text()
    blocks: list[Block] = []
    for match in FENCE.finditer(text):
        if match["kind"] == "python":
            line = text.count("\n", 0, match.start("text"))
            blocks.append(Block(match["text"], line, skipped=match["skip"] is not None))
        elif match["kind"] == "text" and blocks and not blocks[-1].skipped:
            blocks[-1].prints = match["text"]
    return blocks


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
async def test_the_page_does_what_it_says(page: Path) -> None:
    names: dict[str, Any] = {"__name__": f"docs_{page.stem}"}
    for block in blocks_of(page):
        code = compile("\n" * block.line + block.code, page, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        if block.skipped:
            continue
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            running = eval(code, names)
            if inspect.isawaitable(running):
                await running
        if block.prints is not None:
            same = doctest.OutputChecker().check_output(block.prints, out.getvalue(), doctest.ELLIPSIS)
            assert same, f"{page.name}:{block.line} printed\n{out.getvalue()}"
    for name, thing in list(names.items()):
        if name.startswith("test_") and callable(thing):
            result = thing()
            if asyncio.iscoroutine(result):
                await result


def test_every_link_between_the_pages_leads_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name} links to {target}"
