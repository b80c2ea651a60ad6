"""The code of a job at its submission: packing, deduplicated storage, comparison."""
