"""Background programs on idle GPUs that step aside when somebody needs them."""
