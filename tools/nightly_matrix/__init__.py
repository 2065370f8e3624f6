"""What :mod:`nightly` is made of."""
