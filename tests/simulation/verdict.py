"""Who did best where, and where we lose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from tests.simulation.comparing import P99, SUCCESS, Difference, Measure, Outcomes, paired
from tests.simulation.running import Result

__all__ = ["Rival", "Standing", "Verdict", "judge"]

# One point of success is what a reader takes for "as good as".
_NEAR = 0.01


@dataclass(frozen=True, slots=True)
class Rival:
    """One whose median is better than ours. `duplicates`: how often it ran twice what must run once."""

    name: str
    value: float
    difference: Difference
    duplicates: int


@dataclass(frozen=True, slots=True)
class Standing:
    """Ours in one scenario by one measure; `better`: whose median is better, the best first. `alike`: all medians
    are the same, so the scenario says nothing.
    """

    scenario: str
    ours: float
    better: tuple[Rival, ...]
    alike: bool

    @property
    def best(self) -> bool:
        """True if nobody's median is better."""
        return not self.better

    @property
    def beaten_by(self) -> Rival | None:
        """The best of those that are better by more than twice the standard error."""
        return next((rival for rival in self.better if rival.difference.beyond_error), None)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Ours in every scenario, by success and by p99."""

    success: tuple[Standing, ...]
    p99: tuple[Standing, ...]

    @property
    def success_best(self) -> int:
        """In how many scenarios nobody succeeds more often."""
        return sum(standing.best for standing in self.success)

    @property
    def success_near(self) -> int:
        """In how many ours is the best, or within one point of it."""
        return sum(not self._misses(standing) for standing in self.success)

    @property
    def p99_best(self) -> int:
        """In how many nobody's p99 is lower."""
        return sum(standing.best for standing in self.p99)

    @property
    def p99_even(self) -> int:
        """In how many nobody's p99 is lower by more than twice the standard error."""
        return sum(standing.beaten_by is None for standing in self.p99)

    @property
    def success_losses(self) -> tuple[tuple[Standing, Rival], ...]:
        """Where another succeeds more often: by more than a point, or by less, but by more than chance."""
        lost = [(s, s.beaten_by or (s.better[0] if self._misses(s) else None)) for s in self.success]
        return tuple((standing, rival) for standing, rival in lost if rival is not None)

    @property
    def p99_losses(self) -> tuple[tuple[Standing, Rival], ...]:
        """Where another's p99 is lower by more than chance. Is that one who ran calls twice, then also the best
        of those who didn't.
        """
        lost = []
        for standing in self.p99:
            beaten = [rival for rival in standing.better if rival.difference.beyond_error]
            fair = [rival for rival in beaten if not rival.duplicates]
            lost += [(standing, rival) for rival in dict.fromkeys(beaten[:1] + fair[:1])]
        return tuple(lost)

    @staticmethod
    def _misses(standing: Standing) -> bool:
        # Half a millionth: 0.99 is as near to 1 as the page says, whatever binary fractions say.
        return not standing.best and standing.better[0].value - standing.ours > _NEAR + 5e-7


def judge(outcomes: Outcomes, ours: str) -> Verdict:
    """Compare `ours` with every other algorithm in every scenario."""
    return Verdict(
        tuple(_standing(SUCCESS, scenario, by_name, ours) for scenario, by_name in outcomes.items()),
        tuple(_standing(P99, scenario, by_name, ours) for scenario, by_name in outcomes.items()),
    )


def _standing(measure: Measure, scenario: str, by_name: Mapping[str, Sequence[Result]], ours: str) -> Standing:
    own = measure.values(by_name[ours])
    better, medians = [], set()
    for name, results in by_name.items():
        values = measure.values(results)
        medians.add(median(values))
        if measure.better(median(values), median(own)):
            duplicates = sum(result.unsafe_duplicates for result in results)
            better.append(Rival(name, median(values), paired(values, own), duplicates))
    better.sort(key=lambda rival: rival.value, reverse=measure.higher_is_better)
    return Standing(scenario, median(own), tuple(better), alike=len(medians) == 1)
