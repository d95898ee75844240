"""One run: a scenario, an algorithm, a seed."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from agent_reach.testing.simulation import AlgorithmFactory, Simulation
from tests.simulation.scenarios import SCENARIOS

__all__ = ["Job", "Result", "run_all", "run_one", "simulate"]


@dataclass(frozen=True, slots=True)
class Job:
    """What to run; `algorithm` is a name of `ALGORITHMS`, `length_s` None for the scenario's own."""

    scenario: str
    algorithm: str
    seed: int
    length_s: float | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """What came of it. Success is 0..1; a call that was executed twice though it mustn't be is no success. Times
    are seconds, and a failed call counts as its whole deadline.
    """

    job: Job
    calls: int
    success: float
    p50_s: float
    p99_s: float
    p999_s: float
    ok_p99_s: float
    attempts: float
    unsafe_duplicates: int
    executions_per_call: float
    failures: Mapping[str, int]


def simulate(scenario: str, algorithm: AlgorithmFactory, seed: int, length_s: float | None = None) -> Simulation:
    """Run a scenario to its end, or for `length_s`, and return its world."""
    wanted = SCENARIOS[scenario]
    sim = Simulation(seed, warm_up_s=wanted.warm_up_s, nested=algorithm)
    wanted.build(sim, algorithm)
    sim.run(wanted.length_s if length_s is None else length_s)
    return sim


def run_one(job: Job, algorithm: AlgorithmFactory) -> Result:
    """Run a job with the algorithm that it names."""
    metrics = simulate(job.scenario, algorithm, job.seed, job.length_s).metrics
    summary, counts = metrics.summary(), metrics.counts()
    return Result(
        job,
        summary.calls,
        (summary.successes - counts.unsafe_duplicates) / summary.calls,
        summary.p50_s,
        summary.p99_s,
        summary.p999_s,
        summary.ok_p99_s,
        summary.attempts_per_call,
        counts.unsafe_duplicates,
        counts.executions / summary.calls,
        dict(summary.failures),
    )


def _run(job: Job) -> Result:
    from tests.simulation.algorithms import ALGORITHMS

    return run_one(job, ALGORITHMS[job.algorithm])


def run_all(jobs: Iterable[Job], processes: int = 2) -> Iterator[Result]:
    """Run jobs side by side; results come in the order of the jobs."""
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        yield from pool.imap(_run, jobs, chunksize=1)
