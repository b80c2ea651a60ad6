"""Job output: readers, terminal emulation, streaming from other machines."""
