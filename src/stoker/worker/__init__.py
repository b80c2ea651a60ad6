"""Which job goes on which GPU, now: placement (pure) and the loop around it."""
