"""When an instance is shut out."""

from __future__ import annotations

from dataclasses import dataclass

from agent_reach.config import checks

__all__ = ["BreakerConfig", "EjectionConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakerConfig:
    """When an instance is shut out, and for how long."""

    # Five in a row: at 1 % random failures that is one false trip in 10^10 calls.
    consecutive_failures: int = 5
    # Success below 80 % of at least 10 calls in 10 s (Finagle and Linkerd use 0.8; agents see few calls).
    success_rate: float = 0.8
    min_calls: int = 10
    window_s: float = 10.0
    # Equal-jittered: between half and the whole of it; doubles each time a probe fails, up to the cap.
    open_s: float = 30.0
    max_open_s: float = 300.0
    # Where nothing listens, one refused connection is enough, and the next look may be soon: it costs no call
    # anything. Jittered and doubled alike.
    unreachable_s: float = 5.0

    def __post_init__(self) -> None:
        checks.whole(self, "consecutive_failures", least=1)
        checks.number(self, "success_rate", least=0.0, most=1.0)
        checks.whole(self, "min_calls", least=1)
        checks.number(self, "window_s")
        checks.number(self, "open_s")
        checks.number(self, "max_open_s", least=self.open_s)
        checks.number(self, "unreachable_s", most=self.max_open_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class EjectionConfig:
    """How many of a capability's instances breakers may shut out."""

    # At most half, rounded down, so never the only one: with one of two gone the other carries it all.
    max_share: float = 0.5
    # With fewer than half usable the fault is probably shared; ignoring health beats overloading the rest.
    panic_share: float = 0.5

    def __post_init__(self) -> None:
        checks.number(self, "max_share", least=0.0, most=1.0)
        checks.number(self, "panic_share", least=0.0, most=1.0)
