"""Settings are checked when they are built; a bad value is never silently mended."""

from __future__ import annotations

from typing import Any

import pytest

from agent_reach.config import (
    BreakerConfig,
    BulkheadConfig,
    EjectionConfig,
    ReachConfig,
    RegistryConfig,
    RetryConfig,
    ScoringConfig,
    ServingConfig,
    TimeoutConfig,
)
from agent_reach.errors import ConfigError


@pytest.mark.parametrize(
    ("cls", "setting", "value"),
    [
        (TimeoutConfig, "connect_s", 0),
        (TimeoutConfig, "total_s", float("nan")),
        (TimeoutConfig, "discovery_s", float("inf")),
        (TimeoutConfig, "tiers", {"light": -1}),
        (RetryConfig, "max_attempts", 0),
        (RetryConfig, "max_attempts", 2.5),
        (RetryConfig, "multiplier", 0.5),
        (BreakerConfig, "success_rate", 1.5),
        (BreakerConfig, "consecutive_failures", True),
        (BreakerConfig, "max_open_s", 1.0),
        (EjectionConfig, "max_share", 2),
        (ScoringConfig, "slow_start_floor", 0.0),
        (BulkheadConfig, "per_instance", -1),
        (RegistryConfig, "lease_ttl_s", 1),
        (RegistryConfig, "on_unavailable", "explode"),
        (RegistryConfig, "schema_policy", "yes"),
        (ServingConfig, "max_body_bytes", 1),
        (ServingConfig, "drain_s", 1.0),
        (ReachConfig, "hop_limit", 0),
        (ReachConfig, "retry", 3),
    ],
)
def test_a_bad_setting_is_refused_by_name(cls: type, setting: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"{cls.__name__}\.{setting}"):
        cls(**{setting: value})


def test_a_dict_that_somebody_changes_later_changes_no_setting() -> None:
    tiers = {"light": 1.0}
    timeouts = TimeoutConfig(tiers=tiers)
    tiers["light"] = 99.0
    assert timeouts.of("light") == 1.0


def test_a_tier_that_a_newer_peer_invented_counts_as_interactive() -> None:
    timeouts = TimeoutConfig()
    assert timeouts.of("heavy") == 10.0
    assert timeouts.of("galactic") == timeouts.of("interactive") == 5.0
    assert timeouts.of(0.5) == 0.5
