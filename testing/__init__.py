"""Code that tests and tools share: models, trainings, a pool of ranks."""
