"""Whether a GPU computes what a CPU does, asked before engine.device=auto takes it."""
