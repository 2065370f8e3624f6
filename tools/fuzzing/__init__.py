"""Random trainings under the flag, each beside eager DDP."""
