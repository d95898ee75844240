"""What we learnt of one instance: how fast it answers, how often it fails.

Reading never changes anything: `now` is a parameter, so a score can be explained and replayed.
"""

from __future__ import annotations

import math
from collections import deque

__all__ = ["PeakEwma", "RecentLatencies", "SlidingPair", "SuccessShare"]


class PeakEwma:
    """Peak-sensitive moving average of a latency in seconds (finagle `PeakEwma.scala`, linkerd2 `ewma`).

    A sample above the average replaces it at once; a lower one pulls it down with weight 1 - exp(-dt / decay).
    Without samples the average fades to 0, so that an instance once slow is tried again. `value_s` is the average
    as of `observed_at`, the time of the latest sample.
    """

    __slots__ = ("_decay_s", "failed", "observed_at", "samples", "value_s")

    def __init__(self, decay_s: float) -> None:
        self._decay_s = decay_s
        self.value_s = 0.0
        self.observed_at = 0.0
        self.samples = 0
        # True if the latest sample is what a failure was booked as, and so no latency of an answer.
        self.failed = False

    def at(self, now: float) -> float:
        """Return the average as of `now`, in seconds; 0.0 without samples."""
        age_s = now - self.observed_at
        return self.value_s * math.exp(-age_s / self._decay_s) if age_s > 0 else self.value_s

    def observe(self, latency_s: float, now: float, *, failed: bool = False) -> None:
        """Take in one sample, in seconds; `failed` if it stands for a failure."""
        self.samples += 1
        self.failed = failed
        if latency_s > self.value_s:
            self.value_s = latency_s
        else:
            keep = math.exp(-max(0.0, now - self.observed_at) / self._decay_s)
            self.value_s = self.value_s * keep + latency_s * (1.0 - keep)
        self.observed_at = now


class SlidingPair:
    """Two counters over the last `window_s` seconds, in ten buckets of a tenth each: successes and failures, or
    calls and retries.
    """

    __slots__ = ("_bucket_s", "_firsts", "_newest", "_seconds")

    _BUCKETS = 10

    def __init__(self, window_s: float) -> None:
        self._bucket_s = window_s / self._BUCKETS
        self._newest = 0
        self._firsts = [0] * self._BUCKETS
        self._seconds = [0] * self._BUCKETS

    def count(self, first: bool, now: float) -> None:
        """Count one of the first kind, or of the second."""
        slot = self._turn(now)
        (self._firsts if first else self._seconds)[slot] += 1

    def counts(self, now: float) -> tuple[int, int]:
        """Return both counts of the window that ends at `now`."""
        newest = int(now / self._bucket_s)
        if newest <= self._newest:
            return sum(self._firsts), sum(self._seconds)
        live = [bucket % self._BUCKETS for bucket in range(newest - self._BUCKETS + 1, self._newest + 1)]
        return sum(self._firsts[i] for i in live), sum(self._seconds[i] for i in live)

    def clear(self) -> None:
        """Forget everything."""
        self._firsts = [0] * self._BUCKETS
        self._seconds = [0] * self._BUCKETS

    def _turn(self, now: float) -> int:
        """Empty the buckets that fell out of the window, and return the one that `now` counts in."""
        bucket = max(int(now / self._bucket_s), self._newest)
        for passed in range(max(self._newest + 1, bucket - self._BUCKETS + 1), bucket + 1):
            self._firsts[passed % self._BUCKETS] = 0
            self._seconds[passed % self._BUCKETS] = 0
        self._newest = bucket
        return bucket % self._BUCKETS


class SuccessShare:
    """Which share of the last calls succeeded, 0..1: an average over about 50 of them, each weighing less than the
    next, that fades back to 1 within 15 minutes without calls.
    """

    __slots__ = ("_at", "_value")

    _NEW = 2 / (50 + 1)
    _FADE_S = 900.0

    def __init__(self) -> None:
        self._value = 1.0
        self._at = 0.0

    def at(self, now: float) -> float:
        """Return the share as of `now`."""
        return 1.0 - (1.0 - self._value) * math.exp(-max(0.0, now - self._at) / self._FADE_S)

    def observe(self, success: bool, now: float) -> None:
        """Take in how one call ended."""
        self._value = self.at(now) * (1.0 - self._NEW) + (self._NEW if success else 0.0)
        self._at = now


class RecentLatencies:
    """The latest 200 latencies of a capability, over all its instances, for their percentiles."""

    __slots__ = ("_recent",)

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=200)

    def __len__(self) -> int:
        return len(self._recent)

    def observe(self, latency_s: float) -> None:
        """Take in one latency, in seconds."""
        self._recent.append(latency_s)

    def percentile(self, share: float) -> float:
        """Return what `share` (0..1) of them stay below, in seconds; there must be some."""
        ordered = sorted(self._recent)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
