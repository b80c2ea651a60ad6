"""Finds the largest batch size that fits: a pure search, and the probes that feed it."""
