"""The half of an agent that is called."""
