"""What DDP offers and its Python reducer would leave out without a word: refused in words, before
anything is constructed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from torch import nn

_REFUSED: Final[Mapping[str, str]] = {
    "mixed_precision": "use torch.autocast, or a model in the smaller dtype",
    "find_unused_parameters": "let every parameter take part in each step, or freeze it",
    "skip_all_reduce_unused_params": "let every parameter take part in each step, or freeze it",
    "bucket_cap_mb_list": "set bucket_cap_mb",
    "delay_all_reduce_named_params": "leave it out: reductions overlap the backward anyway",
    "param_to_hook_all_reduce": "leave it out: reductions overlap the backward anyway",
}
_WITHOUT_EFFECT: Final = ("gradient_as_bucket_view", "batched_grad_copy", "lazy_bucket_allocation")


def check_arguments(arguments: Mapping[str, Any]) -> list[str]:
    """Checks what DDP is to be constructed with.

    Args:
        arguments: DDP's arguments by name, the wrapped ``module`` among them.

    Returns:
        The arguments that are set and have no effect under the flag, because they tune the C++
        reducer.

    Raises:
        ValueError: an argument that the fusion does not support; it names the remedy.
    """
    for name, remedy in _REFUSED.items():
        if arguments.get(name):
            shown = repr(arguments[name]) if isinstance(arguments[name], bool) else "..."
            raise ValueError(
                f"DistributedDataParallel({name}={shown}) is not supported while "
                f"torch._inductor.config.ddp_fusion is set: {remedy}, or set ddp_fusion = None "
                "before this module is constructed."
            )
    for name, parameter in arguments["module"].named_parameters():
        if hasattr(parameter, "_in_backward_optimizers"):
            raise ValueError(
                f"_apply_optimizer_in_backward, parameter {name!r}, is not supported while "
                "torch._inductor.config.ddp_fusion is set: the optimizer would run before the "
                "gradient is reduced. Step the optimizer after the backward, or set ddp_fusion = "
                "None before this module is wrapped."
            )
    for name, submodule in arguments["module"].named_modules():
        if isinstance(submodule, nn.Embedding | nn.EmbeddingBag) and submodule.sparse:
            raise ValueError(
                f"{type(submodule).__name__}(sparse=True), module {name!r}, is not supported while "
                "torch._inductor.config.ddp_fusion is set: sparse gradients cannot be packed. "
                "Construct it with sparse=False, or set ddp_fusion = None before this module is "
                "wrapped."
            )
    return [name for name in _WITHOUT_EFFECT if arguments.get(name)]


def refuse_methods(ddp: nn.Module) -> None:
    """Makes the methods that have no effect on the Python reducer say so."""
    refusal = _Refusal("join", "give every rank the same number of batches")
    ddp.join = refusal  # type: ignore[assignment]


class _Refusal:
    def __init__(self, name: str, remedy: str) -> None:
        self._text = (
            f"DistributedDataParallel.{name}() is not supported for a module that was constructed "
            f"while torch._inductor.config.ddp_fusion is set: {remedy}, or set ddp_fusion = None "
            "before this module is constructed."
        )

    def __call__(self, *_: object, **__: object) -> None:
        raise ValueError(self._text)
