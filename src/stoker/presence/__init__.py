"""Who else uses this machine: holders of its GPUs' device nodes, and users at terminals."""
