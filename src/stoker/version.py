"""The only definition of Stoker's version, read by packaging, `stoker --version` and the API."""

__version__ = "0.2.0"
