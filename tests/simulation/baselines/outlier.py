"""Round robin with outlier ejection and gRPC's retries.

Source: grpc/proposal, read in its repository: `A50-xds-outlier-detection.md` (ejection), `A6-client-retries.md`
(retries; the stored copies say jitter 0 to 1, the current text 0.8 to 1.2, as PRIOR-ART.md notes; this is the
current one). grpc/grpc: `doc/connection-backoff.md` (the stored copy has an old initial value of 20 s; today's is
1 s), `doc/http-grpc-status-mapping.md` from memory.

Ejection (A50, its defaults, both algorithms on):
- Every 10 s, counted from the first call, over the calls that ended since the sweep before. First by success
  rate: if at least 5 addresses had 100 calls or more, of those each whose rate is below mean - 1.9 x standard
  deviation. Then by failure percentage: if there are at least 5 addresses, each with 50 calls or more and more
  than 85 % failures.
- Before each address: stop if MORE than 10 % of all are ejected. So of 5, one can be ejected; of 11, two (0 % and
  9 % aren't more than 10 %, 18 % is). One that is ejected isn't ejected again.
- For 30 s x the multiplier, 300 s at the most; the multiplier counts the ejections and loses 1 in each sweep that
  finds the address in service. It ends in a sweep only.
- A success is an answer of status OK; every error counts as a failure (4xx, too, for A50 knows no other), but a
  connection that couldn't be made (no call reached the address) and a call cancelled here count for nothing.

Picks: the next in the circle that is neither ejected nor waiting to be connected again. After a refused
connection an address waits 1 s x 1.6^n, up to 120 s, +-20 %. With nobody left the attempt fails as UNAVAILABLE at
once (calls don't wait for ready).

Retries (A6, the policy that it prints): up to 4 attempts that count.
- By status, whether idempotent or not: UNAVAILABLE (lost connection; 502, 503, and a 504 that isn't the agent's
  own) and 429. DEADLINE_EXCEEDED (timed out), all else 4xx and 5xx, and unreadable answers aren't retried.
- Pause: min(0.1 s x 2^(n-1), 1 s) x 0.8 to 1.2. With a pushback (Retry-After): exactly that, and the pauses begin
  anew.
- Throttle, for each capability: 10 tokens at first and at the most, each failure of these kinds takes 1, each
  success adds 0.1; at 5 or fewer nothing is retried.
- Transparent retries, at once, not counted, not throttled: of what never left the client (refused connection), as
  often as somebody is left; and once in a call of what a server refused unseen (here: an instance that drains).
- A call that times out isn't repeated, so each attempt may use all that is left of a total that the caller named.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from agent_reach.routing.instance import Candidate
from agent_reach.routing.outcomes import Cancelled, LostAnswer, Outcome, Rejected, Succeeded, Unsent
from tests.simulation.baselines.common import BaselineSession, Rules, Stats

__all__ = ["Outlier"]

_INTERVAL_S, _BASE_S, _MAX_S, _MAX_PERCENT = 10.0, 30.0, 300.0, 10
_STDEV_FACTOR, _RATE_HOSTS, _RATE_VOLUME = 1.9, 5, 100
_FAILED_PERCENT, _PERCENT_HOSTS, _PERCENT_VOLUME = 85, 5, 50
_CONNECT_S, _CONNECT_MULTIPLIER, _MAX_CONNECT_S = 1.0, 1.6, 120.0
_PAUSE_S, _PAUSE_MULTIPLIER, _MAX_PAUSE_S, _JITTER = 0.1, 2.0, 1.0, 0.2
_TOKENS, _TOKENS_PER_SUCCESS = 10.0, 0.1
# Sweeps come at multiples of the interval, and so do the ends of ejections; they must not miss each other by a bit.
_TINY_S = 1e-6


class _Address(Stats):
    """`successes` and `failures` since the latest sweep; `connect_at`: when a connection may be tried again."""

    __slots__ = ("connect_at", "ejected_at", "failures", "multiplier", "refused", "successes")

    def __init__(self) -> None:
        super().__init__()
        self.successes = 0
        self.failures = 0
        self.ejected_at: float | None = None
        self.multiplier = 0
        self.refused = 0
        self.connect_at = 0.0

    def eject(self, now: float) -> None:
        """Take it out of service."""
        self.ejected_at = now
        self.multiplier += 1

    def settle(self, now: float) -> None:
        """End a sweep: forget the calls, perhaps put it back into service."""
        self.successes = self.failures = 0
        if self.ejected_at is None:
            self.multiplier = max(0, self.multiplier - 1)
        elif now + _TINY_S >= self.ejected_at + min(_BASE_S * self.multiplier, _MAX_S):
            self.ejected_at = None


class Outlier(Rules[_Address]):
    """The next that isn't ejected."""

    max_attempts = 4

    def __init__(self, rng: random.Random, zone: str | None) -> None:
        super().__init__(rng, zone)
        self._turn = int(rng.random() * 1000)
        self._next_sweep: float | None = None
        self._tokens = _TOKENS

    def fresh(self, now: float) -> _Address:
        """In service."""
        return _Address()

    def before_change(self, candidates: Sequence[Candidate], now: float) -> None:
        """Sweep over those that were there when it was due."""
        self._sweep_until(candidates, now)

    def pick(self, call: BaselineSession, candidates: Sequence[Candidate], now: float) -> Candidate | None:
        """Return the next in the circle that is in service."""
        self._sweep_until(candidates, now)
        count = len(candidates)
        for _ in range(count):
            self._turn += 1
            candidate = candidates[self._turn % count]
            address = self.of(candidate, now)
            if address.ejected_at is None and address.connect_at <= now:
                return candidate
        return None

    def learn(self, call: BaselineSession, stats: _Address, outcome: Outcome, elapsed_s: float, now: float) -> None:
        """Count the call for the next sweep, and whether a connection was there."""
        self._sweep_until(call.candidates(), now)
        match outcome:
            case Succeeded():
                stats.successes += 1
                stats.refused = 0
                self._tokens = min(_TOKENS, self._tokens + _TOKENS_PER_SUCCESS)
            case Unsent(local=False):
                wait_s = min(_CONNECT_S * _CONNECT_MULTIPLIER**stats.refused, _MAX_CONNECT_S)
                stats.refused += 1
                stats.connect_at = now + wait_s * (0.8 + 0.4 * self.rng.random())
            case Cancelled() | Unsent():
                pass
            case _:
                stats.failures += 1
                stats.refused = 0

    def retry_in_s(self, call: BaselineSession, candidate: Candidate, outcome: Outcome, now: float) -> float | None:
        """At once if nobody saw it, else by the policy."""
        if isinstance(outcome, Unsent) and not outcome.local:
            return 0.0
        if _unseen(outcome) and not call.nacked:
            call.nacked = True
            return 0.0
        if not _retryable(outcome):
            return None
        return self._by_policy(call, outcome.retry_after_s if isinstance(outcome, Rejected) else None)

    def nobody_in_s(self, call: BaselineSession) -> float | None:
        """An attempt without anybody to send it to fails as UNAVAILABLE."""
        return self._by_policy(call, None)

    def is_last(self, call: BaselineSession, candidate: Candidate) -> bool:
        """A time-out is never repeated."""
        return True

    def _by_policy(self, call: BaselineSession, pushback_s: float | None) -> float | None:
        self._tokens = max(0.0, self._tokens - 1.0)
        call.charged += 1
        if call.charged >= self.max_attempts or self._tokens <= _TOKENS / 2:
            return None
        if pushback_s is not None:
            call.backoffs = 0
            return pushback_s
        pause_s = min(_PAUSE_S * _PAUSE_MULTIPLIER**call.backoffs, _MAX_PAUSE_S)
        call.backoffs += 1
        return pause_s * (1.0 - _JITTER + 2.0 * _JITTER * self.rng.random())

    def _sweep_until(self, candidates: Sequence[Candidate], now: float) -> None:
        if self._next_sweep is None:
            self._next_sweep = now + _INTERVAL_S
        while self._next_sweep <= now:
            self._sweep([self.of(candidate, now) for candidate in candidates], self._next_sweep)
            self._next_sweep += _INTERVAL_S

    def _sweep(self, addresses: list[_Address], at: float) -> None:
        _by_success_rate(addresses, at)
        _by_failure_percentage(addresses, at)
        for address in addresses:
            address.settle(at)


def _by_success_rate(addresses: list[_Address], now: float) -> None:
    rates = [
        (address, address.successes / (address.successes + address.failures))
        for address in addresses
        if address.successes + address.failures >= _RATE_VOLUME
    ]
    if len(rates) < _RATE_HOSTS:
        return
    mean = sum(rate for _, rate in rates) / len(rates)
    deviation = math.sqrt(sum((rate - mean) ** 2 for _, rate in rates) / len(rates))
    for address, rate in rates:
        if _full(addresses):
            return
        if address.ejected_at is None and rate < mean - _STDEV_FACTOR * deviation:
            address.eject(now)


def _by_failure_percentage(addresses: list[_Address], now: float) -> None:
    if len(addresses) < _PERCENT_HOSTS:
        return
    for address in addresses:
        if _full(addresses):
            return
        volume = address.successes + address.failures
        if volume < _PERCENT_VOLUME or address.ejected_at is not None:
            continue
        if 100 * address.failures > _FAILED_PERCENT * volume:
            address.eject(now)


def _full(addresses: list[_Address]) -> bool:
    ejected = sum(address.ejected_at is not None for address in addresses)
    return 100 * ejected > _MAX_PERCENT * len(addresses)


def _unseen(outcome: Outcome) -> bool:
    return isinstance(outcome, Rejected) and not outcome.error.executed and outcome.state == "draining"


def _retryable(outcome: Outcome) -> bool:
    match outcome:
        case Unsent():
            return True
        case LostAnswer():
            return not outcome.timed_out
        case Rejected():
            gateway = outcome.status == 504 and not outcome.enveloped
            return outcome.status in (429, 502, 503) or gateway
        case _:
            return False
