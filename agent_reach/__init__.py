"""Agent-Reach: agents find and call each other through etcd."""

__version__ = "0.1.0"
