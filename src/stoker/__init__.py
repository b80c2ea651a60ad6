"""Stoker keeps GPUs busy, and notices when they are not."""

__version__ = "0.1.0"
