"""What :mod:`check_torch` is made of."""
