"""The gradient reductions of a graph: how DDP's hook is traced, and who produces a gradient."""
