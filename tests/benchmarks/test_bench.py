"""The benchmarks still run; what they measure is asserted nowhere."""

from __future__ import annotations

import pytest

from tests.benchmarks import bench


async def test_the_benchmark_of_a_call_runs_against_today_s_client(capsys: pytest.CaptureFixture[str]) -> None:
    await bench.bench_call(rounds=1)
    assert "x plain httpx into the same app" in capsys.readouterr().out


def test_the_benchmark_of_the_index_runs(capsys: pytest.CaptureFixture[str]) -> None:
    bench.bench_index(count=100)
    assert "one change" in capsys.readouterr().out
