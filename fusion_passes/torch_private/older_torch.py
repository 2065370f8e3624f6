"""The code that only torch before 2.13 needs. All such code is in this file, to be removed later.

The package supports the five newest minor releases of torch, which has one every eight weeks: 2.15
was released on 28 October 2026. So support of 2.11 ends with the release of 2.16, about 23
December, and support of 2.12, and this file with it, with that of 2.17, about 17 February 2027.
``tests/test_versions.py`` names the code here that is no longer needed. Statements about 2.12 were
read in its code; the tests run on 2.11.
"""

from __future__ import annotations

import inspect
import operator
from typing import Any, Final

import torch
from torch import fx

from fusion_passes.torch_private import ConfigDefinition, ConfigEntry, CustomGraphPass, OpOverload
from fusion_passes.torch_private.inductor import graph_lowering, inductor_ir, inductor_lowerings

# --- The flag ------------------------------------------------------------------------------------


def has_plain_entries() -> bool:
    """Whether an entry of a config module keeps the user's value as a plain attribute. Later
    versions keep it in a context variable."""
    return "name" not in inspect.signature(ConfigEntry.__init__).parameters


class PlainEntry(ConfigEntry):
    """An entry of a config module that keeps the user's value in a variable all the same; the
    variable has the methods ``get`` and ``set`` of a ``ContextVar``."""

    def __init__(self, definition: ConfigDefinition[Any], variable: Any) -> None:
        self._variable = variable
        super().__init__(definition)  # type: ignore[call-arg]

    @property
    def user_override(self) -> Any:
        return self._variable.get()

    @user_override.setter
    def user_override(self, value: Any) -> None:
        self._variable.set(value)


# --- The passes ----------------------------------------------------------------------------------


def takes_one_pass() -> bool:
    """Whether ``post_grad_custom_post_pass`` takes one pass only. Later versions take a list."""
    from torch._inductor import custom_graph_pass

    return not hasattr(custom_graph_pass, "get_custom_graph_passes")


class PassChain(CustomGraphPass):
    """Several passes as one, for an option that takes one pass."""

    def __init__(self, passes: list[Any]) -> None:
        self.passes = passes

    def __call__(self, graph: fx.Graph) -> None:
        for item in self.passes:
            item(graph)

    def uuid(self) -> Any:
        ids = [item.uuid() if isinstance(item, CustomGraphPass) else None for item in self.passes]
        return None if None in ids else repr(ids)


# --- Lists of tensors ----------------------------------------------------------------------------

LAYOUT_CONSTRAINTS: Final = "torch._inductor.lowering._maybe_layout_constraints"
"""Name of the table of Inductor's to which :func:`fix_strides_of_lists` adds."""


def fix_strides_of_lists(target: OpOverload) -> None:
    """Have Inductor give an operator, whose first argument is a list of tensors, these tensors with
    the strides of the graph. Inductor did so for single tensors only: it all-reduced a coalesced
    gradient in another layout, and then waited for a copy that it had made of it in between."""
    if torch.__version__ >= "2.13":
        return

    def fix(node: Any, tensors: Any, *rest: Any, **named: Any) -> Any:
        require, shapes = inductor_ir().ExternKernel.require_stride_order, graph_lowering().sizevars
        orders = (
            inductor_ir().get_stride_order(source.meta["val"].stride(), shapes.shape_env)
            for source in node.args[0]
        )
        return ([require(*pair) for pair in zip(tensors, orders, strict=True)], *rest), named

    inductor_lowerings().add_layout_constraint(target, fix)


def first_of_list(node: fx.Node) -> fx.Node:
    """Return the node, or the first item if the node is a list: Inductor ordered nothing after a
    list. This is done on any torch, so that graphs are the same on all; goldens change when it
    goes."""
    if not isinstance(node.meta["val"], tuple | list):
        return node
    item = next(user for user in node.users if user.target is operator.getitem)
    # The item reads nothing else, and must precede the node that will name it.
    node.append(item)
    return item
