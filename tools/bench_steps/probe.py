"""When each gradient is ready in the backward that the compiler makes without DDP."""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Any, Final

import torch
import torch._inductor.config as inductor_config
from torch import Tensor, fx

# Inductor calls a custom pass only if it is of this class, and caches graphs by its uuid.
from torch._inductor.custom_graph_pass import CustomGraphPass

# What graphs are traced with.
from torch._subclasses.fake_tensor import FakeTensor

from fusion_passes.graph.edits import pin
from fusion_passes.graph.families import is_library_kernel

NOTE: Final = "bench_steps::note_ready"
KEEP: Final = "bench_steps::keep"

# "flexible": a gradient is handed over in the layout that it has, not copied into another.
torch.library.define(
    NOTE,
    "(Tensor gradient, Tensor order, int index) -> Tensor",
    tags=(torch.Tag.flexible_layout,),
)
torch.library.define(KEEP, "(Tensor order, Tensor(a!) kept) -> ()")


@torch.library.register_fake(NOTE)
def _(gradient: Tensor, order: Tensor, index: int) -> Tensor:  # noqa: ARG001
    return torch.empty_like(order)


@torch.library.register_fake(KEEP)
def _(order: Tensor, kept: Tensor) -> None:
    """Do nothing: its schema has what it writes."""


@torch.library.impl(KEEP, ("cpu", "cuda"))
def _(order: Tensor, kept: Tensor) -> None:
    """Do nothing: it is there to be called last."""


class ReadyClock:
    """Puts a note behind each gradient of the backwards that are compiled from now on.

    A note reads what the note before it gives, so they stay in the order of the graph, as
    collectives do. As behind a launch, the next kernel of a library is bound to follow it: Inductor
    would move all notes of convolutions to the end.

    Attributes:
        sizes: in bytes, of the gradients in the order in which they were noted.
    """

    def __init__(self, device: torch.device) -> None:
        self.sizes: list[int] = []
        self._noted: list[tuple[float, Any, int]] = []
        self._cuda = device.type == "cuda"
        torch.library.impl(NOTE, ("cpu", "cuda"), self._note)
        # A cached backward has none of this process's notes.
        inductor_config.fx_graph_cache = False
        inductor_config.post_grad_custom_post_pass = NotePass()

    def _note(self, gradient: Tensor, order: Tensor, index: int) -> Tensor:  # noqa: ARG002
        event = None
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
        self._noted.append((time.perf_counter(), event, gradient.nbytes))
        return torch.empty_like(order)

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

    a = mm(x, y)                       a = mm(x, y)
    b = mm(a, y)               ->      first = note_ready(a, order, 0)
    return a, b                        b = mm(a, y) @ [first]
                                       second = note_ready(b, first, 1)
                                       keep(second, order)
                                       return a, b
    """

    def __call__(self, graph: fx.Graph) -> None:
        inputs = graph.find_nodes(op="placeholder")
        if not any(node.name.startswith("tangents") for node in inputs):
            return
        output = graph.output_node()
        gradients = [node for node in output.all_input_nodes if node.op != "placeholder"]
        positions = {node: index for index, node in enumerate(graph.nodes)}
        first = next(node for node in graph.nodes if node.op not in ("placeholder", "get_attr"))
        with graph.inserting_before(first):
            kind: dict[str, Any] = {"dtype": torch.float32, "device": torch.device("cpu")}
            order = graph.call_function(torch.ops.aten.full.default, ([1], 0.0), kind)
            with _fake_mode(inputs):
                order.meta["val"] = torch.full([1], 0.0)
        notes = [order]
        for index, node in enumerate(sorted(gradients, key=positions.__getitem__)):
            with graph.inserting_after(node):
                note = graph.call_function(
                    torch.ops.bench_steps.note_ready.default, (node, notes[-1], index)
                )
                note.meta["val"] = order.meta["val"]
                notes.append(note)
        with graph.inserting_before(output):
            keep = graph.call_function(torch.ops.bench_steps.keep.default, (notes[-1], order))
            keep.meta["val"] = None
        _bind_kernels(graph, set(notes[1:]))

    def uuid(self) -> str:
        return "bench_steps.probe"


def _bind_kernels(graph: fx.Graph, notes: Collection[fx.Node]) -> None:
    """Let the first library kernel behind a note follow it."""
    noted = None
    for node in list(graph.nodes):
        if node in notes:
            noted = node
        elif noted is not None and is_library_kernel(node):
            pin([node], [noted])
            noted = None


def _fake_mode(inputs: list[fx.Node]) -> Any:
    """Of the tensors that a graph was traced with."""
    values: list[Any] = [node.meta["val"] for node in inputs]
    return next(value for value in values if isinstance(value, FakeTensor)).fake_mode
