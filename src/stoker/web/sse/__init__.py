"""Live parts of a page as server-sent events."""
