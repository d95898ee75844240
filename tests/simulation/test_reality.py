"""What compares the simulator with reality works; how fast this machine is, is asserted nowhere."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

import agent_reach.errors
from agent_reach.errors import Attempt, ReachError
from agent_reach.testing.etcd import EtcdServer
from agent_reach.testing.simulation import LogNormal
from tests.simulation.compared import Called, Figures, Trouble, World, differences
from tests.simulation.real_world import Lived, live
from tests.simulation.reality import WORLDS, report
from tests.simulation.simulated_world import arrivals, simulate

SHORT = World(
    name="short",
    title="all troubles within three seconds",
    length_s=3.0,
    agents=3,
    clients=2,
    service=LogNormal(0.05, 0.5),
    kill_s=0.8,
    trouble=Trouble(from_s=1.2, until_s=3.0),
)


def called(took_s: float = 0.1, failure: str | None = None, sent_to: Sequence[str] = ("a",)) -> Called:
    attempts = [
        Attempt(number, agent_id, "http://a", "ok", "", took_s) for number, agent_id in enumerate(sent_to, 1)
    ]
    return Called(0.0, took_s, failure, tuple(attempts))


def answers(calls: Sequence[Called], agent_id: str, from_s: float, until_s: float) -> int:
    """How many of the calls that came then were answered well by that agent."""
    then = [call for call in calls if from_s <= call.started_s < until_s]
    return sum(a.agent_id == agent_id and a.outcome == "ok" for call in then for a in call.attempts)


def is_typed(failure: str) -> bool:
    return issubclass(getattr(agent_reach.errors, failure), ReachError)


# --- the same world in both ----------------------------------------------------------------------------------


@pytest.mark.etcd
async def test_in_a_real_world_of_troubles_all_calls_end_counts_match_and_no_process_is_left(
    etcd: EtcdServer, tmp_path: Path
) -> None:
    coming = arrivals(SHORT, seed=1)
    lived = await live(SHORT, 1, coming, etcd, tmp_path)
    assert [call.started_s for call in lived.calls] == [arrival.time_s for arrival in coming]
    assert all(call.failure is None or is_typed(call.failure) for call in lived.calls)
    assert answers(lived.calls, "work-1", 0.0, 0.8) > 0, "it never lived"
    assert answers(lived.calls, "work-1", 0.85, 3.0) == 0, "it was never killed"
    assert answers(lived.calls, "work-2", 0.0, 1.2) > 0, "it was always in trouble"
    # Those that came last may have got there after the trouble.
    assert answers(lived.calls, "work-2", 1.25, 2.0) == 0, "it never was in trouble"
    ends = Counter((attempt.agent_id, attempt.outcome) for call in lived.calls for attempt in call.attempts)
    for agent_id in SHORT.agent_ids():
        answered = ends[agent_id, "ok"] + ends[agent_id, "failed"]
        # What was cut off by the kill was executed or not.
        assert answered <= lived.executions[agent_id] <= answered + ends[agent_id, "maybe_executed"]
    for pid in lived.pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.etcd
async def test_an_agent_that_cannot_start_is_told_with_what_it_said(etcd: EtcdServer, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="work-1:(.|\n)*ConfigError"):
        await live(replace(SHORT, agents=1, slots=-1), 1, arrivals(SHORT, seed=1), etcd, tmp_path)


@pytest.mark.parametrize("world", WORLDS, ids=lambda world: world.name)
def test_what_is_simulated_is_what_the_real_callers_are_told_to_do(world: World) -> None:
    world = replace(world, length_s=5.0)
    coming, simulated = arrivals(world, seed=2), simulate(world, 2, rtt_s=0.01)
    assert sorted(call.started_s for call in simulated) == [arrival.time_s for arrival in coming]
    assert {arrival.client for arrival in coming} == set(range(world.clients))
    assert coming != arrivals(world, seed=3)


def test_the_simulated_world_has_the_troubles_of_the_real_one() -> None:
    calls = simulate(SHORT, 1, rtt_s=0.01)
    assert answers(calls, "work-1", 0.0, 0.8) > 0
    assert answers(calls, "work-1", 0.8, 3.0) == 0
    assert answers(calls, "work-2", 0.0, 1.2) > 0
    assert answers(calls, "work-2", 1.2, 3.0) == 0
    slow = replace(SHORT, trouble=Trouble(from_s=1.2, until_s=3.0, slower=10.0))
    of_slow, of_steady = (Figures.of(simulate(w, 1, rtt_s=0.01)) for w in (slow, replace(slow, trouble=None)))
    assert of_slow.p99_s > 1.5 * of_steady.p99_s


def test_what_a_call_costs_beside_its_work_makes_simulated_calls_longer_by_that() -> None:
    steady = WORLDS[0]
    cheap, dear = (Figures.of(simulate(steady, 1, rtt_s)).p50_s for rtt_s in (0.001, 0.021))
    assert dear - cheap == pytest.approx(0.02, abs=0.01)


# --- figures and verdict -------------------------------------------------------------------------------------


def test_figures_sum_up_answered_calls_for_times_and_all_calls_for_the_rest() -> None:
    calls = [called(number / 100) for number in range(1, 100)] + [called(5.0, "RemoteError", ["a", "b"])]
    figures = Figures.of(calls)
    assert (figures.calls, figures.success, figures.attempts) == (100, 0.99, 1.01)
    assert (figures.p50_s, figures.p90_s, figures.p99_s) == (0.5, 0.9, 0.99)
    assert figures.sent_to == {"a": 100, "b": 1}
    assert (figures.share_of("b"), figures.share_of("c")) == (1 / 101, 0.0)
    assert figures.failures == {"RemoteError": 1}


def test_a_point_of_success_and_a_fifth_of_the_median_are_allowed_and_no_more() -> None:
    simulated = Figures.of([called()] * 100)
    assert differences(replace(simulated, success=0.99, p50_s=0.12), simulated) == []
    assert differences(replace(simulated, p50_s=0.08), simulated) == []
    assert differences(replace(simulated, success=0.989), simulated) == ["success: real 98.90%, simulated 100.00%"]
    assert differences(replace(simulated, p50_s=0.121), simulated) == ["p50: real 121.0 ms, simulated 100.0 ms"]
    assert differences(replace(simulated, p50_s=0.079), simulated) == ["p50: real 79.0 ms, simulated 100.0 ms"]


def test_it_is_a_difference_if_nobody_was_answered() -> None:
    simulated, nothing = Figures.of([called()]), Figures.of([called(5.0, "Overloaded")])
    assert len(differences(nothing, simulated)) == 2
    assert len(differences(simulated, nothing)) == 2


def test_the_report_judges_all_runs_together_and_says_what_differs(capsys: pytest.CaptureFixture[str]) -> None:
    world = World(name="made-up", title="numbers", agents=2)
    short, long = ([called(took_s, sent_to=["work-1"])] * 10 for took_s in (0.1, 0.2))
    lived = [Lived(calls, 0.003, None, {}, ()) for calls in (long, short, short)]
    assert report(world, lived, [short])
    assert "agrees: success +0.00 points (1 allowed), p50 +0.0% (20 % allowed)" in capsys.readouterr().out
    assert not report(world, [replace(lived[0], calls=[called(0.0, "AgentNotFound", [])])], [short])
    assert "AgentNotFound" in capsys.readouterr().out
    assert not report(world, lived[:1], [short])
    printed = capsys.readouterr().out
    assert "DIFFERS, p50: real 200.0 ms, simulated 100.0 ms" in printed
    assert ["sent", "to", "work-1", "100.0%", "100.0%", "100.0%", "100.0%"] in [
        line.split() for line in printed.splitlines()
    ]


def test_a_run_on_a_machine_that_did_not_keep_up_is_no_agreement(capsys: pytest.CaptureFixture[str]) -> None:
    world = World(name="made-up", title="numbers", agents=1)
    calls = [called(sent_to=["work-1"])] * 10
    assert report(world, [Lived(calls, 0.099, None, {}, ())], [calls])
    assert not report(world, [Lived(calls, 0.101, None, {}, ())], [calls])
    assert "NO VERDICT: the machine was too busy" in capsys.readouterr().out
