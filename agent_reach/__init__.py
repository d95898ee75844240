"""Agent-Reach: agents find and call each other through etcd.

Write `await reach.call("knowledge.retrieve.v1", {...})` and never again a host, a port, a hand-made retry loop
or one timeout for everything. Start with `ReachClient` and `register_agent`.

Names load on first use, so importing the package costs next to nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agent_reach.client import ReachClient
    from agent_reach.config import (
        AffinityConfig,
        BreakerConfig,
        BulkheadConfig,
        EjectionConfig,
        HedgeConfig,
        LimitConfig,
        LocalityConfig,
        Policy,
        ReachConfig,
        RegistryConfig,
        RetryConfig,
        ScoreWeights,
        ScoringConfig,
        ServingConfig,
        TimeoutConfig,
    )
    from agent_reach.context import CallContext
    from agent_reach.dialing.httpx_dialer import HttpxDialer
    from agent_reach.errors import (
        AgentIdInUse,
        AgentNotFound,
        Attempt,
        ClientNotOpen,
        ConfigError,
        ContextLost,
        DeadlineExceeded,
        Forbidden,
        HopLimitExceeded,
        InvalidPayload,
        InvalidReply,
        NoHealthyAgent,
        OutcomeUnknown,
        Overloaded,
        ProtocolError,
        ReachError,
        RegistryUnavailable,
        RemoteError,
        SchemaConflict,
        Unauthorized,
    )
    from agent_reach.handlers import capability, register_agent
    from agent_reach.model import AgentInfo, CapabilityInfo
    from agent_reach.ports import Clock, Dialer, Observer, Registry
    from agent_reach.registry.memory import MemoryRegistry
    from agent_reach.reply import ClientState, Outcome, Reply
    from agent_reach.routing.decisions import Decision
    from agent_reach.routing.explain import Explanation, Risk, Route
    from agent_reach.sync import SyncReachClient

__version__ = "0.1.0"

__all__ = [
    "AffinityConfig",
    "AgentIdInUse",
    "AgentInfo",
    "AgentNotFound",
    "Attempt",
    "BreakerConfig",
    "BulkheadConfig",
    "CallContext",
    "CapabilityInfo",
    "ClientNotOpen",
    "ClientState",
    "Clock",
    "ConfigError",
    "ContextLost",
    "DeadlineExceeded",
    "Decision",
    "Dialer",
    "EjectionConfig",
    "Explanation",
    "Forbidden",
    "HedgeConfig",
    "HopLimitExceeded",
    "HttpxDialer",
    "InvalidPayload",
    "InvalidReply",
    "LimitConfig",
    "LocalityConfig",
    "MemoryRegistry",
    "NoHealthyAgent",
    "Observer",
    "Outcome",
    "OutcomeUnknown",
    "Overloaded",
    "Policy",
    "ProtocolError",
    "ReachClient",
    "ReachConfig",
    "ReachError",
    "Registry",
    "RegistryConfig",
    "RegistryUnavailable",
    "RemoteError",
    "Reply",
    "RetryConfig",
    "Risk",
    "Route",
    "SchemaConflict",
    "ScoreWeights",
    "ScoringConfig",
    "ServingConfig",
    "SyncReachClient",
    "TimeoutConfig",
    "Unauthorized",
    "__version__",
    "capability",
    "register_agent",
]

# Where each name lives.
_HOMES = {
    "AffinityConfig": "config",
    "AgentIdInUse": "errors",
    "AgentInfo": "model",
    "AgentNotFound": "errors",
    "Attempt": "errors",
    "BreakerConfig": "config",
    "BulkheadConfig": "config",
    "CallContext": "context",
    "CapabilityInfo": "model",
    "ClientNotOpen": "errors",
    "ClientState": "reply",
    "Clock": "ports",
    "ConfigError": "errors",
    "ContextLost": "errors",
    "DeadlineExceeded": "errors",
    "Decision": "routing.decisions",
    "Dialer": "ports",
    "EjectionConfig": "config",
    "Explanation": "routing.explain",
    "Forbidden": "errors",
    "HedgeConfig": "config",
    "HopLimitExceeded": "errors",
    "HttpxDialer": "dialing.httpx_dialer",
    "InvalidPayload": "errors",
    "InvalidReply": "errors",
    "LimitConfig": "config",
    "LocalityConfig": "config",
    "MemoryRegistry": "registry.memory",
    "NoHealthyAgent": "errors",
    "Observer": "ports",
    "Outcome": "reply",
    "OutcomeUnknown": "errors",
    "Overloaded": "errors",
    "Policy": "config",
    "ProtocolError": "errors",
    "ReachClient": "client",
    "ReachConfig": "config",
    "ReachError": "errors",
    "Registry": "ports",
    "RegistryConfig": "config",
    "RegistryUnavailable": "errors",
    "RemoteError": "errors",
    "Reply": "reply",
    "RetryConfig": "config",
    "Risk": "routing.explain",
    "Route": "routing.explain",
    "SchemaConflict": "errors",
    "ScoreWeights": "config",
    "ScoringConfig": "config",
    "ServingConfig": "config",
    "SyncReachClient": "sync",
    "TimeoutConfig": "config",
    "Unauthorized": "errors",
    "capability": "handlers",
    "register_agent": "handlers",
}


def __getattr__(name: str) -> Any:
    """Load a public name when it is first asked for (PEP 562)."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
