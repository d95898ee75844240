"""Charts as plain SVG: the same data gives the same bytes. Colours are of medium brightness, so that they can be
read on white and on black.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from statistics import median

from tests.simulation.comparing import Outcomes
from tests.simulation.running import Result
from tests.simulation.timelines import Series, Timeline

__all__ = ["overview", "timeline"]

_TEXT, _FAINT, _GREY = "#777d86", "#99a0a9", "#98a0aa"
_OURS, _ORANGE, _GREEN, _RED = "#2f80c9", "#d98324", "#4c9f62", "#c9524d"

# --- p99 and success of all, scenario by scenario -----------------------------------------------------------

_COLUMNS, _PANEL_W, _ROW_H, _HEAD_H = 3, 310, 13, 22
_LABEL_W, _VALUE_W = 84, 66
_LEAST_S = 0.01


def overview(outcomes: Outcomes, ours: str, short: Mapping[str, str]) -> str:
    """One panel for each scenario: p99 as bars on a logarithmic scale, and success as a number."""
    most = max((_p99(r) for by_name in outcomes.values() for r in by_name.values()), default=1.0)
    rows = max((len(by_name) for by_name in outcomes.values()), default=0)
    panel_h = _HEAD_H + rows * _ROW_H + 22
    parts = []
    for place, (scenario, by_name) in enumerate(outcomes.items()):
        x, y = place % _COLUMNS * _PANEL_W, place // _COLUMNS * panel_h
        parts.append(f'<g transform="translate({x} {y})">')
        parts += _panel(scenario, by_name, ours, short, most)
        parts.append("</g>")
    height = math.ceil(len(outcomes) / _COLUMNS) * panel_h
    title = "p99 in seconds (bars, logarithmic) and success in % (numbers), by scenario and algorithm"
    return _svg(_COLUMNS * _PANEL_W, height, title, parts)


def _panel(
    scenario: str, by_name: Mapping[str, Sequence[Result]], ours: str, short: Mapping[str, str], most: float
) -> list[str]:
    width = _PANEL_W - _LABEL_W - _VALUE_W
    foot = _HEAD_H + len(by_name) * _ROW_H
    parts = [_text(4, 14, scenario, weight="bold", size=12)]
    for tick in (0.01, 0.1, 1.0, 10.0, 100.0):
        if tick <= most:
            x = _LABEL_W + _log_share(tick, most) * width
            parts.append(_line(x, _HEAD_H - 2, x, foot, _FAINT, 0.5))
            parts.append(_text(x, foot + 10, f"{tick:g} s", size=8, anchor="middle"))
    for row, (name, results) in enumerate(by_name.items()):
        y, p99_s = _HEAD_H + row * _ROW_H, _p99(results)
        long = max(1.0, _log_share(p99_s, most) * width)
        colour, weight = (_OURS, "bold") if name == ours else (_GREY, "normal")
        parts.append(_text(_LABEL_W - 4, y + 9, short.get(name, name), size=9, anchor="end", weight=weight))
        parts.append(f'<rect x="{_LABEL_W}" y="{y + 1}" width="{long:.1f}" height="{_ROW_H - 4}" fill="{colour}"/>')
        success = f"{median(result.success for result in results) * 100:.2f} %"
        parts.append(_text(_PANEL_W - 14, y + 9, success, size=9, anchor="end", weight=weight))
    return parts


def _p99(results: Sequence[Result]) -> float:
    return median(result.p99_s for result in results)


def _log_share(seconds: float, most: float) -> float:
    return math.log(max(seconds, _LEAST_S) / _LEAST_S) / math.log(max(most, 10 * _LEAST_S) / _LEAST_S)


# --- one scenario over time ---------------------------------------------------------------------------------

_W, _PLOT_H, _LEFT, _RIGHT, _TOP, _FOOT = 720, 150, 46, 12, 40, 26


def timeline(line: Timeline, series: Mapping[str, Series], short: Mapping[str, str]) -> str:
    """Values over time: a panel for each algorithm, or one with a line for each."""
    if line.apart:
        panels = [(short.get(name, name), values) for name, values in series.items()]
    else:
        panels = [("", {short.get(name, name): values[""] for name, values in series.items()})]
    every = [value for _, lines in panels for values in lines.values() for value in values if value is not None]
    top = max(every, default=1.0) * 1.05 or 1.0
    parts = []
    for number, (title, lines) in enumerate(panels):
        parts.append(f'<g transform="translate(0 {number * (_TOP + _PLOT_H + _FOOT)})">')
        parts += _plot(line, title, lines, top)
        parts.append("</g>")
    height = len(panels) * (_TOP + _PLOT_H + _FOOT)
    return _svg(_W, height, f"{line.title}: {line.unit}", parts)


def _plot(line: Timeline, title: str, lines: Mapping[str, Sequence[float | None]], top: float) -> list[str]:
    width, foot = _W - _LEFT - _RIGHT, _TOP + _PLOT_H
    length_s = max(map(len, lines.values())) * line.bucket_s
    parts = [_text(_LEFT, 13, f"{title}: {line.unit}" if title else line.unit, size=11, weight="bold")]
    for tick in _ticks(top):
        y = foot - tick / top * _PLOT_H
        parts.append(_line(_LEFT, y, _W - _RIGHT, y, _FAINT, 0.4))
        parts.append(_text(_LEFT - 5, y + 3, f"{tick:g}", size=9, anchor="end"))
    for tick in _ticks(length_s):
        x = _LEFT + tick / length_s * width
        parts.append(_text(x, foot + 13, f"{tick:g} s", size=9, anchor="middle"))
    for at_s, what in line.marks:
        if at_s < length_s:
            x = _LEFT + at_s / length_s * width
            parts.append(_line(x, _TOP - 4, x, foot, _TEXT, 1, dashed=True))
            parts.append(_text(x + 3, _TOP + 5, what, size=9))
    # The last is drawn on top, so what matters most goes last.
    colours = _colours(line, lines)
    for name, values in reversed(list(lines.items())):
        parts.append(_path(values, colours[name], top, width, foot))
    x = float(_LEFT)
    legend = {colour: "the others" if colour == _GREY else name for name, colour in colours.items()}
    for colour, name in legend.items():
        parts.append(_line(x, 26, x + 14, 26, colour, 2))
        parts.append(_text(x + 18, 29, name, size=10))
        x += 34 + 6 * len(name)
    return parts


def _colours(line: Timeline, lines: Mapping[str, object]) -> dict[str, str]:
    first = (_ORANGE, _RED) if line.apart else (_OURS, _GREEN, _ORANGE, _RED)
    return {name: first[i] if i < len(first) else _GREY for i, name in enumerate(lines)}


def _path(values: Sequence[float | None], colour: str, top: float, width: float, foot: float) -> str:
    drawn, pen = [], "M"
    for place, value in enumerate(values):
        if value is None:
            pen = "M"
            continue
        x = _LEFT + (place + 0.5) / len(values) * width
        drawn.append(f"{pen}{x:.1f} {foot - value / top * _PLOT_H:.1f}")
        pen = "L"
    return f'<path d="{" ".join(drawn)}" fill="none" stroke="{colour}" stroke-width="1.6"/>'


def _ticks(top: float) -> list[float]:
    """Four to eight round numbers from 0 on."""
    step = 10.0 ** math.floor(math.log10(top))
    step = next(step * part for part in (1.0, 0.5, 0.2, 0.1) if top / (step * part) >= 4)
    return [step * number for number in range(int(top / step + 1e-9) + 1)]


# --- marks --------------------------------------------------------------------------------------------------


def _svg(width: int, height: int, title: str, parts: Sequence[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="system-ui, sans-serif" fill="{_TEXT}" role="img">'
    )
    return "\n".join([head, f"<title>{escape(title)}</title>", *parts, "</svg>", ""])


def _text(x: float, y: float, text: str, *, size: int = 10, anchor: str = "start", weight: str = "normal") -> str:
    style = f' text-anchor="{anchor}"' * (anchor != "start") + f' font-weight="{weight}"' * (weight != "normal")
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}"{style}>{escape(text)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, width: float, *, dashed: bool = False) -> str:
    dash = ' stroke-dasharray="3 3"' if dashed else ""
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}" '
        f'stroke-width="{width:g}"{dash}/>'
    )
