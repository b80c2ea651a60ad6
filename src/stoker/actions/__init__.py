"""What can be done about a verdict: stop, exit, shut down, end a task, run a command, notify someone."""
