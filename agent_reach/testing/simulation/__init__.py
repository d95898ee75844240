"""A world of agents in virtual time: the very same decisions, driven by an event heap instead of sockets."""
