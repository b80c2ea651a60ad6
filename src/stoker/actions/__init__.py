"""Responses to a verdict: stop, exit, shut down, end a task, run a command, notify someone."""
