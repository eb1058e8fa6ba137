"""How a job is spread over its ranks: one mesh with named axes, the dense part and the experts sharded over it."""
