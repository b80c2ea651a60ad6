"""The version of Stoker."""

__version__ = "0.1.0"
