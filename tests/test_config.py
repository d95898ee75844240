"""Settings are checked when they are built; a bad value is never silently mended."""

from __future__ import annotations

from typing import Any

import pytest

from agent_reach.config import (
    AffinityConfig,
    BreakerConfig,
    BulkheadConfig,
    EjectionConfig,
    HedgeConfig,
    LimitConfig,
    LocalityConfig,
    Policy,
    ReachConfig,
    RegistryConfig,
    RetryConfig,
    ScoreWeights,
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
        (ReachConfig, "hedge", True),
        (ReachConfig, "locality", AffinityConfig()),
        (RetryConfig, "budget_ratio", -0.1),
        (RetryConfig, "budget_ratio", 11),
        (RetryConfig, "budget_least", 1.5),
        (RetryConfig, "budget_window_s", 0),
        (RetryConfig, "tree_allowance", -1),
        (RetryConfig, "patience_s", -0.1),
        (RetryConfig, "patience_s", float("inf")),
        (HedgeConfig, "percentile", 0.0),
        (HedgeConfig, "percentile", 95),
        (HedgeConfig, "budget_ratio", 1.1),
        (HedgeConfig, "least_s", -1),
        (HedgeConfig, "min_samples", 0),
        (LimitConfig, "least", 0),
        (LimitConfig, "initial", 3),
        (LimitConfig, "most", 19),
        (LimitConfig, "tolerance", 0.9),
        (LimitConfig, "smoothing", 0.0),
        (LimitConfig, "long_window", 0),
        (BulkheadConfig, "per_tier", 0),
        (BulkheadConfig, "per_slot", 0),
        (BulkheadConfig, "adaptive", True),
        (BreakerConfig, "unreachable_s", 0),
        (BreakerConfig, "unreachable_s", 301.0),
        (ScoringConfig, "choices", 1),
        (ScoringConfig, "assumed_slots", 0),
        (ScoringConfig, "assumed_slots", 2.5),
        (ScoringConfig, "weights", {"success": 1.0}),
        (ScoreWeights, "latency", -0.1),
        (ScoreWeights, "latency", float("nan")),
        (LocalityConfig, "spill", 0.5),
        (AffinityConfig, "remembered", 0),
        (Policy, "retry", 3),
        (Policy, "hedge", True),
        (Policy, "trip_after", 0),
        (Policy, "trip_after", 2.0),
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


@pytest.mark.parametrize(
    ("timeout", "tier"),
    [
        ("light", "light"),
        ("long", "long"),
        ("galactic", "interactive"),
        (0.5, "light"),
        (3, "light"),
        (3.1, "interactive"),
        (5.0, "interactive"),
        (7, "heavy"),
        (59.0, "long"),
        (3600.0, "long"),
    ],
)
def test_a_time_in_seconds_belongs_to_the_shortest_tier_that_is_as_long(timeout: str | float, tier: str) -> None:
    assert TimeoutConfig().tier_of(timeout) == tier


def test_without_tiers_all_calls_belong_to_one() -> None:
    timeouts = TimeoutConfig(tiers={})
    assert timeouts.tier_of(7.0) == timeouts.tier_of("light") == "interactive"


def test_a_weighted_score_needs_something_to_weigh() -> None:
    with pytest.raises(ConfigError, match="at least one share must be above 0"):
        ScoreWeights()


@pytest.mark.parametrize("strategy", ["fastest", "", None, 1])
def test_a_strategy_that_does_not_exist_is_refused_with_those_that_do(strategy: Any) -> None:
    with pytest.raises(ConfigError, match="'single', 'round_robin', 'weighted_random'"):
        ReachConfig(strategy=strategy)
    if strategy is not None:
        with pytest.raises(ConfigError, match="'single', 'round_robin', 'weighted_random'"):
            Policy(strategy=strategy)


def test_the_presets_of_policies_are_as_their_names_promise() -> None:
    assert Policy.TOOL.hedge is not None
    assert Policy.ANALYSIS.hedge is False, "never twice at a time, whatever the settings say"
    assert Policy.ANALYSIS.retry is not None
    assert Policy.ANALYSIS.retry.max_attempts == 2
    assert Policy.CRITICAL.retry is not None
    assert (Policy.CRITICAL.retry.max_attempts, Policy.CRITICAL.trip_after) == (1, 2)
    assert Policy() == Policy(retry=None, hedge=None, strategy=None, trip_after=None)
