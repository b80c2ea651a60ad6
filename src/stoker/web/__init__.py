"""The page and the HTTP API: everything that the verbs do, from a phone."""
