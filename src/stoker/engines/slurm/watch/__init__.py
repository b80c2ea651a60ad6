"""`stoker watch --slurm`: judges all jobs of a cluster by the rules, no matter who submitted them."""
