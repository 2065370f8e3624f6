"""What the benches train: models, and the ways of reducing their gradients."""
