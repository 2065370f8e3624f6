"""Lets a traced backward overwrite what the forward has saved for it, as an untraced one does.

AOTAutograd knows which saved tensors nobody else can see, and Inductor computes their gradients in
their place (torch calls them donated buffers). Under compiled autograd they are inputs like any
other, which stay as they are: the logits lie beside their gradient where memory is at its peak.
Here the trace says again which inputs are donated.
"""

from __future__ import annotations

import contextlib
import operator
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch

from fusion_passes.ddp.tracing import make_readable, traceable
from fusion_passes.graph.operators import DONATE
from fusion_passes.torch_private.autograd import (
    backward_keeps_graph,
    backward_to_read,
    compiled_forward,
)


def donating(
    tracer: Any,
    is_wanted: Callable[[], bool],
    executing: Callable[[], contextlib.AbstractContextManager[None]],
) -> Any:
    """A class of tracers whose graphs say what they may overwrite.

    Args:
        tracer: ``torch._dynamo.compiled_autograd.AutogradCompilerInstance``, or one that was put
            in its place. An instance traces one backward.
        is_wanted: whether the backward that is about to be traced is to be such a one.
        executing: around the run of a compiled graph.
    """
    # The engine looks methods up while an error is being raised, such as that of a graph whose
    # saved tensors are freed. Python then finds only what the class itself has, and where that is
    # nothing, an AttributeError takes the error's place (3.11, _PyType_Lookup).
    functions = {
        name: function
        for owner in (*reversed(tracer.__mro__), _Donating)
        for name, function in vars(owner).items()
        if not name.startswith("__")
    }
    functions |= {"_is_wanted": staticmethod(is_wanted), "_executing": staticmethod(executing)}
    return type("DonatingTracer", (_Donating, tracer), functions)


_Tracer: Any = object


class _Donating(_Tracer):
    """Comes before the tracer's own class."""

    _is_wanted: Callable[[], bool]
    _executing: Callable[[], contextlib.AbstractContextManager[None]]

    def begin_capture(self, inputs: list[torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        # Now: later the inputs are fake.
        self._own_memory = _with_own_memory(inputs) if self._is_wanted() else frozenset()
        self._donated: set[int] = set()
        seen = [traceable(tensor) for tensor in inputs]
        self._replaced = [n for n, tensor in enumerate(inputs) if seen[n] is not tensor]
        return super().begin_capture(seen, *args, **kwargs)

    def proxy_call_aot_backward(
        self, inputs: Any, saved: Any, tensors: Any, proxy: Any, context: Any, *rest: Any
    ) -> Any:
        make_readable(backward_to_read(context))
        candidates = _donated_by(compiled_forward(context).metadata, saved)
        numbered = {_number_of_input(candidate): candidate for candidate in candidates}
        donated = sorted(self._own_memory.intersection(numbered))
        if donated:
            arguments = ([numbered[number] for number in donated],)
            self.fx_tracer.create_proxy("call_function", DONATE, arguments, {})
            self._donated.update(donated)
        return super().proxy_call_aot_backward(inputs, saved, tensors, proxy, context, *rest)

    def end_capture(self, outputs: Any) -> Any:
        run, compiled = super().end_capture(outputs)
        donated, replaced, executing = sorted(self._donated), self._replaced, self._executing

        def run_donating(function: Any, inputs: list[torch.Tensor], *args: Any) -> Any:
            # With retain_graph=True they are needed again, and compiled autograd runs the same
            # graph as without.
            if donated and backward_keeps_graph():
                for number in donated:
                    inputs[number] = inputs[number].clone()
            for number in replaced:
                inputs[number] = traceable(inputs[number])

            def execute(*arguments: Any) -> Any:
                with executing():
                    return function(*arguments)

            return run(execute, inputs, *args)

        return run_donating, compiled


def _with_own_memory(inputs: Iterable[torch.Tensor]) -> frozenset[int]:
    """The inputs, by number, that fill a memory of their own.

    AOTAutograd looks for aliases in its graphs. Inductor may have made more of them: it stores what
    goes into a ``cat`` inside of the result.
    """
    plain = {
        number: tensor
        for number, tensor in enumerate(inputs)
        if type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout == torch.strided
    }
    shown = Counter(tensor.untyped_storage().data_ptr() for tensor in plain.values())
    return frozenset(
        number
        for number, tensor in plain.items()
        if tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
        and torch.empty_like(tensor, device="meta").stride() == tensor.stride()  # No overlap.
        and shown[tensor.untyped_storage().data_ptr()] == 1
    )


def _donated_by(metadata: Any, saved: Any) -> list[Any]:
    """Of what a compiled forward has saved, what AOTAutograd knows to be seen by nobody else."""
    first = metadata.num_symints_saved_for_bw
    numbers = [number - first for number in metadata.bw_donated_idxs or ()]
    return [saved[number] for number in numbers if number < len(saved)]


def _number_of_input(proxy: Any) -> int | None:
    """Which input of the traced backward this is; ``None`` for what a user's hook has unpacked."""
    node = proxy.node
    if node.target is operator.getitem and node.args[0].op == "placeholder":
        return int(node.args[1])
    return None
