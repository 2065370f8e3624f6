"""The parts of :mod:`bench`, and what measures: ranks, networks, rounds, pages."""

import sys
from pathlib import Path

# For testing/, which is beside tools/ and in no installed package. Last: what is installed counts.
sys.path.append(str(Path(__file__).parent.parent.parent))
