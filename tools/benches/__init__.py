"""The parts of :mod:`bench`, and what measures: ranks, networks, rounds, pages."""
