"""Which backwards compiled autograd can trace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fusion_passes.ddp.autograd_graph import nodes_behind
from fusion_passes.ddp.tensor_parallel import dtensors_can_be_traced
from fusion_passes.reporting.warnings import warn_once
from fusion_passes.torch_private.autograd import differentiates_a_backward, has_nested_tensors


def can_be_traced(outputs: Sequence[Any]) -> bool:
    """Return whether compiled autograd can trace a backward; warn if not.

    Args:
        outputs: tensors or gradient edges that the backward starts from.
    """
    return dtensors_can_be_traced(outputs) and not _has_untraceable_nodes(outputs)


def _has_untraceable_nodes(outputs: Sequence[Any]) -> bool:
    """Whether there are autograd nodes that compiled autograd fails at; warns if so.

    * It cannot read the sizes of nested tensors (torch 2.11 to 2.15).
    * A backward that differentiates gradients may compute something that has no gradient for some
      of its inputs. Autograd's engine passes over these, but compiled autograd adds them to others,
      which fails when its trace runs (torch 2.11 to 2.15). The backward of a compiled forward has
      no derivative at all: torch says so, but compiled autograd fails before that, with an error of
      its own.
    """
    for node in nodes_behind(outputs):
        if differentiates_a_backward(node):
            _warn_untraced(
                "it differentiates gradients (for a gradient penalty, say)",
                "Leave ddp_fusion off for a model of which most backwards do.",
            )
            return True
        if has_nested_tensors(node):
            _warn_untraced(
                "its forward takes or returns nested tensors",
                "Make them in what is compiled, of values and offsets, and return their values.",
            )
            return True
    return False


def _warn_untraced(reason: str, remedy: str) -> None:
    warn_once(
        reason,
        "A backward of a DDP module is not traced, and its gradients are reduced when it has "
        "ended, with no compute beside them: compiled autograd cannot trace it, because "
        f"{reason}. {remedy}",
    )
