"""A world of agents in virtual time: the very same decisions, driven by an event heap instead of sockets.

>>> from agent_reach.testing.simulation import LogNormal, Poisson, Simulation, Slow
>>> sim = Simulation(seed=1)
>>> kb = sim.fleet("kb.retrieve.v1", 4, service=LogNormal(0.03), slots=8)
>>> callers = sim.clients(5)
>>> sim.load(callers, "kb.retrieve.v1", Poisson(50))
>>> sim.inject(Slow(20, from_s=5, until_s=15), kb[0])
>>> metrics = sim.run(until_s=20)
>>> metrics.summary().success_share
1.0
"""

from agent_reach.testing.simulation.algorithms import AgentReach, Algorithm, CallRequest, Session
from agent_reach.testing.simulation.arrivals import Arrivals, Bursts, ClosedLoop, Poisson
from agent_reach.testing.simulation.client import Call, Client
from agent_reach.testing.simulation.distributions import Bimodal, Constant, Distribution, Exponential, LogNormal
from agent_reach.testing.simulation.faults import (
    BlackHole,
    Busy,
    DropAfterExecuting,
    FailFast,
    FailSlow,
    Fault,
    Hang,
    Pauses,
    Refuse,
    SharedDownstream,
    Slow,
    WarmUp,
)
from agent_reach.testing.simulation.heap import EventHeap
from agent_reach.testing.simulation.metrics import Counts, DeadAttempt, Metrics, Summary, quantile
from agent_reach.testing.simulation.network import Network
from agent_reach.testing.simulation.offers import Nested, Offer
from agent_reach.testing.simulation.server import Server
from agent_reach.testing.simulation.simulation import Simulation
from agent_reach.testing.simulation.world import AlgorithmFactory

__all__ = [
    "AgentReach",
    "Algorithm",
    "AlgorithmFactory",
    "Arrivals",
    "Bimodal",
    "BlackHole",
    "Bursts",
    "Busy",
    "Call",
    "CallRequest",
    "Client",
    "ClosedLoop",
    "Constant",
    "Counts",
    "DeadAttempt",
    "Distribution",
    "DropAfterExecuting",
    "EventHeap",
    "Exponential",
    "FailFast",
    "FailSlow",
    "Fault",
    "Hang",
    "LogNormal",
    "Metrics",
    "Nested",
    "Network",
    "Offer",
    "Pauses",
    "Poisson",
    "Refuse",
    "Server",
    "Session",
    "SharedDownstream",
    "Simulation",
    "Slow",
    "Summary",
    "WarmUp",
    "quantile",
]
