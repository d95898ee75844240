"""What Agent-Reach is compared with: other algorithms behind the same protocol, each by its published rules."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

from agent_reach.testing.simulation.algorithms import Algorithm
from tests.simulation.baselines.additive import Additive
from tests.simulation.baselines.common import Baseline
from tests.simulation.baselines.cooldown import Cooldown
from tests.simulation.baselines.least_failures import LeastFailures
from tests.simulation.baselines.outlier import Outlier
from tests.simulation.baselines.p2c_peak_ewma import P2CPeakEwma
from tests.simulation.baselines.round_robin import RoundRobin

__all__ = ["BASELINES"]

BASELINES: dict[str, Callable[[random.Random, str | None], Algorithm]] = {
    "round robin, 3 blind retries": partial(Baseline, RoundRobin),
    "naive registry": partial(Baseline, LeastFailures),
    "random with cooldown (LiteLLM)": partial(Baseline, Cooldown),
    "outlier ejection (gRPC)": partial(Baseline, Outlier),
    "P2C peak EWMA (Finagle, Linkerd)": partial(Baseline, P2CPeakEwma),
    "additive score": partial(Baseline, Additive),
}
"""By name: (randomness, the client's own zone) -> what one client decides by."""
