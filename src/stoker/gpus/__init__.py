"""What this machine's GPUs are doing: the model, one module per source, the guarded prober."""
