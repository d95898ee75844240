"""Runs every algorithm in every scenario, and writes what came of it into docs/routing.md and its charts.

python -m tests.simulation.report                      all of it, ten seeds; goes on where it was broken off
python -m tests.simulation.report --scenarios two-die,half-fail --seeds 2
python -m tests.simulation.report --only-write         write the page again, from what was run before
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from tests.simulation import charts, tables
from tests.simulation.ablation import CHANGES, effects
from tests.simulation.algorithms import ALGORITHMS, OURS
from tests.simulation.comparing import Outcomes
from tests.simulation.results import ROOT, Results, Task, code_digest, result_of
from tests.simulation.running import Job, run_one
from tests.simulation.scenarios import SCENARIOS
from tests.simulation.timelines import TIMELINES, sample

__all__ = ["Plan", "fill", "main"]

COMPARE, ABLATION, TIMELINE = "compare", "ablation", "timeline"
_TIMELINE_SEED = 1


@dataclass(frozen=True, slots=True)
class Plan:
    """What to run. `length_s`: cut every scenario to so many seconds, None for its own length."""

    scenarios: tuple[str, ...]
    algorithms: tuple[str, ...]
    seeds: int
    ablation_seeds: int
    length_s: float | None = None

    def compare(self) -> list[Task]:
        """Every scenario, algorithm and seed; all of a scenario together."""
        return [
            Task(COMPARE, scenario, algorithm, seed, self.length_s)
            for scenario in self.scenarios
            for algorithm in self.algorithms
            for seed in range(1, self.seeds + 1)
        ]

    def ablation(self) -> list[Task]:
        """Ours, changed, where that change is tried; with the first of the same seeds, since they are compared."""
        seeds = range(1, min(self.seeds, self.ablation_seeds) + 1)
        return [
            Task(ABLATION, scenario, change.name, seed, self.length_s, change.variant)
            for scenario in self.scenarios
            for change in CHANGES.values()
            if scenario in change.scenarios
            for seed in seeds
        ]

    def timelines(self) -> list[Task]:
        """What is drawn over time."""
        return [
            Task(TIMELINE, scenario, algorithm, _TIMELINE_SEED, self.length_s)
            for scenario, line in TIMELINES.items()
            if scenario in self.scenarios
            for algorithm in line.algorithms
            if algorithm in self.algorithms
        ]


# --- running ------------------------------------------------------------------------------------------------


def _perform(task: Task) -> dict[str, Any]:
    if task.kind == TIMELINE:
        return dict(sample(task.scenario, task.algorithm, task.seed, task.length_s))
    factory = CHANGES[task.algorithm].algorithm if task.kind == ABLATION else ALGORITHMS[task.algorithm]
    return asdict(run_one(Job(task.scenario, task.algorithm, task.seed, task.length_s), factory))


def _run(tasks: Sequence[Task], processes: int) -> Iterator[dict[str, Any]]:
    """Yield what comes of each task, in their order."""
    with ExitStack() as stack:
        if processes < 2:
            yield from map(_perform, tasks)
        elif tasks:
            pool = stack.enter_context(multiprocessing.get_context("spawn").Pool(processes))
            yield from pool.imap(_perform, tasks, chunksize=1)


def _run_missing(plan: Plan, results: Results, processes: int, say: Callable[[str], None]) -> None:
    tasks = [*plan.compare(), *plan.ablation(), *plan.timelines()]
    missing = results.missing(tasks)
    say(f"{len(tasks)} runs, {len(tasks) - len(missing)} of them known already")
    began = time.monotonic()
    done = _run(missing, processes)
    for (kind, scenario), group in groupby(missing, key=lambda task: (task.kind, task.scenario)):
        batch, before = list(group), time.monotonic()
        for task in batch:
            results.add(task, next(done))
        now = time.monotonic()
        say(f"{kind:<9} {scenario:<20} {len(batch):>4} runs {now - before:6.0f} s, {now - began:6.0f} s in all")


# --- reading and writing ------------------------------------------------------------------------------------


def _outcomes(tasks: Iterable[Task], results: Results) -> Outcomes:
    """Results by scenario and algorithm; a scenario of which runs are missing is left out."""
    found: dict[str, dict[str, list[Any]]] = {}
    for scenario, group in groupby(tasks, key=lambda task: task.scenario):
        whole = list(group)
        if all(task in results for task in whole):
            by_name = found.setdefault(scenario, {})
            for task in whole:
                by_name.setdefault(task.algorithm, []).append(result_of(results[task]))
    return found


def _ablation(plan: Plan, outcomes: Outcomes, results: Results) -> str:
    seeds = min(plan.seeds, plan.ablation_seeds)
    tasks = [task for task in plan.ablation() if task in results and task.scenario in outcomes]
    default = {s: {OURS: by_name[OURS][:seeds]} for s, by_name in outcomes.items()}
    tried = {}
    for name, change in CHANGES.items():
        changed = _outcomes([task for task in tasks if task.algorithm == name], results)
        whole = {s: by_name for s, by_name in changed.items() if len(by_name[name]) == seeds}
        if whole:
            tried[name] = (change, list(whole), effects(default, whole, OURS, name))
    return tables.ablation_table(tried) if tried else "The ablation wasn't run."


def _sections(plan: Plan, outcomes: Outcomes, results: Results) -> dict[str, str]:
    some = next(iter(outcomes.values()))
    calls = sum(r.calls for by_name in outcomes.values() for rs in by_name.values() for r in rs)
    cut = "" if plan.length_s is None else f" Each was cut to {plan.length_s:g} s."
    return {
        "run": f"{len(outcomes)} scenarios, {len(some)} algorithms, {plan.seeds} seed(s) each: {calls:,} calls. "
        f"The ablation has {min(plan.seeds, plan.ablation_seeds)} seed(s).{cut}",
        "scenarios": tables.scenario_table(outcomes),
        "verdict": tables.verdict_text(outcomes, OURS),
        "success": tables.success_table(outcomes),
        "p99": tables.p99_table(outcomes),
        "attempts": tables.attempts_table(outcomes),
        "duplicates": tables.duplicates_table(outcomes),
        "ablation": _ablation(plan, outcomes, results),
    }


def fill(page: str, sections: dict[str, str]) -> str:
    """Put each section between its markers, `<!-- sim:name -->` and `<!-- /sim:name -->`.

    Raises ValueError if a pair isn't there exactly once.
    """
    for name, text in sections.items():
        begin, end = f"<!-- sim:{name} -->", f"<!-- /sim:{name} -->"
        if page.count(begin) != 1 or page.count(end) != 1 or page.index(end) < page.index(begin):
            raise ValueError(f"the page must have {begin} … {end} once")
        head, rest = page.split(begin)
        page = f"{head}{begin}\n\n{text}\n\n{end}{rest.split(end)[1]}"
    return page


def _write(plan: Plan, results: Results, page: Path, assets: Path, say: Callable[[str], None]) -> None:
    outcomes = _outcomes(plan.compare(), results)
    if not outcomes:
        raise SystemExit("no scenario was run to its end by this code: leave out --only-write")
    page.write_text(fill(page.read_text(), _sections(plan, outcomes, results)))
    assets.mkdir(parents=True, exist_ok=True)
    short = {name: tables.short_name(name) for name in plan.algorithms}
    (assets / "overview.svg").write_text(charts.overview(outcomes, OURS, short))
    for scenario, line in TIMELINES.items():
        series = {t.algorithm: results[t] for t in plan.timelines() if t.scenario == scenario and t in results}
        if series:
            (assets / f"{scenario}.svg").write_text(charts.timeline(line, series, short))
    say(tables.verdict_text(outcomes, OURS))


def main(argv: Sequence[str] | None = None, say: Callable[[str], None] = print) -> None:
    """Run what is missing and write the page; `say` is told how it goes."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.report", description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument(
        "--ablation-seeds", type=int, default=3, help="of the same seeds, for the ablation; 0: none"
    )
    parser.add_argument("--scenarios", help="names, with commas; all by default", type=_scenarios)
    parser.add_argument("--algorithm", action="append", help="also given: repeated; all by default")
    parser.add_argument("--length", type=float, help="cut every scenario to so many seconds, to try this out")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--results", type=Path, default=ROOT / "build/sim/results.jsonl")
    parser.add_argument("--page", type=Path, default=ROOT / "docs/routing.md")
    parser.add_argument("--assets", type=Path, default=ROOT / "docs/assets/routing")
    parser.add_argument("--only-write", action="store_true", help="run nothing")
    given = parser.parse_args(argv)
    wanted = (OURS, *given.algorithm) if given.algorithm else ALGORITHMS
    plan = Plan(
        given.scenarios or tuple(SCENARIOS),
        tuple(name for name in ALGORITHMS if name in wanted),
        given.seeds,
        given.ablation_seeds,
        given.length,
    )
    results = Results(given.results, code_digest())
    if not given.only_write:
        _run_missing(plan, results, given.processes, say)
    _write(plan, results, given.page, given.assets, say)


def _scenarios(text: str) -> tuple[str, ...]:
    names = text.split(",")
    unknown = [name for name in names if name not in SCENARIOS]
    if unknown:
        raise argparse.ArgumentTypeError(
            f"no such scenario: {', '.join(unknown)}; there are {', '.join(SCENARIOS)}"
        )
    return tuple(names)


if __name__ == "__main__":
    main()
