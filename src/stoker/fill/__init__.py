"""Background programs on idle GPUs that stop when someone needs a GPU."""
