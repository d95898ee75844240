"""What a person sees of the demo: a live table on a terminal, timestamped lines elsewhere or without rich."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from examples.customer_service.tally import COLUMNS, Tally

__all__ = ["View", "plain_table", "watching"]

_PROGRESS_EVERY_S = 5.0


class View(Protocol):
    """Shows what happens."""

    def say(self, text: str) -> None:
        """Tell of an event; the first line gets the time, further ones are shown as they are."""
        ...

    def refresh(self) -> None:
        """Show how the calls stand; called a few times a second."""
        ...


@contextmanager
def watching(tally: Tally) -> Iterator[View]:
    """Give the view that suits where stdout goes."""
    on_terminal = sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"
    if on_terminal and importlib.util.find_spec("rich") is not None:
        with _live(tally) as view:
            yield view
    else:
        yield _Lines(tally)


class _Lines:
    """Plain lines: for logs, pipes, and where rich isn't installed."""

    def __init__(self, tally: Tally) -> None:
        self._tally = tally
        self._began = self._next = time.monotonic()

    def say(self, text: str) -> None:
        # A pipe whose reader is gone must not end the demo.
        with contextlib.suppress(BrokenPipeError):
            print(f"{time.monotonic() - self._began:6.1f} s  {_indented(text)}", flush=True)

    def refresh(self) -> None:
        if self._tally.started and time.monotonic() >= self._next:
            self._next = time.monotonic() + _PROGRESS_EVERY_S
            ended = {outcome: len(self._tally.of(outcome=outcome)) for outcome in ("ok", "failed", "unknown")}
            running = self._tally.started - len(self._tally.calls)
            self.say(
                f"calls: {ended['ok']} succeeded, {ended['failed']} failed, {ended['unknown']} unknown, "
                f"{running} running"
            )


@contextmanager
def _live(tally: Tally) -> Iterator[View]:
    """A table that rich keeps at the bottom while the events scroll above it. rich itself heeds NO_COLOR."""
    from rich.live import Live
    from rich.table import Table
    from rich.text import Text

    def table() -> Table:
        shown = Table(title=f"{tally.started} calls started, {tally.started - len(tally.calls)} running")
        for column in COLUMNS:
            shown.add_column(column, justify="left" if column == COLUMNS[0] else "right")
        for row in tally.rows():
            shown.add_row(*row, style="bold" if row[0] == "all" else None)
        return shown

    class LiveTable:
        def __init__(self) -> None:
            self._began = time.monotonic()

        def say(self, text: str) -> None:
            head = Text(f"{time.monotonic() - self._began:6.1f} s  ", style="cyan")
            live.console.print(head.append(_indented(text), style="default"), soft_wrap=True)

        def refresh(self) -> None:
            live.update(table(), refresh=True)

    # Refreshed by us, on the event loop, rather than by a thread of rich's while a call is being counted.
    with Live(table(), auto_refresh=False) as live:
        yield LiveTable()


def _indented(text: str) -> str:
    return "\n          ".join(text.splitlines())


def plain_table(rows: Sequence[Sequence[str]]) -> str:
    """The rows in columns: the first to the left, the others to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        )
        for row in rows
    )
