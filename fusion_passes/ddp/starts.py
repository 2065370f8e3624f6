"""Distinguishes a second backward through a forward from one that starts at another of its outputs.

Eager DDP averages a gradient when it arrives. A forward that is compiled has one node in the
autograd graph for all of its outputs, which gives all gradients whenever any output is
differentiated: zeros for those that come from other outputs. They count as arrived, and what
arrives with the next output would stay on its rank.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from fusion_passes.ddp.autograd_graph import Ends, nodes_behind
from fusion_passes.ddp.modules import registry
from fusion_passes.ddp.rounds import expect_again, is_waiting_for_none
from fusion_passes.torch_private import is_compiled_forward
from fusion_passes.torch_private.autograd import sequence_number

_KEPT: Final = 256
"""How many forwards are remembered; only those whose graph was kept are."""


@dataclass
class Starts:
    """The outputs of compiled forwards from which a backward has started.

    Only graphs that were kept (``retain_graph=True``) can be come upon again.
    """

    _outputs: OrderedDict[int, set[int]] = field(default_factory=OrderedDict)

    def note(self, outputs: Sequence[Any], ends: Ends, keeps_graph: bool) -> None:
        """Let a backward be averaged that starts from further outputs of forwards that have had
        a backward.

        Args:
            outputs: tensors or gradient edges that the backward starts from.
            ends: where it ends.
            keeps_graph: whether it was called with ``retain_graph=True``.
        """
        if not keeps_graph and not self._outputs:
            return
        found = _starts_at(outputs)
        known = [node for node in found if node in self._outputs]
        if known and not any(found[node] & self._outputs[node] for node in known):
            reached = registry.reached_by(ends.leaves)
            # What a communication hook has given is no average, to be averaged again.
            reached = [name for name in reached if not registry.module(name).calls_hook]
            if is_waiting_for_none(reached):
                expect_again(reached)
        for node in known if not keeps_graph else ():
            del self._outputs[node]
        for node, numbers in found.items() if keeps_graph else ():
            self._outputs.setdefault(node, set()).update(numbers)
        while len(self._outputs) > _KEPT:
            self._outputs.popitem(last=False)


def _starts_at(outputs: Sequence[Any]) -> dict[int, set[int]]:
    """The outputs of compiled forwards that a backward reaches, by the forward's number."""
    found: dict[int, set[int]] = {}

    def note(node: Any, number: int) -> None:
        if node is not None and is_compiled_forward(node):
            found.setdefault(sequence_number(node), set()).add(number)

    for output in outputs:
        edge = getattr(output, "node", None)
        note(edge or output.grad_fn, output.output_nr)
    for node in nodes_behind(outputs):
        for following, number in node.next_functions:
            note(following, number)
    return found
