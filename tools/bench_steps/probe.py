"""When each gradient is ready in the backward that the compiler makes without DDP."""

from __future__ import annotations

import time
from typing import Any, Final

import torch
import torch._inductor.config as inductor_config
from torch import Tensor, fx

# Inductor calls a custom pass only if it is of this class, and caches graphs by its uuid.
from torch._inductor.custom_graph_pass import CustomGraphPass

# What graphs are traced with.
from torch._subclasses.fake_tensor import FakeTensor

OPERATOR: Final = "bench_steps::note_ready"

# "flexible": a gradient is handed over in the layout that it has, not copied into another.
torch.library.define(
    OPERATOR,
    "(Tensor gradient, Tensor(a!) order, int index) -> ()",
    tags=(torch.Tag.flexible_layout,),
)


@torch.library.register_fake(OPERATOR)
def _(gradient: Tensor, order: Tensor, index: int) -> None:
    """Do nothing: its schema has what it writes."""


class ReadyClock:
    """Puts a note behind each gradient of the backwards that are compiled from now on.

    A note is an operator that seems to write into a tensor that all notes share, so they stay in
    the order of the graph, as collectives do.

    Attributes:
        sizes: in bytes, of the gradients in the order in which they were noted.
    """

    def __init__(self, device: torch.device) -> None:
        self.sizes: list[int] = []
        self._noted: list[tuple[float, Any, int]] = []
        self._cuda = device.type == "cuda"
        torch.library.impl(OPERATOR, ("cpu", "cuda"), self._note)
        # A cached backward has none of this process's notes.
        inductor_config.fx_graph_cache = False
        inductor_config.post_grad_custom_post_pass = NotePass()

    def _note(self, gradient: Tensor, order: Tensor, index: int) -> None:  # noqa: ARG002
        event = None
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
        self._noted.append((time.perf_counter(), event, gradient.nbytes))

    def clear(self) -> None:
        """Forget what was noted."""
        self._noted = []

    def read(self, begin: Any) -> tuple[float, ...]:
        """Seconds from ``begin`` (a time of ``perf_counter``, or a CUDA event) to each note since
        the last call."""
        if self._cuda:
            torch.cuda.synchronize()
        noted, self._noted = self._noted, []
        self.sizes = [size for _, _, size in noted]
        if self._cuda:
            return tuple(begin.elapsed_time(event) / 1000 for _, event, _ in noted)
        return tuple(moment - begin for moment, _, _ in noted)


class NotePass(CustomGraphPass):
    """Puts the notes into a backward; what is no backward stays as it is.

    mul = mul(a, b)                    mul = mul(a, b)
    neg = neg(mul)             ->      note_ready(mul, order, 0)
    return mul, neg                    neg = neg(mul)
                                       note_ready(neg, order, 1)
                                       return mul, neg
    """

    def __call__(self, graph: fx.Graph) -> None:
        inputs = graph.find_nodes(op="placeholder")
        if not any(node.name.startswith("tangents") for node in inputs):
            return
        (output,) = graph.find_nodes(op="output")
        gradients = [node for node in output.all_input_nodes if node.op != "placeholder"]
        positions = {node: index for index, node in enumerate(graph.nodes)}
        first = next(node for node in graph.nodes if node.op not in ("placeholder", "get_attr"))
        with graph.inserting_before(first):
            kind: dict[str, Any] = {"dtype": torch.float32, "device": torch.device("cpu")}
            order = graph.call_function(torch.ops.aten.full.default, ([1], 0.0), kind)
            with _fake_mode(inputs):
                order.meta["val"] = torch.full([1], 0.0)
        for index, node in enumerate(sorted(gradients, key=positions.__getitem__)):
            with graph.inserting_after(node):
                note = graph.call_function(
                    torch.ops.bench_steps.note_ready.default, (node, order, index)
                )
                note.meta["val"] = None

    def uuid(self) -> str:
        return "bench_steps.probe"


def _fake_mode(inputs: list[fx.Node]) -> Any:
    """Of the tensors that a graph was traced with."""
    values: list[Any] = [node.meta["val"] for node in inputs]
    return next(value for value in values if isinstance(value, FakeTensor)).fake_mode
