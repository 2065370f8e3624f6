"""All scenarios, in the order of the table."""

from __future__ import annotations

from nightly_matrix.cells import Scenario

BOTH = ("concat", "coalesced")

SCENARIOS = [
    Scenario(
        "ddp-2",
        "plain",
        "DDP on 2 ranks",
        "nightly_matrix.features.loops:plain",
        dtypes=("fp32", "bf16", "fp16"),
        quick=BOTH,
    ),
    Scenario(
        "ddp-2",
        "backward-inside",
        "backward inside the compiled function",
        "nightly_matrix.features.loops:backward_inside",
    ),
]
