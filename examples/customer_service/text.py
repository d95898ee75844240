"""TF-IDF in a page: which of a few texts is nearest to a question. Enough for an example, and free of downloads."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

__all__ = ["Vector", "Vectoriser", "cosine", "mean", "words"]

# Weight by word; words that weigh nothing are left out.
Vector: TypeAlias = Mapping[str, float]

_WORD = re.compile(r"[a-z0-9]+")
_COMMON = frozenset(
    _WORD.findall(
        "a am an and are as at be been but by can could did do does for from had has have he help how i if in is "
        "it its me my no not of on or our please so that the their them there they this to was we what when where "
        "which why will with would you your"
    )
)


def words(text: str) -> list[str]:
    """The telling words of a text, in order, without their endings: `Activating cards` gives `activat card`."""
    found = _WORD.findall(text.lower().replace("'", ""))
    return [_stem(word) for word in found if word not in _COMMON]


def _stem(word: str) -> str:
    for ending in ("ing", "ies", "ed", "es", "s", "e"):
        if word.endswith(ending) and len(word) - len(ending) >= 3:
            return word.removesuffix(ending)
    return word


class Vectoriser:
    """Turns texts into vectors in which a word weighs more the rarer it is among `texts`."""

    def __init__(self, texts: Sequence[str]) -> None:
        seen_in = Counter(word for text in texts for word in set(words(text)))
        self._weights = {word: math.log((1 + len(texts)) / (1 + n)) + 1 for word, n in seen_in.items()}

    def vector(self, text: str) -> Vector:
        """The vector of a text, of length 1; empty if none of its words is known."""
        counts = Counter(word for word in words(text) if word in self._weights)
        return _unit({word: (1 + math.log(n)) * self._weights[word] for word, n in counts.items()})


def cosine(a: Vector, b: Vector) -> float:
    """How alike two vectors of length 1 are, 0 to 1."""
    shorter, longer = sorted((a, b), key=len)
    return sum(weight * longer.get(word, 0.0) for word, weight in shorter.items())


def mean(vectors: Iterable[Vector]) -> Vector:
    """The centroid, scaled to length 1."""
    total: defaultdict[str, float] = defaultdict(float)
    for vector in vectors:
        for word, weight in vector.items():
            total[word] += weight
    return _unit(total)


def _unit(vector: Mapping[str, float]) -> Vector:
    length = math.sqrt(sum(weight * weight for weight in vector.values()))
    return {word: weight / length for word, weight in vector.items()} if length else {}
