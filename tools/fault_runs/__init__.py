"""Faults that are injected into small trainings, with and without the flag."""
