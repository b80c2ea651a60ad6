"""Rules: what a stream of observations means. Pure: no clock, no I/O."""
