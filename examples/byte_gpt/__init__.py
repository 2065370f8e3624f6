"""The parts of train_gpt.py: options, launcher, text, model, gradient check, training."""
