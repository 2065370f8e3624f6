"""Random trainings under the flag, each compared with eager DDP."""
