"""The parts of :mod:`bench`: ranks, networks, rounds, pages."""
