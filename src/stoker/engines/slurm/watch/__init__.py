"""`stoker watch --slurm`: the jobs of a cluster, judged by the rules, no matter who submitted them."""
