"""Code that tests and tools share: models, trainings, a pool of ranks, readers of generated
code."""
