"""Middleware for all requests and responses: log, limits, headers."""
