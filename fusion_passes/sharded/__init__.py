"""Divides optimizer state and optimizer compute by the ranks: the option ``shard_optimizer``."""
