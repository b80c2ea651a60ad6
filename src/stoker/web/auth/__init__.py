"""What stands between the network and the page: one module per check, each a plain ASGI middleware."""
