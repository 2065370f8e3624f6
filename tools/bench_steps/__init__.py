"""What :mod:`bench` is made of."""
