"""How long to wait before the next attempt."""

from __future__ import annotations

import random

from agent_reach.config import RetryConfig

__all__ = ["delay_s"]


def delay_s(retry: int, config: RetryConfig, rng: random.Random) -> float:
    """Seconds before the `retry`-th retry (1-based): full jitter over base x multiplier^(retry - 1), capped.

    Full jitter spreads retries best (AWS Architecture Blog, "Exponential Backoff And Jitter", 2015).
    """
    ceiling = min(config.max_s, config.base_s * config.multiplier ** (retry - 1))
    return rng.random() * ceiling
