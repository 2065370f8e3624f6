"""What is different in Inductor's compiles under the flag: the backward that is compiled with a
forward stores the gradients of managed modules in buckets."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import fx

from fusion_passes.ddp.traced import traced_backwards
from fusion_passes.flag import active_config
from fusion_passes.install.fuse_pass import options_to_fuse
from fusion_passes.install.pass_slot import SLOT
from fusion_passes.install.store_pass import options_to_store
from fusion_passes.plan.buckets import CannotLaunchError
from fusion_passes.torch_private import inductor_config
from fusion_passes.torch_private.dynamo import is_compiling_backward

INDUCTOR: Final = "torch._TorchCompileInductorWrapper"
"""Inductor, as a backend of ``torch.compile``."""


def compile_forward(
    original: Callable[..., Any],
    compiler: Any,
    model: fx.GraphModule,
    inputs: Sequence[Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Do what Inductor's backend of ``torch.compile`` does with a graph of Dynamo's.

    Args:
        original: its ``__call__``.
        compiler: the backend.
        model: the graph.
        inputs: what it was traced with: parameters are the module's own.
        args: for the backend.
        kwargs: for the backend.
    """
    options = {**compiler.config, **(kwargs.get("config_patches") or {})}
    config, is_backward = active_config(), is_compiling_backward()
    if traced_backwards.is_compiling and config is not None:
        _check_passes_run(options)
        compiler = _with_options(compiler, options_to_fuse(config, options))
    elif is_backward or _copies_into_lists(model.graph):
        compiler = _without_reinplacing(compiler, options)
    if is_backward or config is None or not compiles_usually(options):
        return original(compiler, model, inputs, *args, **kwargs)
    stored = options_to_store(model.graph, inputs, options)
    if stored:
        traced_backwards.options = dict(compiler.config)
    return original(_with_options(compiler, stored), model, inputs, *args, **kwargs)


def _check_passes_run(options: Mapping[str, Any]) -> None:
    """Refuse to compile a traced backward whose gradients would be reduced one by one: other ranks
    launch buckets.

    Raises:
        CannotLaunchError: Inductor's passes on post-grad graphs, or those of others, are switched
            off.
    """
    switched_off = str(_value_of("disabled_passes", options) or "").split(",")
    if not _value_of("use_post_grad_passes", options) or SLOT in switched_off:
        raise CannotLaunchError("Inductor's passes on post-grad graphs are switched off")


def compiles_usually(options: Mapping[str, Any]) -> bool:
    """Whether what is compiled with these options can tell a reducer of its gradients.

    A replayed CUDA graph writes to the memory that it has recorded, and calls no operator: there,
    and where operators are not lowered, hooks bring the gradients.
    """
    unusual = ("triton.cudagraphs", "fallback_by_default")
    return not any(_value_of(name, options) for name in unusual)


def _value_of(name: str, options: Mapping[str, Any]) -> Any:
    """What an option of Inductor is in a compile with these options."""
    if name in options:
        return options[name]
    owner: Any = inductor_config
    for part in name.split("."):
        owner = getattr(owner, part)
    return owner


_REINPLACING: Final = "reinplace_inplaceable_ops"
"""Inductor's pass that writes in place what a graph has as a new tensor."""


def _copies_into_lists(graph: fx.Graph) -> bool:
    """Whether a forward does what gives a module its buffers in a compiled step."""
    return bool(graph.find_nodes(op="call_function", target=torch._foreach_copy_, sort=False))


def _without_reinplacing(compiler: Any, options: Mapping[str, Any]) -> Any:
    """The backend as it is, but where operators are called that it lowers otherwise, as in lite
    mode: there Inductor gets two things wrong that are written in place (torch 2.11 to 2.15).

    * Of views, which are calls as well, it loses that what one of them reads was written through
      another: a read comes before the write, and gradients of a traced backward are wrong
      (``tests/tools/test_fuzz.py`` has a case).
    * ``_foreach_copy_`` gives ``None`` where what stood there gave a list: an error of the compile
      (``buffers-called`` in ``tests/reducer/test_scenarios.py``).
    """
    if not _value_of("fallback_by_default", options):
        return compiler
    switched_off = ",".join(filter(None, (_value_of("disabled_passes", options), _REINPLACING)))
    return _with_options(compiler, {"disabled_passes": switched_off})


def _with_options(compiler: Any, options: Mapping[str, Any]) -> Any:
    """The backend as it is, but with some options of Inductor."""
    changed = copy.copy(compiler)
    changed.config = {**compiler.config, **options}
    return changed
