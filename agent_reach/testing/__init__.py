"""Public fakes for unit tests."""

from agent_reach.testing.clock import ManualClock

__all__ = ["ManualClock"]
