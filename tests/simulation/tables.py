"""What the page says of the results, as Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median

from tests.simulation.ablation import Change, Effect
from tests.simulation.comparing import SUCCESS, Outcomes, spread
from tests.simulation.running import Result
from tests.simulation.scenarios import SCENARIOS
from tests.simulation.verdict import Rival, Standing, judge

__all__ = ["ablation_table", "attempts_table", "duplicates_table", "p99_table", "scenario_table", "short_name"]
__all__ += ["success_table", "verdict_text"]

_SHORT = {
    "round robin, 3 blind retries": "round robin",
    "naive registry": "naive",
    "random with cooldown (LiteLLM)": "LiteLLM",
    "outlier ejection (gRPC)": "gRPC",
    "P2C peak EWMA (Finagle, Linkerd)": "Finagle",
    "additive score": "additive",
}
# Written behind what is bought by running twice what must run once.
_TWICE = "†"


def short_name(algorithm: str) -> str:
    """Return what a narrow column calls it."""
    return _SHORT.get(algorithm, algorithm)


# --- one measure --------------------------------------------------------------------------------------------


def success_table(outcomes: Outcomes) -> str:
    """Success in %: the median, and half the range over the seeds."""
    return _measure_table(outcomes, lambda r: r.success * 100, _hundredths, max)


def p99_table(outcomes: Outcomes) -> str:
    """p99 in ms, alike."""
    return _measure_table(outcomes, lambda r: r.p99_s, _ms, min, twice=_TWICE)


def attempts_table(outcomes: Outcomes) -> str:
    """Attempts per call, alike. None is the best: who gives up at once needs the fewest."""
    return _measure_table(outcomes, lambda r: r.attempts, _hundredths, None)


def _measure_table(
    outcomes: Outcomes,
    of: Callable[[Result], float],
    write: Callable[[float, float], str],
    best_of: Callable[[Iterable[float]], float] | None,
    twice: str = "",
) -> str:
    names = _algorithms(outcomes)
    rows = []
    for scenario, by_name in outcomes.items():
        spreads = {name: spread([of(result) for result in results]) for name, results in by_name.items()}
        best = None if best_of is None else best_of(s.median for s in spreads.values())
        cells = []
        for name in names:
            middle, half_range = spreads[name].median, spreads[name].half_range
            shown = write(middle, middle)
            # What looks the same as the best is as good, for a reader.
            if best is not None and shown == write(best, best):
                shown = f"**{shown}**"
            mark = twice if any(result.unsafe_duplicates for result in by_name[name]) else ""
            cells.append(f"{shown} ± {write(half_range, middle)}{mark}")
        rows.append([scenario, *cells])
    return _table(["scenario", *map(short_name, names)], rows)


# --- the others ---------------------------------------------------------------------------------------------


def scenario_table(scenarios: Iterable[str]) -> str:
    """What happens in each."""
    rows = [[name, SCENARIOS[name].title, f"{SCENARIOS[name].length_s:g} s"] for name in scenarios]
    return _table(["scenario", "what happens", "length"], rows)


def duplicates_table(outcomes: Outcomes) -> str:
    """How often each ran twice what must run once, of a thousand calls."""
    names = _algorithms(outcomes)
    # Where nobody ever did, calls may be repeated, or nothing was lost.
    hit = [s for s, by_name in outcomes.items() if any(r.unsafe_duplicates for rs in by_name.values() for r in rs)]
    rows = []
    for name in names:
        cells = []
        for scenario in hit:
            calls = sum(r.calls for r in outcomes[scenario][name])
            cells.append(f"{sum(r.unsafe_duplicates for r in outcomes[scenario][name]) * 1000 / calls:.2f}")
        total = sum(r.unsafe_duplicates for by_name in outcomes.values() for r in by_name[name])
        rows.append([name, *cells, f"{total:,}"])
    return _table(["algorithm", *(f"{scenario}, of 1,000 calls" for scenario in hit), "in all runs"], rows)


def ablation_table(tried: Mapping[str, tuple[Change, Sequence[str], Sequence[Effect]]]) -> str:
    """What each change did, and where; `tried`: by name the change, its scenarios, what it did."""
    rows = []
    for name, (change, scenarios, found) in tried.items():
        better = _said([effect for effect in found if effect.better])
        worse = _said([effect for effect in found if not effect.better])
        same = [scenario for scenario in scenarios if scenario not in {effect.scenario for effect in found}]
        none = f"{len(same)} of {len(scenarios)}"
        rows.append([f'<a id="ablation-{name}"></a>{change.text}', better, worse, none])
    return _table(["what is changed", "better", "worse", "no difference"], rows)


def _said(found: Sequence[Effect]) -> str:
    parts = []
    for scenario in dict.fromkeys(effect.scenario for effect in found):
        steps = ", ".join(_step(effect) for effect in found if effect.scenario == scenario)
        parts.append(f"*{scenario}*: {steps}")
    return "<br>".join(parts)


def _step(effect: Effect) -> str:
    if effect.measure is SUCCESS:
        return f"success {effect.default * 100:.2f} to {effect.changed * 100:.2f} %"
    return f"p99 {_ms(effect.default)} to {_ms(effect.changed)} ms"


# --- the verdict --------------------------------------------------------------------------------------------


def verdict_text(outcomes: Outcomes, ours: str) -> str:
    """Where ours is the best, where it isn't, and the same counts for every other algorithm."""
    verdict, count = judge(outcomes, ours), len(outcomes)
    seeds = {len(results) for by_name in outcomes.values() for results in by_name.values()}
    lines = [
        f"Of {count} scenarios, {ours}",
        "",
        f"* has the best success in **{verdict.success_best}**, and the best or one within a percentage point of "
        f"it in **{verdict.success_near}**;",
        f"* has the lowest p99 in **{verdict.p99_best}**, and the lowest or one that can't be told from it in "
        f"**{verdict.p99_even}**.",
        "",
    ]
    alike = sum(standing.alike for standing in verdict.success), sum(standing.alike for standing in verdict.p99)
    if any(alike):
        lines += [
            f"All of them have the same success in {alike[0]} of these, and the same p99 in {alike[1]} (mostly the "
            "whole deadline): those say nothing of who is better.",
            "",
        ]
    if min(seeds, default=0) < 2:
        lines += ["This was run with one seed, so nothing can be told from anything.", ""]
    lines += ["The same for each of them:", "", _standings(outcomes), ""]
    losses = [*_losses("success", verdict.success_losses), *_losses("p99", verdict.p99_losses)]
    if losses:
        lines += ["Where another is better, by more than chance or by more than a point of success:", ""]
        lines += [_table(["scenario", "measure", ours, "the best that is better", "difference", ""], losses)]
    else:
        lines += [f"In no scenario another is better than {ours} by more than chance."]
    return "\n".join(lines)


def _standings(outcomes: Outcomes) -> str:
    rows = []
    for name in _algorithms(outcomes):
        verdict = judge(outcomes, name)
        lows = {s: median(r.success for r in by_name[name]) * 100 for s, by_name in outcomes.items()}
        lowest = min(lows, key=lows.__getitem__)
        counts = (verdict.success_best, verdict.success_near, verdict.p99_best, verdict.p99_even)
        rows.append([name, *map(str, counts), f"{lows[lowest]:.1f} % ({lowest})"])
    head = ["algorithm", "best success", "within a point", "lowest p99", "not to be told from it", "lowest success"]
    return _table(head, rows)


def _losses(measure: str, losses: Sequence[tuple[Standing, Rival]]) -> Iterable[list[str]]:
    for standing, rival in losses:
        if measure == "success":
            ours, other = f"{standing.ours * 100:.2f} %", f"{rival.value * 100:.2f} %"
            step = f"{(rival.value - standing.ours) * 100:.2f} points"
        else:
            ours, other, ratio = f"{_ms(standing.ours)} ms", f"{_ms(rival.value)} ms", standing.ours / rival.value
            step = f"{ratio:.1f} times" if ratio >= 2 else f"{(ratio - 1) * 100:.1f} % longer"
        twice = f"it ran {rival.duplicates:,} calls twice that must run once" if rival.duplicates else ""
        yield [standing.scenario, measure, ours, f"{other} ({short_name(rival.name)})", step, twice]


# --- tables -------------------------------------------------------------------------------------------------


def _ms(seconds: float, like: float | None = None) -> str:
    """Milliseconds, with a decimal if there are few of them, or few in what it stands beside."""
    return f"{seconds * 1000:,.{0 if (seconds if like is None else like) >= 0.1 else 1}f}"


def _hundredths(value: float, like: float) -> str:
    return f"{value:.2f}"


def _algorithms(outcomes: Outcomes) -> list[str]:
    return list(next(iter(outcomes.values()), {}))


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
