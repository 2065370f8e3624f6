"""All scenarios, in the order of the table."""

from __future__ import annotations

from testing.scenarios.catalog.backwards import BACKWARDS
from testing.scenarios.catalog.bucket_hooks import BUCKET_HOOKS
from testing.scenarios.catalog.ddp import BUFFERS, HOOKS, OPTIONS, PARAMETERS
from testing.scenarios.catalog.graphs import GROUPS, INSTANCES, PARTS, RANKS
from testing.scenarios.catalog.joining import JOIN
from testing.scenarios.catalog.loops import LOOPS
from testing.scenarios.catalog.numerics import OPTIMIZERS, PRECISION, SCALING
from testing.scenarios.catalog.parallelisms import PARALLELISMS
from testing.scenarios.catalog.unused import UNUSED

SCENARIOS = (
    *PARALLELISMS,
    *GROUPS,
    *LOOPS,
    *BACKWARDS,
    *PARTS,
    *INSTANCES,
    *RANKS,
    *UNUSED,
    *PARAMETERS,
    *OPTIONS,
    *JOIN,
    *BUFFERS,
    *PRECISION,
    *SCALING,
    *HOOKS,
    *BUCKET_HOOKS,
    *OPTIMIZERS,
)
