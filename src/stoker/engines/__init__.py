"""Engines: where and how attempts run."""
