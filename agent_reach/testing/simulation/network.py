"""How long a message travels."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Network"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """Round trips in seconds: within a zone, and what is added between zones and between regions.

    A zone is named "region/zone". Who names none is as near as can be. `connect_timeout_s` is how long a client
    waits for a connection that hangs.
    """

    rtt_s: float = 0.001
    cross_zone_s: float = 0.001
    cross_region_s: float = 0.05
    connect_timeout_s: float = 1.0

    def one_way_s(self, one: str | None, other: str | None) -> float:
        """Seconds that a message takes from one zone to the other."""
        return self._round_trip_s(one, other) / 2

    def _round_trip_s(self, one: str | None, other: str | None) -> float:
        if one is None or other is None or one == other:
            return self.rtt_s
        if one.partition("/")[0] == other.partition("/")[0]:
            return self.rtt_s + self.cross_zone_s
        return self.rtt_s + self.cross_region_s
