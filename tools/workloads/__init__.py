"""The models that the benches train, and the ways to reduce their gradients."""
