"""The largest batch size that fits: the model, pure, and the probes that feed it."""
