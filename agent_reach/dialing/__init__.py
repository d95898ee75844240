"""Bringing a request to a peer."""
