"""What the parts of the catalog share.

What rounds, and how much it may differ from eager DDP, is measured and reasoned in
``tests/equality/test_eager_ddp.py``; all others must be the same in every bit.
"""

from __future__ import annotations

from typing import Any

from nightly_matrix.cells import Scenario

FEATURES = "nightly_matrix.features"

ROUNDS_EPS = 32.0
"""For models that round: compiled kernels sum in another order than PyTorch's own."""

BF16_EPS = 2.0**16
"""For autocast: eps of bf16 in eps of fp32. A compiled kernel rounds to bf16 once where PyTorch
rounds in each step."""

FP16_EPS = 2.0**13
"""The same for fp16."""


def on_two(feature: str, title: str, target: str, **options: Any) -> Scenario:
    """A scenario of one DDP module on two ranks.

    Args:
        feature: a word for selections.
        title: for people.
        target: ``module:function`` among the features.
        options: fields of :class:`nightly_matrix.cells.Scenario`.
    """
    return Scenario("ddp-2", feature, title, f"{FEATURES}.{target}", **options)


def on_four(parallelism: str, feature: str, title: str, target: str, **options: Any) -> Scenario:
    """A scenario of some parallelism, on four ranks if ``options`` do not say otherwise."""
    options = {"ranks": 4} | options
    return Scenario(parallelism, feature, title, f"{FEATURES}.{target}", **options)
