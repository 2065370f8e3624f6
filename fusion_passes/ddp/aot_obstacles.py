"""Why the gradients of a module cannot be reduced in the backward that is compiled with its
forward: a sentence for each reason, as it stands in the report."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fusion_passes.config import FusionConfig
from fusion_passes.ddp.comm_hooks import is_hooked, sent_as
from fusion_passes.ddp.modules import registry
from fusion_passes.plan.scaling import can_average
from fusion_passes.torch_private.autograd import any_have_hooks
from fusion_passes.torch_private.ddp import dtensor_spec


def obstacle_in_module(
    ddp: DistributedDataParallel, parameters: Iterable[nn.Parameter], config: FusionConfig
) -> str:
    """Why a module's gradients cannot be averaged by the collective alone, as they must be to be
    right on this rank where they stay on it; empty if they can.

    Args:
        ddp: a managed module.
        parameters: those that it trains.
        config: the options.
    """
    if config.scaling not in ("auto", "collective"):
        return f"scaling={config.scaling!r} scales gradients outside of the collective"
    if config.reduce_dtype is not None:
        return f"reduce_dtype={config.reduce_dtype!r} sends gradients in another dtype"
    if is_hooked(ddp):
        return "a communication hook is called with each bucket"
    if sent_as(ddp) is not None:
        return "a communication hook sends gradients in another dtype"
    return next(filter(None, (_obstacle(ddp, parameter) for parameter in parameters)), "")


def _obstacle(ddp: DistributedDataParallel, parameter: nn.Parameter) -> str:
    module = registry.module_of(ddp)
    if not can_average(module.backend, parameter.dtype):
        return f"{module.backend} cannot average {str(parameter.dtype).removeprefix('torch.')}"
    if dtensor_spec(parameter) is not None:
        return "its parameters are DTensors"
    if not registry.manages_once(parameter):
        return "two DDP modules share a parameter"
    if others_have_hooks([parameter]):
        return HOOKS
    return ""


ALL_SPARSE: Final = "all its gradients are sparse"

NOT_COMPILED_MOSTLY: Final = "most gradients come from what is not compiled"

OTHERS_USED: Final = (
    "backwards that stayed on this rank have used parameters which this one does not reach"
)

HOOKS: Final = "others have hooks on its parameters, which are to see the gradients of this rank"


def others_have_hooks(parameters: Iterable[nn.Parameter]) -> bool:
    """Whether others than DDP see the gradient of some of the parameters in the backward. They must
    see that of this rank alone, as with eager DDP."""
    return any_have_hooks(parameters, most_after=1)
