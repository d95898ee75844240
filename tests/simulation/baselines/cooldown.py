"""Random choice with cooldowns: the router of LiteLLM, by its defaults.

Source: BerriAI/litellm, read in the stored copies of its repository: `litellm/router_utils/cooldown_handlers.py`
(what cools down, with the least volume of 5 that came later), `litellm/constants.py` (5 s, 50 %, 5 calls, 1,000
calls; 0.5 s, 8 s, 0.75), `litellm/utils.py` (`_should_retry`, `_calculate_retry_after`), the retry loop of
`litellm/router.py` by way of a copy of it, and docs.litellm.ai `router/learn/reliability` (a retry leaves out
whom it tried).

- A random deployment of those not in cooldown, by weight (the strategy `simple-shuffle`); on a retry one that the
  call didn't try, while one is left.
- Cooldown after a failure, if it is a 429, 401, 408, 404, or no 4xx at all (so a lost connection and a time-out,
  too), and
    a) it is a 429 or 401 or 404 (or what else isn't worth repeating), or
    b) more than 50 % of at least 5 calls in this minute of the clock failed, or
    c) all of at least 1,000 calls in it failed.
  A lone deployment is spared (b), and (a) for a 429.
- With `allowed_fails`, a count takes the place of (a) to (c), as documented for that setting: more failures than
  that in a minute. `allowed_fails=2` is "three failures within a minute".
- 5 s long, or as long as the answer's Retry-After says. All in cooldown: the call fails at once, also a retry.
- Two retries (num_retries), so three attempts in all, of 408, 409, 429, 5xx, time-outs and lost connections; of
  401 and 403 only with other deployments; of nothing else. Whether a call is idempotent isn't asked.
- At once, while another deployment isn't in cooldown; else after Retry-After (up to 60 s), else 0.5 s x 2^retries
  up to 8 s, each plus up to 0.75 s of jitter.

Unlike LiteLLM, where some connection errors are exempt from cooldown (those that it names APIConnectionError),
here all of them count: the more favourable reading.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from agent_reach.routing.instance import Candidate
from agent_reach.routing.outcomes import Cancelled, LostAnswer, Outcome, Rejected, Succeeded
from tests.simulation.baselines.common import BaselineSession, Rules, Stats

__all__ = ["Cooldown"]

_COOLDOWN_S = 5.0
_MINUTE_S = 60.0
_SHARE, _LEAST_CALLS, _LEAST_CALLS_ALL_FAILED = 0.5, 5, 1000
_PAUSE_S, _MAX_PAUSE_S, _JITTER_S, _MAX_RETRY_AFTER_S = 0.5, 8.0, 0.75, 60.0
_COOLING_4XX = (401, 404, 408, 429)
_REPEATED_4XX = (408, 409, 429)


class _Deployment(Stats):
    """`minute` is the minute of the clock that `calls` and `failures` count in; `until` ends the cooldown."""

    __slots__ = ("calls", "failures", "minute", "until")

    def __init__(self) -> None:
        super().__init__()
        self.minute = -1
        self.calls = 0
        self.failures = 0
        self.until = 0.0

    def count(self, failed: bool, now: float) -> None:
        """Take in one call."""
        minute = int(now / _MINUTE_S)
        if minute != self.minute:
            self.minute, self.calls, self.failures = minute, 0, 0
        self.calls += 1
        self.failures += failed


class Cooldown(Rules[_Deployment]):
    """Random, but not one in cooldown."""

    max_attempts = 3

    def __init__(self, rng: random.Random, zone: str | None, *, allowed_fails: int | None = None) -> None:
        super().__init__(rng, zone)
        self._allowed_fails = allowed_fails

    def fresh(self, now: float) -> _Deployment:
        """Not in cooldown."""
        return _Deployment()

    def pick(self, call: BaselineSession, candidates: Sequence[Candidate], now: float) -> Candidate | None:
        """Return any that isn't in cooldown."""
        healthy = self._healthy(candidates, now)
        if call.tried:
            healthy = [c for c in healthy if c.agent_id not in call.tried] or healthy
        if not healthy:
            return None
        mark = self.rng.random() * sum(candidate.instance.info.weight for candidate in healthy)
        for candidate in healthy:
            mark -= candidate.instance.info.weight
            if mark < 0:
                return candidate
        return healthy[-1]

    def learn(
        self, call: BaselineSession, stats: _Deployment, outcome: Outcome, elapsed_s: float, now: float
    ) -> None:
        """Count the call, and begin a cooldown if it is due."""
        if isinstance(outcome, Cancelled):
            return
        failed = not isinstance(outcome, Succeeded)
        stats.count(failed, now)
        if failed and self._cools(stats, _status(outcome), alone=len(call.candidates()) <= 1):
            asked_s = outcome.retry_after_s if isinstance(outcome, Rejected) else None
            stats.until = now + (asked_s or _COOLDOWN_S)

    def retry_in_s(self, call: BaselineSession, candidate: Candidate, outcome: Outcome, now: float) -> float | None:
        """At once if another one isn't in cooldown, else after a pause."""
        retries = len(call.attempts) - 1
        candidates = call.candidates()
        healthy = self._healthy(candidates, now)
        status = _status(outcome)
        worth = status >= 500 or status in _REPEATED_4XX or (status in (401, 403) and len(candidates) > 1)
        if not worth or not healthy or retries + 1 >= self.max_attempts:
            return None
        if any(other.agent_id != candidate.agent_id for other in healthy):
            return 0.0
        jitter_s = _JITTER_S * self.rng.random()
        asked_s = outcome.retry_after_s if isinstance(outcome, Rejected) else None
        if asked_s is not None and 0 < asked_s <= _MAX_RETRY_AFTER_S:
            return asked_s + jitter_s
        return min(_PAUSE_S * 2.0**retries, _MAX_PAUSE_S) + jitter_s

    def _healthy(self, candidates: Sequence[Candidate], now: float) -> list[Candidate]:
        return [candidate for candidate in candidates if self.of(candidate, now).until <= now]

    def _cools(self, stats: _Deployment, status: int, *, alone: bool) -> bool:
        if 400 <= status < 500 and status not in _COOLING_4XX:
            return False
        if self._allowed_fails is not None:
            return stats.failures > self._allowed_fails
        if status < 500 and status not in _REPEATED_4XX:
            return True
        if status == 429 and not alone:
            return True
        if stats.calls >= _LEAST_CALLS_ALL_FAILED and stats.failures == stats.calls:
            return True
        return not alone and stats.calls >= _LEAST_CALLS and stats.failures > _SHARE * stats.calls


def _status(outcome: Outcome) -> int:
    """The HTTP status that LiteLLM gives a failure."""
    if isinstance(outcome, Rejected):
        return outcome.status
    return 408 if isinstance(outcome, LostAnswer) and outcome.timed_out else 500
