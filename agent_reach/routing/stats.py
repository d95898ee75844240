"""What we learnt of one instance: how fast it answers, how often it fails.

Reading never changes anything: `now` is a parameter, so a score can be explained and replayed.
"""

from __future__ import annotations

import math

__all__ = ["PeakEwma", "SuccessWindow"]


class PeakEwma:
    """Peak-sensitive moving average of a latency in seconds (finagle `PeakEwma.scala`, linkerd2 `ewma`).

    A sample above the average replaces it at once; a lower one pulls it down with weight 1 - exp(-dt / decay).
    Without samples the average fades to 0, so that an instance once slow is tried again.
    """

    __slots__ = ("_at", "_decay_s", "_value_s", "failed", "samples")

    def __init__(self, decay_s: float) -> None:
        self._decay_s = decay_s
        self._value_s = 0.0
        self._at = 0.0
        self.samples = 0
        # True if the latest sample is what a failure was booked as, and so no latency of an answer.
        self.failed = False

    def at(self, now: float) -> float:
        """Return the average as of `now`, in seconds; 0.0 without samples."""
        return self._value_s * math.exp(-max(0.0, now - self._at) / self._decay_s)

    def observe(self, latency_s: float, now: float, *, failed: bool = False) -> None:
        """Take in one sample, in seconds; `failed` if it stands for a failure."""
        self.samples += 1
        self.failed = failed
        if latency_s > self._value_s:
            self._value_s = latency_s
        else:
            keep = math.exp(-max(0.0, now - self._at) / self._decay_s)
            self._value_s = self._value_s * keep + latency_s * (1.0 - keep)
        self._at = now


class SuccessWindow:
    """Successes and failures of the last `window_s` seconds, counted in ten buckets of a tenth each."""

    __slots__ = ("_bucket_s", "_failures", "_newest", "_successes")

    _BUCKETS = 10

    def __init__(self, window_s: float) -> None:
        self._bucket_s = window_s / self._BUCKETS
        self._newest = 0
        self._successes = [0] * self._BUCKETS
        self._failures = [0] * self._BUCKETS

    def record(self, success: bool, now: float) -> None:
        """Count one call."""
        slot = self._turn(now)
        (self._successes if success else self._failures)[slot] += 1

    def counts(self, now: float) -> tuple[int, int]:
        """Return (successes, failures) of the window that ends at `now`."""
        newest = int(now / self._bucket_s)
        live = [
            bucket % self._BUCKETS
            for bucket in range(max(newest, self._newest) - self._BUCKETS + 1, self._newest + 1)
        ]
        return sum(self._successes[i] for i in live), sum(self._failures[i] for i in live)

    def clear(self) -> None:
        """Forget everything."""
        self._successes = [0] * self._BUCKETS
        self._failures = [0] * self._BUCKETS

    def _turn(self, now: float) -> int:
        """Empty the buckets that fell out of the window, and return the one that `now` counts in."""
        bucket = max(int(now / self._bucket_s), self._newest)
        for passed in range(max(self._newest + 1, bucket - self._BUCKETS + 1), bucket + 1):
            self._successes[passed % self._BUCKETS] = 0
            self._failures[passed % self._BUCKETS] = 0
        self._newest = bucket
        return bucket % self._BUCKETS
