"""Tell Inductor which inputs of a graph it may overwrite."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fusion_passes.torch_private import inductor_config
from fusion_passes.torch_private.inductor import graph_lowering, inductor_ir


def lower_donate(saved: Sequence[Any]) -> None:
    """Make inputs into donated buffers, as Inductor does in a backward that is not traced.

    Not under CUDA graphs, which keep their inputs in memory of their own from step to step.
    """
    if inductor_config.triton.cudagraphs:
        return
    ir, graph = inductor_ir(), graph_lowering()
    for tensor in saved:
        buffer = tensor.data.data
        if type(buffer) is ir.InputBuffer:
            donated = ir.DonatedBuffer(name=buffer.name, layout=buffer.layout)
            tensor.data.data = graph.graph_inputs_original[buffer.name] = donated
