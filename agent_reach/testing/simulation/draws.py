"""Randomness that two runs share although their decisions differ."""

from __future__ import annotations

import random

__all__ = ["KeyedRandom", "mix", "stream"]

_MASK = (1 << 64) - 1
# SplitMix64 (Steele, Lea, Flood 2014): its odd increment and the two multipliers of its finaliser.
_STEP = 0x9E3779B97F4A7C15
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
# Another odd number, so that the streams of neighbouring keys don't overlap.
_APART = 0xD1B54A32D192ED03
_UNIT = 2.0**-53


def stream(seed: int, name: str) -> random.Random:
    """Return the generator of one purpose: the same for the same seed and name, on any machine."""
    return random.Random(f"{seed}/{name}")


def mix(key: int, number: int) -> int:
    """Return the key of the `number`-th part of what `key` stands for."""
    return (key + number * _APART) & _MASK


class KeyedRandom(random.Random):
    """A generator that starts anew at a key in no time, so each attempt of each call has its own.

    The fourth call's second attempt draws the same service time whoever serves it, and whatever happened before:
    what two algorithms are compared by is then their decisions, not their luck.
    """

    _state = 0

    def rekey(self, key: int) -> None:
        """Start the stream of `key`, a whole number below 2**64."""
        self._state = key

    def random(self) -> float:
        """Return the next number of the stream, in [0, 1)."""
        z = self._state = (self._state + _STEP) & _MASK
        z = ((z ^ (z >> 30)) * _FIRST) & _MASK
        z = ((z ^ (z >> 27)) * _SECOND) & _MASK
        return ((z ^ (z >> 31)) >> 11) * _UNIT
