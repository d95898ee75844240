"""The decisions: which instance, when again, when to give up. Pure: no I/O, no clock, no event loop."""
