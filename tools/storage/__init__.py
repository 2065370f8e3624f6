"""What :mod:`benches.storage` is made of."""
