"""Private parts of tensors, autograd nodes, modules and graphs, and of operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor, fx, nn

from fusion_passes.torch_private import OpOverload

# --- Tensors -------------------------------------------------------------------------------------


def flattened(tensors: Sequence[Tensor]) -> Tensor:
    """Put tensors of one dtype and device into one, one after the other: ``[all elements]``. A
    single one is not copied."""
    return torch._utils._flatten_dense_tensors(tensors)


def unflattened(flat: Tensor, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Give the parts of what :func:`flattened` has made, as views in the tensors' shapes."""
    return torch._utils._unflatten_dense_tensors(flat, tensors)


def tensor_in(memory: Tensor, shape: Sequence[int], strides: Sequence[int], offset: int) -> Tensor:
    """A tensor in the memory of another one, which autograd does not take for a view of it. Strides
    and offset, which counts from where the memory's own elements begin, are in elements."""
    guards: Any = torch._C._dynamo.guards
    return guards._reinterpret_tensor(memory, shape, strides, offset)


def version_of_tensor(tensor: Tensor) -> int:
    """How often the tensor's memory has been written to."""
    return tensor._version


def gradient_dtype(parameter: Tensor) -> torch.dtype:
    """The dtype in which autograd accumulates a parameter's gradient: its ``grad_dtype``, which
    torch has from 2.10 on, or else that of the parameter."""
    return getattr(parameter, "grad_dtype", None) or parameter.dtype


def is_tensor_subclass(value: Any) -> bool:
    """Whether a value is a tensor that is made of others, which AOTAutograd takes apart."""
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    return is_traceable_wrapper_subclass(value)


def accumulates_plainly(tensor: Tensor) -> bool:
    """Whether nobody looks at a tensor's gradient before it is accumulated, or right after: there
    are no hooks of either kind."""
    return not tensor._backward_hooks and not tensor._post_accumulate_grad_hooks


def hook_behind_accumulation(tensor: Tensor, hook: Callable[..., None]) -> tuple[Any, Any]:
    """Have a function called whenever a gradient has been accumulated in a leaf, behind all other
    hooks on it, as DDP's reducer does. Return the node, which must be kept, or the hook is gone
    with it; and the hook's handle."""
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
    return node._sequence_nr()


HOOKS_ON_NODES: Final = "torch.autograd.function._HookMixin._register_hook"
"""The function that nodes of C++ call with their hooks, or ``None``, and with the one to be added
to them. It is the one door to them: torch tells nobody which nodes have hooks."""


class _Asked(Exception):  # noqa: N818 - it is an answer
    """Says which hooks a node has."""


def _question(*_: object) -> None:
    """Is registered on a node, in vain: see :func:`register_unless_asked`."""


def register_unless_asked(register: Callable[..., Any], hooks: Any, hook: Any) -> Any:
    """Take the place of :data:`HOOKS_ON_NODES`."""
    if hook is _question:
        raise _Asked(len(hooks or ()))
    return register(hooks, hook)


def registers_hooks() -> object:
    """What :data:`HOOKS_ON_NODES` is now: another object once something has replaced it."""
    return torch.autograd.function._HookMixin._register_hook


def hooks_on_node(node: Any) -> tuple[int, int] | None:
    """How many Python hooks run before a node of C++, and after it: some microseconds. ``None``
    where something has replaced :func:`register_unless_asked`, and nobody can know."""
    counts = []
    for register in (node.register_prehook, node.register_hook):
        try:
            register(_question).remove()
        except _Asked as answer:
            counts.append(answer.args[0])
        else:
            return None
    before, after = counts
    return before, after


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


def register_fake(library: torch.library.Library, name: str, function: Callable[..., Any]) -> None:
    """Have an operator give on fake tensors what a function, or another operator, gives.
    ``torch.library.register_fake`` looks for its caller's source first, among the files of all
    modules that are imported: 10 to 25 ms at each start."""
    operator = torch._library.simple_registry.singleton.find(f"{library.ns}::{name}")
    operator.fake_impl.register(function, __file__, lib=library)


def move_to_end(graph: fx.Graph, node: fx.Node) -> None:
    """Move a node after all others, the output among them. Their order is not checked."""
    graph._root.prepend(node)


def below_autograd() -> Any:
    """Context in which operators skip autograd's part of their dispatch, which for the functional
    collectives is written in Python: without it, a wait takes 0.3 ms."""
    return torch._C._AutoDispatchBelowAutograd()


def without_view_tracking() -> Any:
    """A context in which autograd does not see that a tensor is a view of another."""
    key = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)
    return torch._C._ExcludeDispatchKeyGuard(key)


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
    return torch._C._current_graph_task_id()


def accumulates_in(node: Any) -> bool:
    """Whether the backward that the engine runs in this thread reaches, and runs, an AccumulateGrad
    node: one that a hook has called with ``torch.autograd.grad`` does not."""
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # It gives that gradient back instead.
        return False
