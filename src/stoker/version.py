"""The version of Stoker, stated here only: packaging, `stoker --version` and the API read it."""

__version__ = "0.2.0"
