"""Inputs of a traced backward that its compiled graph would not take as they are.

**Sizes that the user has marked as dynamic.** After ``torch._dynamo.mark_dynamic``, Dynamo refuses
a compile that fixes the size. The mark is for what the user compiles. A traced backward, which has
the same tensor among its inputs, may fix it: torch compiles it again for another one.

**Numbers of the program.** For ``3 * x``, autograd saves a tensor that torch takes for a number
again, not for a tensor, where it calls Python. A compiled graph on a GPU reads it with ``item()``,
and torch runs each graph under such a call the first time, to check operators: ``item()`` then
fails, since a number has none (torch 2.11 to 2.15).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, fx

from fusion_passes.torch_private.autograd import weak_marks

_Compile = Callable[[fx.GraphModule], Any]


def with_usual_inputs(compiler: _Compile) -> _Compile:
    """Compile traced backwards, which then get inputs that they take.

    Args:
        compiler: compiles them, when they are called.
    """

    def compile_traced(traced: fx.GraphModule) -> Any:
        compiled = compiler(traced)

        def run(inputs: list[Tensor], *arguments: Any) -> Any:
            inputs[:] = map(_no_number, inputs)
            with weak_marks(inputs):
                return compiled(inputs, *arguments)

        return run

    return compile_traced


def _no_number(tensor: Tensor) -> Tensor:
    """The same memory, for which torch never puts a number: a view is none."""
    can_be = tensor.dim() == 0 and tensor.device.type == "cpu" and not tensor.requires_grad
    return tensor.view(()) if can_be and type(tensor) is Tensor else tensor
