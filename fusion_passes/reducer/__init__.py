"""Averages the gradients of a DDP module over its ranks, as DDP's C++ reducer does."""
