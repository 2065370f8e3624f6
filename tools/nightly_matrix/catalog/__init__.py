"""All scenarios, in the order of the table."""

from __future__ import annotations

from nightly_matrix.catalog.ddp import BUFFERS, HOOKS, OPTIONS, PARAMETERS
from nightly_matrix.catalog.loops import LOOPS
from nightly_matrix.catalog.numerics import OPTIMIZERS, PRECISION
from nightly_matrix.catalog.parallelisms import PARALLELISMS

SCENARIOS = (
    *PARALLELISMS,
    *LOOPS,
    *PARAMETERS,
    *OPTIONS,
    *BUFFERS,
    *PRECISION,
    *HOOKS,
    *OPTIMIZERS,
)
