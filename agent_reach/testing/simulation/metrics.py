"""What came of it all."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

__all__ = ["Counts", "DeadAttempt", "Metrics", "Summary", "quantile"]


def quantile(values: Iterable[float], share: float) -> float:
    """Return the smallest value that `share` of them don't exceed; NaN of none.

    >>> quantile([3.0, 1.0, 2.0], 0.5)
    2.0
    """
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else math.nan


class DeadAttempt(NamedTuple):
    """An attempt that met a closed port or a lost host, sent at `time_s` by a client."""

    time_s: float
    client_id: str
    agent_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Root calls that began in an interval. Times are seconds.

    In `p50_s`, `p99_s` and `p999_s` a failed call counts as its whole deadline, since its caller waited in vain;
    `ok_mean_s`, `ok_p50_s` and `ok_p99_s` are of the successful ones alone. `cancelled` calls, given up by their
    callers, are neither.
    """

    calls: int
    successes: int
    cancelled: int
    p50_s: float
    p99_s: float
    p999_s: float
    ok_mean_s: float
    ok_p50_s: float
    ok_p99_s: float
    attempts_per_call: float
    failures: Mapping[str, int]

    @property
    def failed(self) -> int:
        """Calls that ended with an error."""
        return self.calls - self.successes

    @property
    def success_share(self) -> float:
        """Successes of all calls; NaN without calls."""
        return self.successes / self.calls if self.calls else math.nan


@dataclass(slots=True)
class Counts:
    """What is counted of one capability, nested calls included."""

    attempts: int = 0
    nested_calls: int = 0
    nested_failures: int = 0
    executions: int = 0
    # Executions of a call beyond its first.
    duplicates: int = 0
    # Those of them that may have done harm.
    unsafe_duplicates: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)


class _Roots:
    """Root calls of one capability, one column each: 32 bytes a call."""

    __slots__ = ("attempts", "charged", "end", "started", "took")

    def __init__(self) -> None:
        self.started = array("d")
        self.took = array("d")
        # What a failure costs its caller; the time that it took for a success.
        self.charged = array("d")
        self.attempts = array("L")
        self.end = array("B")


_OK, _CANCELLED = "ok", "Cancelled"


class Metrics:
    """Filled by a run. Root calls that began before `warm_up_s` are left out of every count and summary unless
    asked for; so is what was done for them.
    """

    def __init__(self, warm_up_s: float = 0.0) -> None:
        self.warm_up_s = warm_up_s
        self.dead_attempts: list[DeadAttempt] = []
        self._roots: dict[str, _Roots] = {}
        self._counts: dict[str, Counts] = {}
        self._ends = [_OK, _CANCELLED]
        self._sent: dict[str, array[float]] = {}

    # --- questions -----------------------------------------------------------------------------------------

    @property
    def capabilities(self) -> list[str]:
        """Every capability that was called."""
        return sorted(self._roots.keys() | self._counts.keys())

    def summary(
        self, capability: str | None = None, *, from_s: float | None = None, until_s: float = math.inf
    ) -> Summary:
        """Sum up the root calls that began in [from_s, until_s), by default after the warm-up; None: of all."""
        begin = self.warm_up_s if from_s is None else from_s
        names = self._roots if capability is None else [capability] if capability in self._roots else []
        charged, fine = array("d"), array("d")
        ends: Counter[int] = Counter()
        attempts = 0
        for name in names:
            roots = self._roots[name]
            for i, started in enumerate(roots.started):
                if begin <= started < until_s:
                    end = roots.end[i]
                    ends[end] += 1
                    attempts += roots.attempts[i]
                    if end != 1:
                        charged.append(roots.charged[i])
                    if end == 0:
                        fine.append(roots.took[i])
        every, good = sorted(charged), sorted(fine)
        total = sum(ends.values())
        return Summary(
            calls=len(every),
            successes=len(good),
            cancelled=ends[1],
            p50_s=_of_sorted(every, 0.5),
            p99_s=_of_sorted(every, 0.99),
            p999_s=_of_sorted(every, 0.999),
            ok_mean_s=math.fsum(good) / len(good) if good else math.nan,
            ok_p50_s=_of_sorted(good, 0.5),
            ok_p99_s=_of_sorted(good, 0.99),
            attempts_per_call=attempts / total if total else math.nan,
            failures={self._ends[end]: count for end, count in sorted(ends.items()) if end > 1},
        )

    def counts(self, capability: str | None = None) -> Counts:
        """Return attempts, executions and outcomes of one capability, or of all."""
        if capability is not None:
            return self._counts.get(capability, Counts())
        whole = Counts()
        for counts in self._counts.values():
            whole.attempts += counts.attempts
            whole.nested_calls += counts.nested_calls
            whole.nested_failures += counts.nested_failures
            whole.executions += counts.executions
            whole.duplicates += counts.duplicates
            whole.unsafe_duplicates += counts.unsafe_duplicates
            whole.outcomes += counts.outcomes
        return whole

    def attempts_to(self, agent_id: str, from_s: float = 0.0, until_s: float = math.inf) -> int:
        """Count the attempts sent to a server in [from_s, until_s), the warm-up's too."""
        sent = self._sent.get(agent_id, ())
        return bisect_left(sent, until_s) - bisect_left(sent, from_s)

    def attempts_over_time(self, agent_id: str, until_s: float, bucket_s: float = 1.0) -> list[int]:
        """Count a server's attempts in buckets of `bucket_s` seconds, from 0 to `until_s`."""
        buckets = [0] * math.ceil(until_s / bucket_s)
        for sent in self._sent.get(agent_id, ()):
            if sent < until_s:
                buckets[int(sent / bucket_s)] += 1
        return buckets

    def first_use_after(self, agent_id: str, time_s: float) -> float | None:
        """When it was first sent something at `time_s` or later."""
        sent = self._sent.get(agent_id, ())
        at = bisect_left(sent, time_s)
        return sent[at] if at < len(sent) else None

    def last_use_before(self, agent_id: str, time_s: float) -> float | None:
        """When it was last sent something before `time_s`; with infinity: at all."""
        sent = self._sent.get(agent_id, ())
        at = bisect_left(sent, time_s)
        return sent[at - 1] if at else None

    # --- what a run reports --------------------------------------------------------------------------------

    def ended(
        self, capability: str, started: float, took_s: float, deadline_s: float, attempts: int, failure: str | None
    ) -> None:
        """A root call ended; `failure` is the error's class, "Cancelled" if its caller gave up, else None."""
        roots = self._roots.get(capability)
        if roots is None:
            roots = self._roots[capability] = _Roots()
        roots.started.append(started)
        roots.took.append(took_s)
        roots.charged.append(took_s if failure is None else max(took_s, deadline_s))
        roots.attempts.append(attempts)
        roots.end.append(0 if failure is None else self._end(failure))

    def count(self, capability: str, started: float) -> Counts | None:
        """Return where to count what is done for a root call that began then; None in the warm-up."""
        if started < self.warm_up_s:
            return None
        counts = self._counts.get(capability)
        if counts is None:
            counts = self._counts[capability] = Counts()
        return counts

    def dead(self, sent_at: float, client_id: str, agent_id: str) -> None:
        """An attempt found nobody."""
        self.dead_attempts.append(DeadAttempt(sent_at, client_id, agent_id))

    def sent_to(self, agent_id: str) -> Callable[[float], None]:
        """Return what notes the time of each attempt sent to a server, in order."""
        return self._sent.setdefault(agent_id, array("d")).append

    def _end(self, failure: str) -> int:
        if failure not in self._ends:
            self._ends.append(failure)
        return self._ends.index(failure)


def _of_sorted(ordered: list[float], share: float) -> float:
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else math.nan
