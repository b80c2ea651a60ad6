"""What this machine's GPUs are doing: the model, the sources, and the prober that guards them."""
