"""Private names of tensors, modules, autograd nodes, graphs and operators, and of the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import torch
from torch import Tensor, fx, nn

from fusion_passes.torch_private import OpOverload

# --- Tensors -------------------------------------------------------------------------------------


def tensor_in(memory: Tensor, shape: Sequence[int], strides: Sequence[int], offset: int) -> Tensor:
    """A tensor in the memory of another one, which autograd does not take for a view of it. Strides
    and offset are in elements; the offset counts from the first element of ``memory``."""
    guards: Any = torch._C._dynamo.guards
    return guards._reinterpret_tensor(memory, shape, strides, offset)


def version_of_tensor(tensor: Tensor) -> int:
    """The version counter of a tensor: how often its memory has been written to."""
    return tensor._version


def gradient_dtype(parameter: Tensor) -> torch.dtype:
    """The dtype in which autograd accumulates a parameter's gradient: the parameter's
    ``grad_dtype``, which torch has from 2.10 on, or else the parameter's dtype."""
    return getattr(parameter, "grad_dtype", None) or parameter.dtype


def is_tensor_subclass(value: Any) -> bool:
    """Whether a value is a tensor subclass that AOTAutograd splits into its inner tensors."""
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    return is_traceable_wrapper_subclass(value)


def keeps_input_numbers(graph: fx.Graph, inputs: Sequence[Any]) -> bool:
    """Whether AOTAutograd numbers the inputs of a graph as Dynamo does, if no input is replaced: it
    gives a tensor subclass several numbers."""
    num_placeholders = len(graph.find_nodes(op="placeholder"))
    return num_placeholders == len(inputs) and not any(map(is_tensor_subclass, inputs))


def have_hooks(tensors: Iterable[Tensor]) -> list[bool]:
    """Whether each of these tensors has hooks that see its gradient: before it is accumulated
    (tensor hooks), or right after that (post-accumulate-grad hooks)."""
    return [bool(t._backward_hooks or t._post_accumulate_grad_hooks) for t in tensors]


def has_hooks_behind(tensor: Tensor) -> bool:
    """Whether a tensor has hooks that run right after its gradient was accumulated."""
    return bool(tensor._post_accumulate_grad_hooks)


RemovableHandle: Final = torch.utils.hooks.RemovableHandle
"""The class of the handles of hooks on tensors, nodes and modules. Its ``next_id`` grows with each
hook that is registered from Python."""


def hook_behind_accumulation(tensor: Tensor, hook: Callable[..., None]) -> tuple[Any, Any]:
    """Register a hook on the AccumulateGrad node of a leaf, as DDP's reducer does. It runs whenever
    a gradient has been accumulated, behind all other hooks on the leaf. Return the node, which must
    be kept, because the hook is freed with it; and the hook's handle."""
    node = torch.autograd.graph.get_gradient_edge(tensor).node
    return node, node.register_hook(hook)


AccumulateGrad: Final[Any] = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]
"""The class of the autograd nodes that accumulate in the ``.grad`` of a tensor, their ``variable``.
An attribute ``variable`` is no proof of the class: a user's ``Function`` may have one, too."""


# --- Modules -------------------------------------------------------------------------------------


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """The parameters of a module itself, even if its class has properties of the same names."""
    return module._parameters


def forward_hooks(module: nn.Module) -> tuple[dict[int, Any], dict[int, Any]]:
    """The tables of a module's forward pre-hooks and of its forward hooks."""
    return module._forward_pre_hooks, module._forward_hooks


# --- Autograd nodes ------------------------------------------------------------------------------


def sequence_number(node: Any) -> int:
    """The sequence number of an autograd node, unique in the thread that made the node."""
    return node._sequence_nr()


HOOKS_ON_NODES: Final = "torch.autograd.function._HookMixin._register_hook"
"""Name of the function that C++ autograd nodes call to add a Python hook, with their table of hooks
(or ``None``) and the new hook. Only here can hooks be counted: torch has no list of them."""


class _Asked(Exception):  # noqa: N818 - it is an answer
    """Carries the number of hooks of a node."""


def _question(*_: object) -> None:
    """Stand for a hook: :func:`register_unless_asked` counts hooks instead of registering it."""


def register_unless_asked(register: Callable[..., Any], hooks: Any, hook: Any) -> Any:
    """Take the place of :data:`HOOKS_ON_NODES`: register a hook. If the hook is :func:`_question`,
    raise :class:`_Asked` with the number of hooks instead."""
    if hook is _question:
        raise _Asked(len(hooks or ()))
    return register(hooks, hook)


def is_of_module_hooks(hook: Any) -> bool:
    """Whether a hook is one of those by which ``torch.utils.hooks.BackwardHook`` calls the full
    backward hooks of a module, in each of its forwards, on autograd nodes of its own."""
    return getattr(hook, "__module__", "") == torch.utils.hooks.__name__


def registers_hooks() -> object:
    """The function that has the name :data:`HOOKS_ON_NODES` now: another object once something has
    replaced it."""
    return torch.autograd.function._HookMixin._register_hook


def hooks_on_node(node: Any) -> tuple[int, int] | None:
    """The numbers of Python pre-hooks and post-hooks of a C++ autograd node. This takes some
    microseconds. ``None`` if something has replaced :func:`register_unless_asked`, and the numbers
    are unknown."""
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
    """The schema of an operator: names of its arguments, which it writes, which it returns views
    of."""
    return operator._schema


def makers_of_sparse_gradients() -> tuple[OpOverload, OpOverload]:
    """The operators that make the sparse gradients of ``nn.Embedding`` and of ``nn.EmbeddingBag``
    in a post-grad graph. With other arguments, these operators make other tensors, too."""
    aten = torch.ops.aten
    return (
        aten._sparse_coo_tensor_with_dims_and_tensors.default,
        aten._embedding_bag_backward.default,
    )


def register_fake(library: torch.library.Library, name: str, function: Callable[..., Any]) -> None:
    """Register a function, or another operator, as the fake implementation of an operator.
    ``torch.library.register_fake`` first searches the files of all imported modules for its
    caller's source, which takes 10 to 25 ms at each start."""
    operator = torch._library.simple_registry.singleton.find(f"{library.ns}::{name}")
    operator.fake_impl.register(function, __file__, lib=library)


def move_to_end(graph: fx.Graph, node: fx.Node) -> None:
    """Move a node behind all others, even behind the output. The order is not checked."""
    graph._root.prepend(node)


def below_autograd() -> Any:
    """A context in which operators skip their autograd kernels. The functional collectives have
    autograd kernels in Python: outside this context, a wait takes 0.3 ms."""
    return torch._C._AutoDispatchBelowAutograd()


# --- The engine ----------------------------------------------------------------------------------


def running_node() -> Any:
    """The autograd node whose backward runs in this thread; ``None`` if none does."""
    return torch._C._current_autograd_node()


def after_backward(function: Any) -> None:
    """Have autograd's engine call ``function`` at the end of the backward that it runs."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(function)


def backward_id() -> int:
    """The id of the backward (graph task) that the engine runs in this thread; -1 if none."""
    return torch._C._current_graph_task_id()


def accumulates_in(nodes: Iterable[Any]) -> bool:
    """Whether the backward that the engine runs in this thread reaches and runs all of these
    AccumulateGrad nodes. A backward that a hook has started with ``torch.autograd.grad`` does not.
    """
    try:
        return all(map(torch._C._will_engine_execute_node, nodes))
    except RuntimeError:  # The engine returns that gradient instead of accumulating it.
        return False
