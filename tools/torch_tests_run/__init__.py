"""What ``tools/torch_tests.py`` is made of."""
