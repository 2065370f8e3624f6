"""Which backwards compiled autograd can trace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fusion_passes.ddp.autograd_graph import nodes_behind
from fusion_passes.ddp.tensor_parallel import dtensors_can_be_traced
from fusion_passes.reporting.warnings import warn_once
from fusion_passes.torch_private.autograd import differentiates_a_backward


def can_be_traced(outputs: Sequence[Any]) -> bool:
    """Return whether compiled autograd can trace a backward; warn if not.

    Args:
        outputs: tensors or gradient edges that the backward starts from.
    """
    return dtensors_can_be_traced(outputs) and not _differentiates_gradients(outputs)


def _differentiates_gradients(outputs: Sequence[Any]) -> bool:
    """Whether a backward differentiates gradients; warns if so.

    What it computes may have no gradient for some of its inputs. Autograd's engine passes over
    these, but compiled autograd adds them to others, which fails when its trace runs (torch 2.11 to
    2.15). The backward of a compiled forward has no derivative at all: torch says so, but compiled
    autograd fails before that, with an error of its own.
    """
    if not any(map(differentiates_a_backward, nodes_behind(outputs))):
        return False
    warn_once(
        "second derivatives",
        "A backward of a DDP module is not traced, and its gradients are reduced when it has "
        "ended, with no compute beside them: it differentiates gradients (for a gradient penalty, "
        "say), which compiled autograd cannot trace. Leave ddp_fusion off for a model of which "
        "most backwards do.",
    )
    return True
