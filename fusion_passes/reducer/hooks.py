"""Hooks on the AccumulateGrad nodes of parameters: those of the reducers, by which gradients arrive
that no graph stores, and whether a node has hooks of others, which must see a gradient first."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from fusion_passes.layout.layout import ParameterNumber, Piece
from fusion_passes.reducer.copies import HOOKED, HOOKS_UNKNOWN, NODE_HOOKED
from fusion_passes.torch_private.autograd import (
    RemovableHandle,
    has_hooks_behind,
    have_hooks,
    hook_behind_accumulation,
    hooks_on_node,
    registers_hooks,
)
from fusion_passes.torch_private.ddp import has_optimizer_in_backward


class HooksOfOthers:
    """Which parameters, or AccumulateGrad nodes, have hooks that are no reducer's. Torch does not
    report hooks on nodes, so all nodes are asked, once after each registration of a hook on any
    node.

    Attributes:
        are_none: whether no node had one, and no hook was registered on any node since.
        none_at: the value that ``RemovableHandle.next_id`` had when no parameter and no node had
            one; -1 if there are some. Each registration of a hook, on any tensor, node or module,
            increments ``next_id``: while it has this value there are none. To look at each
            parameter takes longer than all else that is done for a stored gradient.
    """

    def __init__(
        self,
        nodes: Callable[[], Iterable[tuple[str, nn.Parameter, Any, int]]],
        parameters: Callable[[], Iterable[nn.Parameter]],
    ) -> None:
        """``nodes`` returns name, parameter, node and number of reducers for each parameter of each
        managed module, ``parameters`` these parameters alone."""
        self.are_none = False
        self.none_at = -1
        self._nodes = nodes
        self._parameters = parameters
        self._found: Mapping[int, str] = {}
        self._found_by: object = None

    @property
    def found(self) -> Mapping[int, str]:
        """The parameters whose node has hooks of others, or may have some, by id, each with a
        reason for the report that says which of the two it is. Calls :meth:`refresh`."""
        self.refresh()
        return self._found

    def refresh(self) -> None:
        """Ask all nodes, and look at all parameters, if a hook was registered since then.

        Raises:
            ValueError: a parameter has an optimizer that runs in the backward.
        """
        if self._found_by is not registers_hooks():
            self._ask_nodes()
        registered = RemovableHandle.next_id
        if self.none_at != registered:
            are_some = not self.are_none or any(have_hooks(self._parameters()))
            self.none_at = -1 if are_some else registered

    def _ask_nodes(self) -> None:
        found = dict[int, str]()
        for name, parameter, node, num_owners in self._nodes():
            why = _why(node, num_owners)
            if why:
                refuse_optimizer(name, parameter)
                found[id(parameter)] = why
        self._found, self._found_by = found, registers_hooks()
        self.are_none = not found

    def forget(self) -> None:
        """Ask all nodes again: a hook may have been registered."""
        self._found_by = None
        self.are_none = False
        self.none_at = -1


class ParameterHooks:
    """The hooks of one reducer.

    Attributes:
        nodes: the AccumulateGrad node of each parameter, by number. A node keeps its hooks only as
            long as somebody keeps the node.
        handles: the handles of the hooks on these nodes.
        awaited: parameters that a graph marked ready and whose hook has not run yet.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], others: HooksOfOthers) -> None:
        self.nodes: dict[ParameterNumber, Any] = {}
        self.handles: list[Any] = []
        self.awaited: set[ParameterNumber] = set()
        self._parameters = parameters
        self._others = others
        self._callbacks: dict[ParameterNumber, Callable[..., None]] = {}

    def add(self, number: ParameterNumber, callback: Callable[..., None]) -> None:
        """Have autograd call a function when it has accumulated a gradient."""
        node, handle = hook_behind_accumulation(self._parameters[number], callback)
        self.nodes[number] = node
        self.handles.append(handle)
        self._callbacks[number] = callback

    def follow(self, number: ParameterNumber, node: Any) -> None:
        """Move to another node of a parameter: it gets one, without hooks, when it is converted to
        another dtype."""
        if self.nodes[number] is not node:
            self.add(number, self._callbacks[number])

    def why_hooked(self, number: ParameterNumber) -> str:
        """That the node of a parameter has hooks of others, or may have some, in words for the
        report; empty if it has none."""
        if self._others.are_none:
            return ""
        return self._others.found.get(id(self._parameters[number]), "")

    def why_not_stored(self, numbers: Piece) -> dict[ParameterNumber, str]:
        """Why no graph may store some of these gradients now, because of hooks, by number."""
        if self._others.none_at == RemovableHandle.next_id:
            return {}
        are_hooked = have_hooks(self._parameters[number] for number in numbers)
        found = dict.fromkeys(itertools.compress(numbers, are_hooked), HOOKED)
        if not self._others.are_none:
            hooked = ((n, self.why_hooked(n)) for n in numbers if n not in found)
            found |= {number: why for number, why in hooked if why}
        return found

    def see_accumulated(self, number: ParameterNumber) -> bool:
        """Whether hooks of others see the accumulated gradient of a parameter, or may see it, since
        torch does not tell which hooks of a node do."""
        if self._others.none_at == RemovableHandle.next_id:
            return False
        return has_hooks_behind(self._parameters[number]) or self.why_hooked(number) == NODE_HOOKED


def _why(node: Any, num_owners: int) -> str:
    hooks = hooks_on_node(node)
    if hooks == (0, num_owners):
        return ""
    return NODE_HOOKED if hooks else HOOKS_UNKNOWN


def refuse_optimizer(name: str, parameter: nn.Parameter) -> None:
    """Refuse an optimizer that runs in the backward.

    Raises:
        ValueError: the parameter has one; it names the parameter and the remedy.
    """
    if has_optimizer_in_backward(parameter):
        raise ValueError(
            f"_apply_optimizer_in_backward, parameter {name!r}, is not supported while "
            "torch._inductor.config.ddp_fusion is set: the optimizer would run before the "
            "gradient is reduced. Step the optimizer after the backward, or set ddp_fusion = "
            "None before this module is wrapped."
        )
