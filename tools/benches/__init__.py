"""The parts of :mod:`bench`: each has a command line, and keeps what it found in one form."""
