"""The engine that runs attempts on the GPUs of this machine."""
