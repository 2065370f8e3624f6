"""What the parts of the catalog share.

A model that rounds may differ from eager DDP by what its compiled kernels round otherwise than
PyTorch's own, and by nothing else, as the entries with ``by_hand`` show: on two ranks, ``a / 2 +
b / 2`` has one order only. All others must be the same in every bit, whatever the number of ranks:
nothing is ever rounded in them (``tests/equality/test_exact_models.py``).
"""

from __future__ import annotations

from typing import Any

from testing.scenarios.entries import Scenario

Arguments = dict[str, Any]

FEATURES = "testing.scenarios.features"

ROUNDS_EPS = 32.0
"""For models that round, after three steps. Sums of n terms in two orders differ by about sqrt(n)
eps; n is at most 4 x 8 x 8 = 256 here (a BatchNorm statistic; a row of the embedding's gradient has
fewer), which gives 16, and twice that is left to the steps that follow from it. 10.6 was
measured."""

BF16_EPS = 2.0**16
"""For autocast: eps of bf16 in eps of fp32. A compiled kernel sums the gradient of a bias in fp32,
where eager rounds each step to bf16: half a rounding in the gradient, and as much again in the bf16
copies of the trained weights."""

FP16_EPS = 2.0**13
"""The same for fp16."""

THIRDS_EPS = 4.0
"""For averages over three ranks. Each rank's share is rounded once by a division and twice by a
multiplication with the rounded reciprocal, and two sums are rounded in another order: at most half
an eps each, of values that are at most the largest, is 3; a cancelled sum makes it a little more.
0.83 was measured."""

CONCAT = ("concat",)
COALESCED = ("coalesced",)
"""The modes of a scenario that a check tests in one of them: they take turns."""

INSIDE: Arguments = {"style": "inside"}
KEPT: Arguments = {"zero": "kept"}
ACCUMULATED: Arguments = {"steps": 2, "micro_batches": 3, "no_sync": True}
"""Loops of several scenarios; see :class:`testing.scenarios.loop.Loop`."""

STAYS_LOCAL = ("stay on their rank, as with eager DDP: its forward has had its",)
OWN_REDUCER = (
    "is trained by DDP's own reducer, as without ddp_fusion, and its gradients are not fused:"
)
NO_EFFECT = ("has no effect under ddp_fusion: it tunes the C++ reducer, which does not run",)
NOT_DDPS_OWN = ("stay on their rank, as with eager DDP: DistributedDataParallel was constructed",)
"""What the user is told in several scenarios."""

TORCH_CRASHES = "torch 2.11 can crash where one thread is traced while another one runs"
"""Seen once in three runs; docs/support.md."""


def on_two(feature: str, title: str, target: str, **options: Any) -> Scenario:
    """A scenario of one DDP module on two ranks.

    Args:
        feature: a word for selections.
        title: for people.
        target: ``module:function`` among the features.
        options: fields of :class:`testing.scenarios.entries.Scenario`.
    """
    return _entry("ddp-2", feature, title, target, options)


def on_four(parallelism: str, feature: str, title: str, target: str, **options: Any) -> Scenario:
    """A scenario of some parallelism, on four ranks if ``options`` do not say otherwise."""
    return _entry(parallelism, feature, title, target, {"ranks": 4} | options)


def _entry(
    parallelism: str, feature: str, title: str, target: str, options: dict[str, Any]
) -> Scenario:
    """A dictionary of arguments is written down, and an entry cannot change."""
    options |= {"arguments": tuple(options.get("arguments", {}).items())}
    return Scenario(parallelism, feature, title, f"{FEATURES}.{target}", **options)
