"""Readings of this machine's GPUs: the model, the sources, and the prober that guards them."""
