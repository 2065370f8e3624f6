"""The parts of ``tools/torch_tests.py``."""
