"""What the parts of the catalog share.

What rounds, and how much it may differ from eager DDP, is measured and reasoned in
``tests/equality/test_eager_ddp.py``; all others must be the same in every bit.
"""

from __future__ import annotations

from typing import Any

from testing.scenarios.entries import Scenario

FEATURES = "testing.scenarios.features"

ROUNDS_EPS = 32.0
"""For models that round: compiled kernels sum in another order than PyTorch's own."""

BF16_EPS = 2.0**16
"""For autocast: eps of bf16 in eps of fp32. A compiled kernel rounds to bf16 once where PyTorch
rounds in each step."""

FP16_EPS = 2.0**13
"""The same for fp16."""

THIRDS_EPS = 4.0
"""For averages over three ranks; ``tests/equality/test_scaled_and_cast.py`` has the reason."""

CONCAT = ("concat",)
COALESCED = ("coalesced",)
"""The modes of a scenario that a check tests in one of them: they take turns."""

STAYS_LOCAL = ("stay on their rank, as with eager DDP: its forward has had its",)
OWN_REDUCER = (
    "is trained by DDP's own reducer, as without ddp_fusion, and its gradients are not fused:"
)
BESIDE_OTHERS = ("A backward reaches parameters of a DDP module under ddp_fusion, and others",)
RUNS_EAGERLY = ("are reduced after their backward, with no compute beside them",)
NO_EFFECT = ("has no effect under ddp_fusion: it tunes the C++ reducer, which does not run",)
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
    return Scenario("ddp-2", feature, title, f"{FEATURES}.{target}", **options)


def on_four(parallelism: str, feature: str, title: str, target: str, **options: Any) -> Scenario:
    """A scenario of some parallelism, on four ranks if ``options`` do not say otherwise."""
    options = {"ranks": 4} | options
    return Scenario(parallelism, feature, title, f"{FEATURES}.{target}", **options)
