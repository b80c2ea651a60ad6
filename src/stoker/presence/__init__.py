"""Who is at this machine: who holds its GPUs' device nodes, who is at a terminal, and what rings when that changes."""
