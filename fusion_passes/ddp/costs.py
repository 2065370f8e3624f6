"""What collectives cost on a process group: agreed on when a DDP module is constructed.

That is the one point that all ranks surely reach together, whether or not their caches hit: no
collective is issued while a graph is compiled. What was agreed on holds for all modules on the
group.
"""

from __future__ import annotations

from typing import Final

import torch
from torch.nn.parallel import DistributedDataParallel

from fusion_passes.agreement.exchange import meeting_of
from fusion_passes.agreement.protocol import participants
from fusion_passes.config import FusionConfig
from fusion_passes.ddp.launch_clock import launch_clock
from fusion_passes.ddp.modules import registry
from fusion_passes.ddp.sparse import dense_parameters
from fusion_passes.plan.scaling import REDUCE_DTYPE_OF, can_average
from fusion_passes.profile.agree import Wanted, Where, agree_on_profile, agree_on_steps
from fusion_passes.profile.known import known_profile, next_meeting, remember_profile
from fusion_passes.profile.records import Kind
from fusion_passes.profile.steps import load_steps, module_key, steps_path, store_steps
from fusion_passes.reductions.find import dtype_name
from fusion_passes.torch_private.ddp import parameters_of

_MEASURED: Final = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""Dtypes that every backend reduces; others are taken to cost what the nearest of these does."""


def learn_costs(ddp: DistributedDataParallel, config: FusionConfig) -> None:
    """Agree with the other ranks on what collectives of a module's gradients cost, and measure it
    if none of them knows. All ranks call this, when they construct the module.

    Raises:
        RuntimeError: see :func:`fusion_passes.profile.agree.agree_on_profile` and
            :func:`fusion_passes.profile.agree.agree_on_steps`.
    """
    module, group = registry.module_of(ddp), ddp.process_group
    meeting = meeting_of(module.group_name)
    kinds = _kinds_of(ddp, config, module.backend)
    if meeting is None or not kinds:
        return
    profile = known_profile(group)
    try:
        if profile is None or profile.missing(kinds):
            where = Where(group, parameters_of(ddp)[0].device)
            profile = agree_on_profile(
                meeting, where, Wanted(module.backend, kinds), next_meeting(group)
            )
            remember_profile(group, profile)
        path = steps_path(profile.place, _key_of(ddp))
        found = load_steps(path)
        steps = agree_on_steps(meeting, found, next_meeting(group))
    except RuntimeError as error:
        # For ranks that have another flag, and come to their first backward.
        participants[module.group_name].leave_word(str(error))
        raise
    if steps is not None and steps != found:
        store_steps(path, steps)
    serves = steps is not None and steps.serves
    registry.set_costs(ddp, profile, steps if serves else None)
    launch_clock.watch(ddp, profile, path, steps)


def _key_of(ddp: DistributedDataParallel) -> str:
    """Equal for modules of equal parameters."""
    module, parameters = registry.module_of(ddp), parameters_of(ddp)
    return module_key(
        [
            (module.parameters[number], parameters[number].shape, str(parameters[number].dtype))
            for number in module.dense
        ]
    )


def _kinds_of(ddp: DistributedDataParallel, config: FusionConfig, backend: str) -> tuple[Kind, ...]:
    """The kinds of collectives that can reduce the gradients of a module."""
    narrow = REDUCE_DTYPE_OF[config.reduce_dtype]
    dtypes = set()
    for parameter in dense_parameters(ddp).values():
        dtype = parameter.dtype.to_real()
        is_sent_narrow = (
            narrow is not None and dtype.is_floating_point and dtype.itemsize > narrow.itemsize
        )
        dtypes.add(narrow if narrow is not None and is_sent_narrow else dtype)
    kinds = [
        Kind(dtype_name(dtype), "avg" if can_average(backend, dtype) else "sum")
        for dtype in dtypes
        if dtype in _MEASURED
    ]
    return tuple(sorted(kinds, key=str))
