"""The page and the HTTP API, for phones and programs."""
