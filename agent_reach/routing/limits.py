"""How many calls an instance bears at once, learnt from how long they take."""

from __future__ import annotations

from agent_reach.config import LimitConfig

__all__ = ["GradientLimit"]


class GradientLimit:
    """Netflix concurrency-limits `Gradient2Limit`: while latency stays near its long average the limit grows by a
    queue's worth; when it rises the limit shrinks in proportion.
    """

    __slots__ = ("_config", "_limit", "_long_s")

    # Room for a short queue: without it the limit could never grow.
    _QUEUE = 4

    def __init__(self, config: LimitConfig) -> None:
        self._config = config
        self._limit = float(config.initial)
        self._long_s = 0.0

    @property
    def value(self) -> int:
        """Calls that may be in flight, 1 or more."""
        return int(self._limit)

    def observe(self, latency_s: float, in_flight: int, *, dropped: bool = False) -> None:
        """Take in how long one call took, in seconds, and how many were in flight when it began; `dropped`: the
        instance refused it, or it timed out.
        """
        config = self._config
        if dropped:
            self._limit = max(config.least, self._limit * 0.9)
            return
        if self._long_s == 0.0:
            self._long_s = latency_s
        self._long_s += (latency_s - self._long_s) * 2 / (config.long_window + 1)
        # After an overload the long average is too high; let it come down faster than it went up.
        if self._long_s > 2 * latency_s:
            self._long_s *= 0.95
        if in_flight < self._limit / 2:
            return
        gradient = max(0.5, min(1.0, config.tolerance * self._long_s / max(latency_s, 1e-9)))
        wanted = self._limit * gradient + self._QUEUE
        self._limit += (wanted - self._limit) * config.smoothing
        self._limit = max(config.least, min(config.most, self._limit))
