"""Replacements of DDP's methods in a managed module (forward, buffer broadcast, ``join``, hooks,
copies), the fallback to DDP's own reducer, and tensor parallelism inside a DDP module."""
