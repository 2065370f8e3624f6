"""Waits for parameters where the next forward first reads them: ``shard_optimizer="overlap"``."""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

import torch
from torch import Tensor, fx, nn

from fusion_passes.graph.custom_ops import define
from fusion_passes.graph.families import is_library_kernel
from fusion_passes.graph.identity import pass_identity
from fusion_passes.reducer.backward import reducers
from fusion_passes.reducer.reducer import Reducer
from fusion_passes.sharded.sends import on_the_way
from fusion_passes.torch_private import CustomGraphPass
from fusion_passes.torch_private.autograd import keeps_input_numbers
from fusion_passes.torch_private.inductor import (
    inductor_ir,
    is_aot_backward,
    is_graph_input,
    register_lowering,
)

_MOST_DIMS: Final = 3
"""Inductor copies weights of convolutions, which have more dimensions, to another layout as soon as
it reads the inputs of a graph (``GraphLowering.run_node``, torch 2.11 to 2.14)."""

_IS_OURS: Final = "_ddp_fusion_waits"
"""Attribute of the functions that take the place of a model's ``forward``."""

_ALIGNMENT: Final = 16
"""Bytes. On an accelerator, a graph copies inputs with other addresses before it runs."""


def _wait_for_module(module: str) -> None:
    on_the_way.wait(of=module, to_write=False)


def _wait_for(parameters: Sequence[Tensor], module: str | None = None) -> None:
    on_the_way.wait(parameters if module is None else None, of=module, to_write=False)


WAIT_FOR_MODULE: Final = define(
    "wait_for_module", "(str module) -> ()", _wait_for_module, fake=lambda _: None
)
"""Waits for all parameters of a module that are on their way to this rank. Each forward of a module
with ``shard_optimizer="overlap"`` calls it first. Dynamo traces it, and :class:`WaitForParameters`
moves it to the places in the graph where parameters are read."""

torch.fx.node.has_side_effect(WAIT_FOR_MODULE)

WAIT_FOR: Final = define(
    "wait_for_parameters_",
    "(Tensor(a!)[] parameters, str? module=None) -> ()",
    _wait_for,
    meta=lambda *_: None,
    tags=(torch.Tag.cudagraph_unsafe,),
)
"""Waits for these parameters, or for all of a module, if they are on their way to this rank.
Because the op is declared as a write, Inductor reads the parameters after it."""


# --- Forwards ------------------------------------------------------------------------------------


def wait_in_forward(ddp: Any, reducer: Reducer) -> None:
    """Have the forward of a module's wrapped module wait for parameters, if the option says so.
    ``torch.compile`` begins a graph with that function, so that the wait is in the graph."""
    module: nn.Module = getattr(ddp.module, "_orig_mod", ddp.module)
    if reducer.module.config.shard_optimizer != "overlap":
        return
    name = reducer.module.name_in_graphs
    own = vars(module).get("forward")
    if own is not None and not hasattr(own, _IS_OURS):  # A copy has the forward of its original.
        hook = functools.partial(_pre_hook, name)
        handle: Any = module.register_forward_pre_hook(hook, prepend=True)
    else:
        own = types.MethodType(_forward_of(type(module), name), module)
        vars(module)["forward"] = own
        handle = _Forward(module, own)
    reducer.hooks.handles.append(handle)


def _pre_hook(name: str, _: nn.Module, __: Any) -> None:
    WAIT_FOR_MODULE(name)


class _Forward:
    """The handle of a forward that waits."""

    def __init__(self, module: nn.Module, forward: types.MethodType) -> None:
        self._module = module
        self._forward = forward

    def remove(self) -> None:
        if vars(self._module).get("forward") is self._forward:
            del vars(self._module)["forward"]


def _forward_of(kind: type[nn.Module], name: str) -> Callable[..., Any]:
    @functools.wraps(kind.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # While Dynamo traces, is_exporting() is always true in torch 2.11.
        if torch.compiler.is_dynamo_compiling() or not torch.compiler.is_exporting():
            WAIT_FOR_MODULE(name)
        return type(self).forward(self, *args, **kwargs)

    # Dynamo limits how often it compiles one code object, and forwards have one each otherwise.
    function = cast("types.FunctionType", forward)
    function.__code__ = function.__code__.replace()
    setattr(function, _IS_OURS, True)
    return function


def wait_for_module(
    original: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any
) -> Any:
    """Take the place of a method that reads or writes the parameters of a module."""
    on_the_way.wait(module.parameters())
    return original(module, *args, **kwargs)


def wait_for_parameter(
    original: Callable[..., Any], parameter: Tensor, *args: Any, **kwargs: Any
) -> Any:
    """Take the place of a method that reads a parameter."""
    on_the_way.wait([parameter])
    return original(parameter, *args, **kwargs)


def wait_for_averaged(original: Callable[..., Any], averaged: nn.Module, model: nn.Module) -> Any:
    """Take the place of a method that reads the parameters of a model, to average them."""
    on_the_way.wait(model.parameters())
    return original(averaged, model)


def finish_first(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Take the place of the function that ends process groups: finish what is on its way, since
    other ranks may wait for it."""
    with contextlib.suppress(Exception):
        on_the_way.wait()
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
    return original(*args, **kwargs)


# --- Graphs --------------------------------------------------------------------------------------


def wait_for_inputs(compiled: Callable[..., Any], indices: Sequence[int]) -> Callable[..., Any]:
    """Return a function that waits for the inputs with these indices, and then calls a compiled
    graph."""
    return _wait_first(compiled, lambda inputs: _wait_for([inputs[index] for index in indices]))


def wait_before_graph(
    compile_graph: Callable[..., Any], model: fx.GraphModule, *args: Any, **kwargs: Any
) -> Any:
    """Compile a graph without :data:`WAIT_FOR_MODULE`. Return a function that does what this does,
    and then calls the compiled graph."""
    marks = model.graph.find_nodes(op="call_function", target=WAIT_FOR_MODULE)
    names = [cast("str", mark.args[0]) for mark in marks]
    for mark in marks:
        model.graph.erase_node(mark)
    model.recompile()

    def wait(_: Sequence[Any]) -> None:
        for name in names:
            _wait_for_module(name)

    return _wait_first(compile_graph(model, *args, **kwargs), wait)


def _wait_first(
    compiled: Callable[..., Any], wait: Callable[[Sequence[Any]], None]
) -> Callable[..., Any]:
    @functools.wraps(compiled)
    def wait_first(*inputs: Any) -> Any:
        wait(inputs)
        return compiled(*inputs)

    return wait_first


def waits_of_forward(graph: fx.Graph, inputs: Sequence[Any]) -> WaitForParameters | None:
    """Make the pass for a graph of Dynamo's. Return ``None`` if the graph must be entered with all
    parameters."""
    if not keeps_input_numbers(graph, inputs):
        return None
    gradients = reducers.gradients()
    positions = [n for n, each in enumerate(inputs) if id(each) in gradients]
    parameters = [inputs[position] for position in positions]
    if any(each.device.type != "cpu" and each.data_ptr() % _ALIGNMENT for each in parameters):
        return None
    shapes = (tuple(each.shape) for each in parameters)
    return WaitForParameters(len(inputs), tuple(zip(positions, shapes, strict=True)))


@dataclass(frozen=True)
class WaitForParameters(CustomGraphPass):
    """Waits for each parameter before its first use in the graph, and for all others at the end.

    Before::

        primals_1: f32[4, 4], primals_2: f32[4], primals_3: f32[4, 4]
        wait_for_module("0/ddp0")
        addmm: f32[2, 4] = addmm(primals_2, x, permute(primals_1))
        mm: f32[2, 4] = mm(addmm, primals_3)

    After::

        primals_1: f32[4, 4], primals_2: f32[4], primals_3: f32[4, 4]
        wait_for_parameters_([primals_1, primals_2])
        addmm: f32[2, 4] = addmm(primals_2, x, permute(primals_1))
        wait_for_parameters_([primals_3])
        mm: f32[2, 4] = mm(addmm, primals_3)
        wait_for_parameters_([primals_3], "0/ddp0")

    One wait is for all parameters that are first read up to the next library kernel. The last wait
    is for what runs after the graph. Its parameter tells Inductor the device: a call without
    one runs in the middle of a C++ kernel. A graph without the first node, such as the backward, is
    left alone.

    Parameters of more than three dimensions must have arrived before the graph begins: Inductor
    reads them at its start.

    Attributes:
        num_inputs: number of inputs of the graph that Dynamo traced.
        parameters: index and shape of each input that is a parameter.
    """

    num_inputs: int
    parameters: tuple[tuple[int, tuple[int, ...]], ...]

    @property
    def before_graph(self) -> list[int]:
        """Indices of the parameters that must have arrived before the graph begins."""
        return [index for index, shape in self.parameters if len(shape) > _MOST_DIMS]

    def __call__(self, graph: fx.Graph) -> None:
        marks = graph.find_nodes(op="call_function", target=WAIT_FOR_MODULE)
        if not marks:
            return
        _register_lowering()
        if is_aot_backward(graph):  # Torch 2.11 puts the mark into both graphs.
            for mark in marks:
                graph.erase_node(mark)
            return
        nodes = list(graph.nodes)
        unread = self._parameters_of(graph)
        some = [*unread, *filter(_is_tensor, nodes)][:1]
        wait, wanted = None, list[fx.Node]()
        for node in nodes[nodes.index(marks[0]) + 1 : -1]:
            first_read = [source for source in node.all_input_nodes if source in unread]
            for source in first_read:
                del unread[source]
            wanted += first_read
            if first_read and wait is None:
                wait = _add_wait(node, [])
            if wait is not None and is_library_kernel(node):
                wait.args, wait, wanted = (wanted,), None, []
        if wait is not None:
            wait.args = (wanted,)
        for mark in marks:
            _add_wait(graph.output_node(), some, *mark.args)
            graph.erase_node(mark)

    def _parameters_of(self, graph: fx.Graph) -> dict[fx.Node, None]:
        """The inputs that are parameters and are waited for in the graph. If AOTAutograd has
        numbered the inputs differently, all inputs that are tensors: a wait for others does
        nothing."""
        inputs = graph.find_nodes(op="placeholder")
        found = {inputs[index]: shape for index, shape in self.parameters if index < len(inputs)}
        is_same = len(inputs) == self.num_inputs and all(
            _is_tensor(node) and tuple(node.meta["val"].shape) == shape
            for node, shape in found.items()
        )
        chosen = found if is_same else filter(_is_tensor, inputs)
        return dict.fromkeys(n for n in chosen if n.meta["val"].dim() <= _MOST_DIMS)

    def uuid(self) -> str:
        return pass_identity(repr(self))


def _add_wait(before: fx.Node, *args: Any) -> fx.Node:
    with before.graph.inserting_before(before):
        wait = before.graph.call_function(WAIT_FOR, args)
    wait.meta["val"] = None
    return wait


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), Tensor)


@functools.cache
def _register_lowering() -> None:
    """Register the lowering of :data:`WAIT_FOR`, not before a compile: Inductor takes a second to
    import."""
    register_lowering(WAIT_FOR, _lower_wait)


def _lower_wait(parameters: Sequence[Any], module: str | None = None) -> None:
    """Lower a wait to a call, and refuse one for a copy of a parameter, which would have been made
    before the wait."""
    if module is None and not all(map(is_graph_input, parameters)):
        raise AssertionError(
            'shard_optimizer="overlap": Inductor copies a parameter before the wait for it. Set '
            "shard_optimizer = True, and report this."
        )
    inductor_ir().FallbackKernel.create(WAIT_FOR, parameters, module)
