"""What we learnt of one instance: how fast it answers, how often it fails.

Reading never changes anything: `now` is a parameter, so a score can be explained and replayed.
"""

from __future__ import annotations

import math
from collections import deque

__all__ = ["Latency", "RecentLatencies", "SlidingPair", "SuccessShare", "faded"]


class Latency:
    """How long calls take, in seconds: the geometric mean of the latest, a sample weighing 1 - exp(-dt / decay).

    The time constant and the fading are Finagle's (`PeakEwma.scala`): without samples the mean fades to 0, so
    that an instance once slow is tried again. The logarithm is averaged because latencies of agents spread over
    orders of magnitude: one call in a hundred that takes a minute must not hide what the other 99 say. A failure
    is booked as so many seconds at once, and fades alike; twice as fast if the call before it was answered, for one
    may be an accident.
    """

    __slots__ = (
        "_again",
        "_decay_s",
        "_log",
        "failed_at",
        "failed_decay_s",
        "failed_s",
        "mean_s",
        "observed_at",
        "samples",
    )

    def __init__(self, decay_s: float) -> None:
        self._decay_s = decay_s
        self._log = 0.0
        self.mean_s = 0.0
        self.observed_at = 0.0
        # What the latest failure was booked as, 0.0 without any.
        self.failed_s = 0.0
        self.failed_at = 0.0
        self.failed_decay_s = decay_s
        self._again = False
        # Calls that were answered or failed.
        self.samples = 0

    def at(self, now: float) -> float:
        """Return the mean, or what is left of the latest failure if that is more, as of `now`, in seconds."""
        mean_s = self.mean_s
        if now > self.observed_at:
            mean_s *= math.exp((self.observed_at - now) / self._decay_s)
        return max(mean_s, self.booked_s(now)) if self.failed_s else mean_s

    def booked_s(self, now: float) -> float:
        """Return what is left of the latest failure, in seconds."""
        return faded(self.failed_s, self.failed_at, now, self.failed_decay_s)

    def observe(self, latency_s: float, now: float) -> None:
        """Take in how long a call took, in seconds."""
        log = math.log(max(latency_s, 1e-6))
        # A mean of 0.0: it has only failed so far, if anything.
        if self.mean_s and now > self.observed_at:
            log += (self._log - log) * math.exp((self.observed_at - now) / self._decay_s)
        elif self.mean_s:
            log = max(log, self._log)
        self._log = log
        self.mean_s = math.exp(log)
        self.observed_at = now
        self.samples += 1
        self._again = False

    def fail(self, booked_s: float, now: float) -> None:
        """Take in a failure, booked as so many seconds."""
        self.failed_s = booked_s
        self.failed_at = now
        self.failed_decay_s = self._decay_s if self._again else self._decay_s / 2
        self._again = True
        self.samples += 1

    def forgive(self) -> None:
        """Forget the latest failure: the instance is well again."""
        self.failed_s = 0.0
        if not self.mean_s:
            # Nothing but failures is known, so nothing is.
            self.samples = 0


def faded(value: float, since: float, now: float, decay_s: float) -> float:
    """Return what is left at `now` of a `value` that fades exponentially; `decay_s` is its time constant."""
    return value * math.exp((since - now) / decay_s) if now > since else value


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
