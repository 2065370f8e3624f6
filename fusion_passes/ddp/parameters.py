"""The parameters of a DDP module, as its reducer sends their gradients."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from fusion_passes.plan.caps import ModuleCaps, default_caps, given_caps
from fusion_passes.reductions.hook_pattern import is_dense
from fusion_passes.torch_private import DEFAULT_FIRST_BUCKET_BYTES
from fusion_passes.torch_private.ddp import parameters_of


def embeddings_with_rows(
    model: torch.nn.Module,
) -> Iterator[torch.nn.Embedding | torch.nn.EmbeddingBag]:
    """The layers of a model whose gradients are sparse: those of which DDP expects that."""
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag) and module.sparse:
            yield module


def sparse_ids(model: torch.nn.Module) -> set[int]:
    """The ids of the parameters whose gradients are sparse."""
    layers = embeddings_with_rows(model)
    return {id(parameter) for layer in layers for parameter in layer.parameters(recurse=False)}


def caps_of_ddp(ddp: DistributedDataParallel) -> ModuleCaps:
    """The caps of a module's buckets, before any option."""
    if not ddp.bucket_bytes_cap_default:
        return given_caps(int(ddp.bucket_bytes_cap), ddp.bucket_bytes_cap_list)
    sparse = sparse_ids(ddp.module)
    dense = [parameter for parameter in parameters_of(ddp) if id(parameter) not in sparse]
    gradient_bytes = sum(parameter.nbytes for parameter in dense)
    return default_caps(gradient_bytes, DEFAULT_FIRST_BUCKET_BYTES, ddp.bucket_bytes_cap)


def strides_to_send(parameter: Tensor) -> tuple[int, ...]:
    """The strides in which a gradient is sent: the parameter's, or contiguous if not dense."""
    if is_dense(parameter):
        return tuple(parameter.stride())
    return tuple(torch.empty(parameter.shape, device="meta").stride())
