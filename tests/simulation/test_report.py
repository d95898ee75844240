"""What the report says is what the runs say, and a run that was broken off goes on."""

from __future__ import annotations

import json
import random
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest

from agent_reach.config import ReachConfig
from agent_reach.testing.simulation import AgentReach
from tests.simulation import charts, report, tables
from tests.simulation.ablation import CHANGES, effects
from tests.simulation.algorithms import ALGORITHMS, OURS
from tests.simulation.comparing import P99, SUCCESS, Outcomes, paired
from tests.simulation.report import Plan, fill, main
from tests.simulation.results import ROOT, Results, Task, code_digest
from tests.simulation.running import Job, Result
from tests.simulation.scenarios import SCENARIOS
from tests.simulation.timelines import TIMELINES
from tests.simulation.verdict import judge

OTHER, THIRD = "round robin, 3 blind retries", "naive registry"
PAGE = ROOT / "docs" / "routing.md"


def result(
    algorithm: str = OURS, seed: int = 1, *, success: float = 1.0, p99_s: float = 0.3, duplicates: int = 0
) -> Result:
    job = Job("steady", algorithm, seed)
    return Result(job, 1000, success, 0.1, p99_s, p99_s, p99_s, 1.05, duplicates, 1.0, {})


def outcomes(**by_scenario: dict[str, list[tuple[float, float]]]) -> Outcomes:
    """(success, p99) of each seed, by scenario and algorithm."""
    return {
        scenario.replace("_", "-"): {
            name: [result(name, seed, success=s, p99_s=p) for seed, (s, p) in enumerate(runs, 1)]
            for name, runs in by_name.items()
        }
        for scenario, by_name in by_scenario.items()
    }


# --- the verdict --------------------------------------------------------------------------------------------


def test_a_loss_of_success_is_reported_as_a_loss() -> None:
    made_up = outcomes(
        two_die={OURS: [(0.95, 1.0), (0.96, 1.0), (0.97, 1.0)], OTHER: [(0.99, 1.0), (0.99, 1.0), (0.99, 1.0)]},
        steady={OURS: [(1.0, 0.3)] * 3, OTHER: [(0.9, 0.4)] * 3},
    )
    verdict = judge(made_up, OURS)
    assert (verdict.success_best, verdict.success_near) == (1, 1)
    (standing, rival) = verdict.success_losses[0]
    assert len(verdict.success_losses) == 1
    assert (standing.scenario, standing.ours, rival.name, rival.value) == ("two-die", 0.96, OTHER, 0.99)
    said = tables.verdict_text(made_up, OURS)
    assert "best success in **1**" in said
    assert "| two-die | success | 96.00 % | 99.00 % (round robin) | 3.00 points |" in said


def test_a_small_loss_counts_as_near_and_is_listed_if_it_is_no_chance() -> None:
    sure = outcomes(steady={OURS: [(0.990, 1.0), (0.991, 1.0)], OTHER: [(0.995, 1.0), (0.9961, 1.0)]})
    assert (judge(sure, OURS).success_best, judge(sure, OURS).success_near) == (0, 1)
    assert len(judge(sure, OURS).success_losses) == 1
    chance = outcomes(steady={OURS: [(0.990, 1.0), (0.997, 1.0)], OTHER: [(0.999, 1.0), (0.990, 1.0)]})
    assert judge(chance, OURS).success_best == 0
    assert judge(chance, OURS).success_losses == ()


def test_exactly_one_point_is_near_and_a_little_more_is_not() -> None:
    def near(ours: float) -> int:
        return judge(outcomes(steady={OURS: [(ours, 1.0)] * 2, OTHER: [(1.0, 1.0)] * 2}), OURS).success_near

    assert [near(0.99), near(0.9899)] == [1, 0]


def test_a_p99_within_its_error_is_even_and_one_beyond_is_lost() -> None:
    made_up = outcomes(
        steady={OURS: [(1, 0.30), (1, 0.35), (1, 0.31)], OTHER: [(1, 0.29), (1, 0.36), (1, 0.30)]},
        two_die={OURS: [(1, 0.40), (1, 0.41), (1, 0.42)], OTHER: [(1, 0.30), (1, 0.31), (1, 0.32)]},
        bursts={OURS: [(1, 0.20)] * 3, OTHER: [(1, 0.30)] * 3},
    )
    verdict = judge(made_up, OURS)
    assert (verdict.p99_best, verdict.p99_even) == (1, 2)
    assert [(s.scenario, rival.name) for s, rival in verdict.p99_losses] == [("two-die", OTHER)]


def test_who_is_beaten_by_the_second_best_alone_has_lost_too() -> None:
    """The best may be so by luck; that must not hide another that is better for sure."""
    runs = {OURS: [(1.0, 0.40), (1.0, 0.40)], OTHER: [(1.0, 0.20), (1.0, 0.45)], THIRD: [(1.0, 0.39), (1.0, 0.39)]}
    ((_, rival),) = judge(outcomes(steady=runs), OURS).p99_losses
    assert rival.name == THIRD


def test_who_wins_by_running_calls_twice_is_marked_and_does_not_hide_who_wins_fairly() -> None:
    by_name = {
        OURS: [result(seed=seed, p99_s=15.0) for seed in (1, 2)],
        OTHER: [result(OTHER, seed, p99_s=0.3, duplicates=20) for seed in (1, 2)],
        THIRD: [result(THIRD, seed, p99_s=0.5) for seed in (1, 2)],
    }
    made_up = {"lost-answers": by_name}
    assert [(rival.name, rival.duplicates) for _, rival in judge(made_up, OURS).p99_losses] == [
        (OTHER, 40),
        (THIRD, 0),
    ]
    assert "it ran 40 calls twice that must run once" in tables.verdict_text(made_up, OURS)
    assert "| **300** ± 0† |" in tables.p99_table(made_up)
    duplicates = tables.duplicates_table(made_up)
    assert f"| {OURS} | 0.00 | 0 |" in duplicates
    assert f"| {OTHER} | 20.00 | 40 |" in duplicates


def test_one_seed_tells_nothing_apart() -> None:
    lone = outcomes(steady={OURS: [(1.0, 9.0)], OTHER: [(1.0, 0.1)]})
    assert judge(lone, OURS).p99_losses == ()
    assert judge(lone, OURS).p99_best == 0
    assert "with one seed" in tables.verdict_text(lone, OURS)


def test_scenarios_in_which_all_do_the_same_are_counted_as_such() -> None:
    made_up = outcomes(steady={OURS: [(1, 15.0)] * 2, OTHER: [(0.9, 15.0)] * 2})
    assert "same success in 0 of these, and the same p99 in 1" in tables.verdict_text(made_up, OURS)


def test_no_loss_is_said_to_be_none() -> None:
    made_up = outcomes(steady={OURS: [(1, 0.1)] * 2, OTHER: [(0.9, 0.2)] * 2})
    assert f"In no scenario another is better than {OURS}" in tables.verdict_text(made_up, OURS)


def test_differences_are_taken_seed_by_seed() -> None:
    step = paired([1.0, 2.0, 3.0], [0.9, 1.9, 2.9])
    assert step.mean == pytest.approx(0.1)
    assert step.error == pytest.approx(0.0, abs=1e-9)
    assert step.beyond_error
    assert paired([1.0, 2.0, 3.0], [2.0, 1.0, 3.0]).beyond_error is False


# --- tables -------------------------------------------------------------------------------------------------


def test_a_table_shows_medians_with_half_the_range_and_the_best_in_bold() -> None:
    made_up = outcomes(
        steady={OURS: [(0.98, 0.3), (1.0, 0.5), (0.99, 0.4)], OTHER: [(0.9, 0.0621)] * 3, THIRD: [(0.99, 0.8)] * 3}
    )
    assert tables.success_table(made_up).splitlines()[0] == f"| scenario | {OURS} | round robin | naive |"
    assert "| steady | **99.00** ± 1.00 | 90.00 ± 0.00 | **99.00** ± 0.00 |" in tables.success_table(made_up)
    assert "| steady | 400 ± 100 | **62.1** ± 0.0 | 800 ± 0 |" in tables.p99_table(made_up)
    assert "**" not in tables.attempts_table(made_up)


def test_what_a_change_does_is_listed_only_beyond_chance_and_if_it_matters() -> None:
    default = outcomes(
        steady={OURS: [(0.99, 0.30), (0.99, 0.31), (0.99, 0.32)]},
        two_die={OURS: [(0.99, 0.30), (0.99, 0.30), (0.99, 0.30)]},
        bursts={OURS: [(0.99, 0.30), (0.98, 0.50), (0.99, 0.40)]},
    )
    changed = outcomes(
        steady={"choices-2": [(0.95, 0.20), (0.94, 0.21), (0.95, 0.22)]},
        two_die={"choices-2": [(0.9901, 0.301), (0.9901, 0.301), (0.9901, 0.301)]},
        bursts={"choices-2": [(0.90, 0.40), (0.99, 0.45), (1.0, 0.20)]},
    )
    found = effects(default, changed, OURS, "choices-2")
    assert [(effect.scenario, effect.measure, effect.better) for effect in found] == [
        ("steady", SUCCESS, False),
        ("steady", P99, True),
    ]
    change = CHANGES["choices-2"]
    row = tables.ablation_table({change.name: (change, list(changed), found)}).splitlines()[-1]
    assert "*steady*: p99 310 to 210 ms | *steady*: success 99.00 to 95.00 % | 2 of 3 |" in row


def test_every_change_is_another_setting_than_the_default() -> None:
    variants = {change.variant for change in CHANGES.values()}
    assert len(variants) == len(CHANGES)
    assert all(change.config != ReachConfig() or change.ignore_zone for change in CHANGES.values())
    assert {scenario for change in CHANGES.values() for scenario in change.scenarios} <= SCENARIOS.keys()
    blind = CHANGES["zones-ignored"].algorithm(random.Random(1), "eu-1/a")
    assert isinstance(blind, AgentReach)
    assert blind.router.zone is None


# --- results ------------------------------------------------------------------------------------------------

TASK = Task("compare", "steady", OURS, 1)


def test_what_was_run_is_known_again_and_what_other_code_ran_is_not(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "results.jsonl"
    Results(path, "this").add(TASK, {"calls": 3})
    assert Results(path, "this")[TASK] == {"calls": 3}
    assert Results(path, "this").missing([TASK, replace(TASK, seed=2)]) == [replace(TASK, seed=2)]
    assert TASK not in Results(path, "other")
    assert replace(TASK, variant="x") not in Results(path, "this")


def test_a_line_that_was_cut_off_costs_only_itself(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    Results(path, "this").add(TASK, {"calls": 3})
    with path.open("a") as file:
        file.write('{"code": "this", "ta')
    second = replace(TASK, seed=2)
    Results(path, "this").add(second, {"calls": 4})
    again = Results(path, "this")
    assert (again[TASK], again[second]) == ({"calls": 3}, {"calls": 4})


def test_the_digest_changes_with_the_code_and_not_with_its_comments(tmp_path: Path) -> None:
    (tmp_path / "rules").mkdir()
    file = tmp_path / "rules" / "breaker.py"

    def digest(text: str) -> str:
        file.write_text(text)
        return code_digest(tmp_path, ["rules"])

    before = digest('"""Old."""\nOPEN_S = 30.0\n')
    assert digest('"""New."""\n\n# Why.\nOPEN_S = 30.0\n') == before
    assert digest('"""Old."""\nOPEN_S = 31.0\n') != before


def test_every_algorithm_gets_the_same_seeds_and_every_change_those_of_the_default() -> None:
    plan = Plan(tuple(SCENARIOS), tuple(ALGORITHMS), seeds=5, ablation_seeds=3)
    seeds: dict[tuple[str, str], list[int]] = {}
    for task in plan.compare():
        seeds.setdefault((task.scenario, task.algorithm), []).append(task.seed)
    assert len(seeds) == len(SCENARIOS) * len(ALGORITHMS)
    assert set(map(tuple, seeds.values())) == {(1, 2, 3, 4, 5)}
    assert {task.seed for task in plan.ablation()} == {1, 2, 3}
    assert {task.algorithm for task in plan.ablation()} == CHANGES.keys()


# --- charts -------------------------------------------------------------------------------------------------


def test_charts_are_well_formed_and_the_same_for_the_same_data() -> None:
    made_up = outcomes(
        steady={OURS: [(1, 0.3), (1, 0.4)], "a < b & c": [(0.9, 15.0)] * 2}, two_die={OURS: [(1, 0.001)] * 2}
    )
    drawn = charts.overview(made_up, OURS, {OURS: OURS})
    assert drawn == charts.overview(made_up, OURS, {OURS: OURS})
    texts = [element.text for element in ET.fromstring(drawn).iter("{http://www.w3.org/2000/svg}text")]
    assert {"steady", "two-die", "a < b & c", "90.00 %", "100.00 %"} <= set(texts)
    wide = [float(bar.get("width", 0)) for bar in ET.fromstring(drawn).iter("{http://www.w3.org/2000/svg}rect")]
    assert wide[0] < wide[1]


@pytest.mark.parametrize("scenario", TIMELINES)
def test_time_lines_are_well_formed_with_gaps_where_nothing_happened(scenario: str) -> None:
    line = TIMELINES[scenario]
    names = ("work-1", "work-2", "work-3") if line.apart else ("",)
    series = {name: {key: [1.0, None, 2.0, 3.0] for key in names} for name in line.algorithms}
    drawn = charts.timeline(line, series, {})
    paths = [path.get("d", "") for path in ET.fromstring(drawn).iter("{http://www.w3.org/2000/svg}path")]
    assert len(paths) == len(names) * len(line.algorithms)
    assert all(path.count("M") == 2 and path.count("L") == 1 for path in paths)


# --- the page -----------------------------------------------------------------------------------------------


def test_only_what_stands_between_the_markers_is_replaced() -> None:
    page = "before <!-- sim:a -->old<!-- /sim:a --> after"
    assert fill(page, {"a": "new"}) == "before <!-- sim:a -->\n\nnew\n\n<!-- /sim:a --> after"
    assert fill(fill(page, {"a": "x"}), {"a": "new"}) == fill(page, {"a": "new"})


@pytest.mark.parametrize("page", ["", "<!-- sim:a -->", "<!-- /sim:a --><!-- sim:a -->"])
def test_a_page_without_a_pair_of_markers_is_refused(page: str) -> None:
    with pytest.raises(ValueError, match="sim:a"):
        fill(page, {"a": "new"})


def test_the_page_links_only_to_changes_that_are_tried() -> None:
    linked = set(re.findall(r"\(#ablation-([\w-]+)\)", PAGE.read_text()))
    assert linked
    assert linked <= CHANGES.keys()


def test_the_report_runs_from_end_to_end_goes_on_and_writes_the_same_again(tmp_path: Path) -> None:
    page, results, assets = tmp_path / "routing.md", tmp_path / "results.jsonl", tmp_path / "assets"
    page.write_text(PAGE.read_text())
    arguments = ["--scenarios", "two-die", "--algorithm", OTHER, "--seeds", "2", "--ablation-seeds", "0"]
    arguments += ["--length", "2", "--processes", "1", "--results", str(results)]
    arguments += ["--page", str(page), "--assets", str(assets)]
    with pytest.raises(SystemExit, match="no scenario"):
        main([*arguments, "--only-write"], say=lambda text: None)
    main(arguments, say=lambda text: None)
    # Two seeds of two algorithms, and their time lines.
    lines = [json.loads(line) for line in results.read_text().splitlines()]
    assert sorted(line["task"]["kind"] for line in lines) == ["compare"] * 4 + ["timeline"] * 2
    written = page.read_text()
    assert "1 scenarios, 2 algorithms, 2 seed(s) each" in written
    assert "| two-die | **100.00** ± 0.00 | **100.00** ± 0.00 |" in written
    charts_before = {file.name: file.read_bytes() for file in assets.iterdir()}
    assert charts_before.keys() == {"overview.svg", "two-die.svg"}

    said: list[str] = []
    results.write_text("".join(results.read_text().splitlines(keepends=True)[:-1]))
    main(arguments, say=said.append)
    assert said[0] == "6 runs, 5 of them known already"
    assert page.read_text() == written
    assert {file.name: file.read_bytes() for file in assets.iterdir()} == charts_before
    main([*arguments, "--only-write"], say=lambda text: None)
    assert page.read_text() == written


def test_an_unknown_scenario_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        report.main(["--scenarios", "stedy"])
    assert "no such scenario: stedy" in capsys.readouterr().err
