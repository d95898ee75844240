"""Which candidate gets the next attempt of one call."""

from __future__ import annotations

import random
from collections.abc import Sequence

from agent_reach.config import EjectionConfig
from agent_reach.routing import ejection
from agent_reach.routing.instance import Candidate
from agent_reach.routing.scoring import PeakEwmaScorer
from agent_reach.routing.selection import pick

__all__ = ["Chooser"]


class Chooser:
    """Remembers which instances a call has tried: one it didn't try yet comes before one that it did."""

    __slots__ = ("_config", "_preferred", "_rng", "_round", "_scorer", "_tried")

    def __init__(
        self, config: EjectionConfig, scorer: PeakEwmaScorer, rng: random.Random, preferred: tuple[str, ...]
    ) -> None:
        self._config = config
        self._scorer = scorer
        self._rng = rng
        self._preferred = preferred
        self._tried: set[str] = set()
        # Tried since all were tried last; when nobody else is left, everybody gets another turn.
        self._round: set[str] = set()

    def choose(self, candidates: Sequence[Candidate], now: float) -> Candidate | None:
        """Return the instance to send to and note that it is tried; None if nobody takes a call now."""
        chosen = self._choose(candidates, now)
        if chosen is None and self._round:
            self._round.clear()
            chosen = self._choose(candidates, now)
        if chosen is not None:
            self._tried.add(chosen.agent_id)
            self._round.add(chosen.agent_id)
        return chosen

    def untried(self, candidates: Sequence[Candidate], now: float) -> bool:
        """True if an instance that this call never tried would take it now."""
        usable = _Usable(now, self._tried)
        return any(usable(candidate) for candidate in candidates)

    def _choose(self, candidates: Sequence[Candidate], now: float) -> Candidate | None:
        if self._preferred:
            usable = _Usable(now, self._round)
            by_id = {c.agent_id: c for c in candidates if usable(c)}
            for agent_id in self._preferred:
                if agent_id in by_id:
                    return by_id[agent_id]
        steady = _Usable(now, self._round, avoided=False)
        chosen = self._pick(candidates, steady, now)
        if chosen is None:
            chosen = self._pick(candidates, _Usable(now, self._round), now)
        # Looking at all of them is only worth it after one that is shut out was drawn.
        if steady.met_shut_out and ejection.panics(candidates, now, self._config):
            chosen = self._pick(candidates, _Usable(now, self._round, shut_out=True), now)
        return chosen

    def _pick(self, candidates: Sequence[Candidate], usable: _Usable, now: float) -> Candidate | None:
        return pick(candidates, usable, self._scorer, now, self._rng)


class _Usable:
    """Says whether a candidate may be sent to; `avoided` and `shut_out` ones only where asked for."""

    __slots__ = ("_avoided", "_except", "_now", "_shut_out", "met_shut_out")

    def __init__(self, now: float, excluded: set[str], *, avoided: bool = True, shut_out: bool = False) -> None:
        self._now = now
        self._except = excluded
        self._avoided = avoided
        self._shut_out = shut_out
        self.met_shut_out = False

    def __call__(self, candidate: Candidate) -> bool:
        if candidate.full or candidate.learnt.busy_until > self._now or candidate.agent_id in self._except:
            return False
        if not candidate.instance.breaker.available(self._now):
            self.met_shut_out = True
            return self._shut_out
        return self._avoided or candidate.instance.avoid_until <= self._now
