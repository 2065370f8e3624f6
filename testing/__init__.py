"""What tests and tools share: models, trainings, ranks to run on, readers of generated code."""
