"""Compiles a tensor function as Inductor compiles a backward, and keeps what was generated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch._inductor.config
from torch import Tensor, fx
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.utils import run_and_get_code
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from fusion_passes.lowering.pack import register_lowerings
from fusion_passes.reporting.graphs import compile_log


@dataclass(frozen=True)
class Lowered:
    """A compiled function.

    Attributes:
        run: calls it with a list of tensors.
        code: the generated code.
        copied: for each bucket, the reasons for copies, by the gradient's number.
    """

    run: Callable[[list[Tensor]], list[Tensor]]
    code: str
    copied: list[dict[int, str]]


def lower(
    function: Callable[..., Any],
    inputs: Sequence[Tensor],
    settings: dict[str, Any],
    rewrite: Callable[[fx.Graph], object] = lambda graph: None,
) -> Lowered:
    """Traces, lowers and compiles a function.

    Args:
        function: tensor code; gives a list of tensors.
        inputs: as it will be called with.
        settings: of ``torch._inductor.config``; the cache is off: its hits generate nothing.
        rewrite: changes the graph, as a post-grad pass.
    """
    copied: list[dict[int, str]] = []
    register_lowerings(lambda _, reasons: copied.append(dict(reasons)))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = [mode.from_tensor(tensor) for tensor in inputs]
        module = make_fx(function, decomposition_table=select_decomp_table())(*fake)
    compiled: list[Any] = []

    def compile_it() -> None:
        compiled.append(compile_fx_inner(module, fake))

    try:
        with torch._inductor.config.patch(
            fx_graph_cache=False, post_grad_custom_post_pass=rewrite, **settings
        ):
            _, codes = run_and_get_code(compile_it)
    finally:
        register_lowerings(compile_log.packed)
    return Lowered(lambda values: list(compiled[0](list(values))), codes[-1], copied)
