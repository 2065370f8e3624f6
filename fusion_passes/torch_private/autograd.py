"""Private parts of tensors, autograd nodes, modules and graphs, of operators and compiled regions.
Checked on torch 2.11.0, 2.13.0 and 2.15.0."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Annotated, Any, Final

import torch
from torch import Tensor, fx, nn

from fusion_passes.torch_private import OpOverload, compiled_autograd, is_compiled_forward

# --- Tensors -------------------------------------------------------------------------------------


def base_of_view(tensor: Tensor) -> Tensor | None:
    """The tensor that this one is a view of, for autograd; ``None`` if it is no view."""
    return tensor._base


def flattened(tensors: Sequence[Tensor]) -> Tensor:
    """Put tensors of one dtype and device into one, one after the other: ``[all elements]``.

    A single one is not copied.
    """
    flat: Tensor = torch._utils._flatten_dense_tensors(tensors)
    return flat


def unflattened(flat: Tensor, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Give the parts of what :func:`flattened` has made, as views in the tensors' shapes."""
    pieces: tuple[Tensor, ...] = torch._utils._unflatten_dense_tensors(flat, tensors)
    return pieces


def version_of_tensor(tensor: Tensor) -> int:
    """How often the tensor's memory has been written to."""
    version: int = tensor._version
    return version


def is_tensor_subclass(value: Any) -> bool:
    """Whether a value is a tensor that is made of others, which AOTAutograd takes apart."""
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    return bool(is_traceable_wrapper_subclass(value))


def hooks_on_gradient(parameter: Tensor) -> dict[int, Any]:
    """The hooks that get the parameter's gradient before it is accumulated, in their order."""
    hooks: Any = parameter._backward_hooks
    return {} if hooks is None else hooks


def any_have_hooks(tensors: Iterable[Tensor], most_after: int) -> bool:
    """Whether some of the tensors have hooks that get the gradient before it is accumulated, or
    more than ``most_after`` that run when it has been. A loop over attributes: it is run for all
    parameters in each step, and a call for each would take three times as long."""
    for tensor in tensors:
        after: Any = tensor._post_accumulate_grad_hooks
        if tensor._backward_hooks or (after is not None and len(after) > most_after):
            return True
    return False


def accumulates_plainly(tensor: Tensor) -> bool:
    """Whether nobody looks at a tensor's gradient before it is accumulated, or right after: there
    are no hooks of either kind."""
    return not tensor._backward_hooks and not tensor._post_accumulate_grad_hooks


def hook_behind_accumulation(tensor: Tensor, hook: Callable[..., None]) -> tuple[Any, Any]:
    """Have a function called whenever a gradient has been accumulated in a tensor, behind all other
    hooks on it, as DDP's reducer does.

    Args:
        tensor: a leaf that requires a gradient.
        hook: called with what the engine gives hooks of nodes.

    Returns:
        The node, which must be kept, or the hook is gone with it; and the hook's handle.
    """
    node = torch.autograd.graph.get_gradient_edge(tensor).node
    return node, node.register_hook(hook)


AccumulateGrad: Final[Any] = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]
"""The class of the autograd nodes that accumulate in the ``.grad`` of a tensor, their ``variable``.
What a ``Function`` of the user's keeps under that name is none."""


# --- Modules -------------------------------------------------------------------------------------


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """The parameters of a module itself, whatever its class says of attributes of their names."""
    return module._parameters


def forward_hooks(module: nn.Module) -> tuple[dict[int, Any], dict[int, Any]]:
    """The hooks that run before a module's forward, and after it."""
    return module._forward_pre_hooks, module._forward_hooks


# --- Autograd nodes ------------------------------------------------------------------------------


def sequence_number(node: Any) -> int:
    """The number of an autograd node, which no other has in its thread."""
    return int(node._sequence_nr())


def differentiates_a_backward(node: Any) -> bool:
    """Whether an autograd node differentiates a backward that was run with ``create_graph=True``:
    of an operator of torch's (``GeluBackwardBackward0``) or of a compiled forward. A ``Function``
    of the user's has no number at its end."""
    name: str = node.name()
    if "BackwardBackward" not in name:  # Of nearly all.
        return False
    kind = name.rstrip("0123456789")
    is_of_torch = kind != name or kind == "CompiledFunctionBackwardBackward"
    return is_of_torch and kind.endswith("BackwardBackward")


def has_nested_tensors(node: Any) -> bool:
    """Whether the forward that an autograd node belongs to returns nested tensors, or is a compiled
    one that takes some."""
    from torch.nested._internal.nested_tensor import NestedTensor

    if any(output.is_nested_tensor for output in node._input_metadata):
        return True
    if not is_compiled_forward(node):
        return False
    inputs = compiled_forward(node).metadata.subclass_inp_meta
    return any(getattr(item, "original_subclass_type", None) is NestedTensor for item in inputs)


def compiled_forward(context: Any) -> Any:
    """The compiled forward that an autograd node belongs to: a subclass of ``Function``."""
    return context._forward_cls


def backward_to_read(context: Any) -> Any:
    """AOTAutograd's ``_lazy_backward_info`` of a node's compiled forward: its backward, which may
    still have to be read from a cache, or compiled."""
    return context._forward_cls._lazy_backward_info


class _Asked(Exception):  # noqa: N818 - it is an answer
    """Says which hooks a node has."""


def _question() -> None:
    """Is registered on a node, in vain: see :func:`register_unless_asked`."""


def register_unless_asked(register: Callable[..., Any], hooks: Any, hook: Any) -> Any:
    """Take the place of ``torch.autograd.function._HookMixin._register_hook``, which nodes of C++
    call with their hooks, and with the one to be added to them: it is the one door to them, since
    torch tells nobody which nodes have hooks.

    Args:
        register: the original.
        hooks: those that the node has, by the ids of their handles, or ``None``.
        hook: to be added.
    """
    if hook is _question:
        raise _Asked(len(hooks or ()))
    return register(hooks, hook)


def hooks_on_node(node: Any) -> tuple[int, int]:
    """How many Python hooks run before a node of C++, and after it: some microseconds. Only where
    :func:`register_unless_asked` is in its place."""
    counts = []
    for register in (node.register_prehook, node.register_hook):
        try:
            register(_question)
        except _Asked as answer:
            counts.append(answer.args[0])
    before, after = counts
    return before, after


def have_hooks_on_nodes(parameters: Iterable[Tensor]) -> bool:
    """Whether there are Python hooks on a node that accumulates the gradient of one of these: some
    microseconds for each. Only where :func:`register_unless_asked` is in its place."""
    for parameter in parameters:
        if not parameter.requires_grad:
            continue
        if any(hooks_on_node(torch.autograd.graph.get_gradient_edge(parameter).node)):
            return True
    return False


# --- Graphs and operators ------------------------------------------------------------------------


def schema(operator: OpOverload) -> torch.FunctionSchema:
    """The names of an operator's arguments, and what it writes and returns views of."""
    return operator._schema


def makers_of_sparse_gradients() -> tuple[OpOverload, OpOverload]:
    """What makes the sparse gradients of ``nn.Embedding`` and of ``nn.EmbeddingBag`` in a post-grad
    graph; with other arguments, what makes others."""
    aten = torch.ops.aten
    return (
        aten._sparse_coo_tensor_with_dims_and_tensors.default,
        aten._embedding_bag_backward.default,
    )


def register_fake(library: torch.library.Library, name: str, function: OpOverload) -> None:
    """Have an operator give on fake tensors what another one gives.

    ``torch.library.register_fake`` looks for its caller's source first, among the files of all
    modules that are imported: 10 to 25 ms at each start.
    """
    operator = torch._library.simple_registry.singleton.find(f"{library.ns}::{name}")
    operator.fake_impl.register(function, __file__, lib=library)


def move_to_end(graph: fx.Graph, node: fx.Node) -> None:
    """Move a node after all others, the output among them. Their order is not checked."""
    graph._root.prepend(node)


# --- Compiled regions ----------------------------------------------------------------------------


def region_is_dynamic(
    region: Annotated[Any, "torch._dynamo.eval_frame.OptimizeContext"],
) -> bool | None:
    """The option ``dynamic`` of ``torch.compile`` for a region."""
    dynamic: bool | None = region._dynamic
    return dynamic


def tracing_backwards(
    compiler: Callable[[fx.GraphModule], Any], dynamic: bool
) -> contextlib.AbstractContextManager[None]:
    """A context in which compiled autograd traces backwards.

    Args:
        compiler: compiles their graphs.
        dynamic: whether sizes are symbolic.
    """
    compile_hooks_alone(False)
    context: contextlib.AbstractContextManager[None] = compiled_autograd()._enable(
        compiler, dynamic=dynamic
    )
    return context


def compile_hooks_alone(yes: bool) -> None:
    """Whether a user's hook that breaks the graph of a traced backward is compiled by itself, as
    torch does it, or runs as it is.

    Torch compiles it again for each parameter's shape; and where a hook reads ``p.grad``, its sizes
    get symbols that guards then do not know: ``AssertionError: sources must not be empty``, unless
    its kernels come from a cache (torch 2.11 to 2.15). ``torch._dynamo.reset`` may forget this.
    """
    from torch._C._dynamo.eval_frame import set_code_exec_strategy
    from torch._dynamo.external_utils import call_hook
    from torch._dynamo.types import FrameAction, FrameExecStrategy

    action = FrameAction.DEFAULT if yes else FrameAction.SKIP
    set_code_exec_strategy(call_hook.__code__, FrameExecStrategy(action, action))


@contextlib.contextmanager
def weak_marks(tensors: Iterable[Tensor]) -> Iterator[None]:
    """A context in which ``torch._dynamo.mark_dynamic`` means what ``maybe_mark_dynamic`` does.

    Args:
        tensors: that may be marked.
    """
    marked = {id(tensor): vars(tensor) for tensor in tensors if _STRICT_MARKS in vars(tensor)}
    before = {number: dict(attributes) for number, attributes in marked.items()}
    for attributes in marked.values():
        strict = attributes.pop(_STRICT_MARKS)
        attributes[_WEAK_MARKS] = strict | attributes.get(_WEAK_MARKS, set())
    try:
        yield
    finally:
        for number, attributes in marked.items():
            attributes.pop(_WEAK_MARKS, None)
            attributes.update(before[number])


_STRICT_MARKS: Final = "_dynamo_dynamic_indices"
_WEAK_MARKS: Final = "_dynamo_weak_dynamic_indices"
"""Attributes of tensors: sets of dimensions (torch 2.11 to 2.15)."""


# --- The engine ----------------------------------------------------------------------------------


def running_node() -> Any:
    """The autograd node whose backward runs in this thread; ``None`` where none does."""
    return torch._C._current_autograd_node()


def after_backward(function: Any) -> None:
    """Have autograd's engine call ``function`` at the end of the backward that it runs."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(function)


def backward_id() -> int:
    """Number of the backward that autograd's engine runs in this thread; -1 if none."""
    return int(torch._C._current_graph_task_id())


def backward_keeps_graph() -> bool:
    """Whether the backward that autograd's engine runs in this thread was called with
    ``retain_graph=True``."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())
