"""Launch, contain and stop a process tree."""
