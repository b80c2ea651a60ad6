"""Other users of this machine: holders of its GPUs' device nodes, and users at terminals."""
