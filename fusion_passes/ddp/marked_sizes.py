"""Sizes that the user has marked as dynamic, where a backward that is traced has them.

After ``torch._dynamo.mark_dynamic``, Dynamo refuses a compile that fixes the size. The mark is for
what the user compiles. A traced backward, which has the same tensor among its inputs, may fix it:
torch compiles it again for another one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, fx

from fusion_passes.torch_private.autograd import weak_marks

_Compile = Callable[[fx.GraphModule], Any]


def with_weak_marks(compiler: _Compile) -> _Compile:
    """Compile traced backwards with marks that Dynamo follows where it can.

    Args:
        compiler: compiles them, when they are called.
    """

    def compile_traced(traced: fx.GraphModule) -> Any:
        compiled = compiler(traced)

        def run(inputs: list[Tensor], *arguments: Any) -> Any:
            with weak_marks(inputs):
                return compiled(inputs, *arguments)

        return run

    return compile_traced
