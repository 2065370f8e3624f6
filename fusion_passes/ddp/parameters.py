"""The parameters of a DDP module, and the caps of its buckets by DDP's arguments."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fusion_passes.layout.caps import BucketCaps, default_caps, given_caps
from fusion_passes.layout.layout import GradientKind, ParameterNumber
from fusion_passes.reducer.parameters import Parameters
from fusion_passes.torch_private.autograd import gradient_dtype
from fusion_passes.torch_private.ddp import (
    DEFAULT_FIRST_BUCKET_BYTES,
    delayed_parameters,
    parameters_of,
)


def numbered_parameters(ddp: DistributedDataParallel) -> Parameters:
    """The parameters of a module, numbered as DDP numbers them."""
    parameters = parameters_of(ddp)
    names = {id(parameter): name for name, parameter in ddp.module.named_parameters()}
    sparse, delayed = _sparse_ids(ddp.module), set(map(id, delayed_parameters(ddp)))
    return Parameters(
        parameters,
        [names.get(id(parameter), "?") for parameter in parameters],
        [strides_to_send(parameter) for parameter in parameters],
        {
            ParameterNumber(number): GradientKind(
                p.numel(), gradient_dtype(p), p.device, id(p) in sparse, id(p) in delayed
            )
            for number, p in enumerate(parameters)
            if p.requires_grad
        },
    )


def _sparse_ids(model: nn.Module) -> set[int]:
    """Ids of the parameters from which DDP expects sparse gradients: those of embeddings with
    ``sparse=True``."""
    return {
        id(parameter)
        for layer in model.modules()
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.sparse
        for parameter in layer.parameters(recurse=False)
    }


def caps_of_ddp(ddp: DistributedDataParallel) -> BucketCaps:
    """The caps of a module's buckets by DDP's arguments alone, before any option of the flag."""
    if not ddp.bucket_bytes_cap_default:
        return given_caps(int(ddp.bucket_bytes_cap), ddp.bucket_bytes_cap_list)
    sparse = _sparse_ids(ddp.module)
    gradient_bytes = sum(p.nbytes for p in parameters_of(ddp) if id(p) not in sparse)
    return default_caps(gradient_bytes, DEFAULT_FIRST_BUCKET_BYTES, ddp.bucket_bytes_cap)


def strides_to_send(parameter: Tensor) -> tuple[int, ...]:
    """The strides in which a gradient is sent: those of the parameter if it is dense, otherwise
    contiguous ones."""
    if torch.ops.aten.is_non_overlapping_and_dense(parameter):
        return tuple(parameter.stride())
    return tuple(torch.empty(parameter.shape, device="meta").stride())
