"""What :mod:`bench_storage` is made of."""
