"""Background programs on idle GPUs, which stop when someone needs a GPU."""
