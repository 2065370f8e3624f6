"""The parts of :mod:`bench`: ranks, networks, rounds, pages."""

import command_line  # noqa: F401  It adds the path of testing/.
