"""What is known of a DDP module that is managed, and its names for its process group."""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from fusion_passes.agreement.usage import Usage
from fusion_passes.flag import active_config
from fusion_passes.plan.caps import ModuleCaps, default_caps, given_caps
from fusion_passes.profile.known import known_profile
from fusion_passes.profile.records import Profile
from fusion_passes.profile.steps import MeasuredSteps
from fusion_passes.reductions.hook_pattern import is_dense
from fusion_passes.reductions.owners import Owner
from fusion_passes.torch_private import (
    DEFAULT_FIRST_BUCKET_BYTES,
    register_process_group,
    unregister_process_group,
)
from fusion_passes.torch_private.ddp import parameters_of
from fusion_passes.torch_private.groups import backend_name

PARAMETER_MARK: Final = "#"
"""Stands between a module's name for its group and a parameter's number."""

FLAGS: Final = "(which parameters were used)"
"""What people read in the place of a parameter's name, for what is sent beside the gradients."""


@dataclass(frozen=True)
class ManagedModule:
    """A DDP module whose gradients are reduced under the flag.

    Attributes:
        group_name: the module's own name for its process group.
        process_group: the process group's name.
        backend: name of the process group's backend for the module's device.
        world_size: number of ranks of the process group.
        label: for people: number on the group, and class of the wrapped module.
        parameters: names, in the order in which DDP counts them.
        caps: of its buckets: those that DDP was given, or ours for its gradients.
        strides: of each parameter, in which its gradient is sent; contiguous where the parameter
            is not dense, as in DDP.
        kinds: of each parameter, what a graph depends on, as text: shape, dtype, and these strides.
        trained: numbers of the parameters that required a gradient at construction.
        flag_dtype: in which ranks send which parameters they have used; ``None`` where all must be
            used.
        profile: what collectives and compute cost between its ranks; ``None`` if nobody knows.
        calls_hook: whether a communication hook is called in the place of its collectives.
        steps: when its gradients were ready in steps that were measured; ``None`` if nobody knows.
        sparse: numbers of the trained parameters whose gradients are sparse, and sent as rows.
    """

    group_name: str
    process_group: str
    backend: str
    world_size: int
    label: str
    parameters: tuple[str, ...]
    caps: ModuleCaps
    strides: tuple[tuple[int, ...], ...]
    kinds: tuple[str, ...] = ()
    trained: tuple[int, ...] = ()
    flag_dtype: torch.dtype | None = None
    profile: Profile | None = None
    calls_hook: bool = False
    steps: MeasuredSteps | None = None
    sparse: frozenset[int] = frozenset()

    @property
    def dense(self) -> tuple[int, ...]:
        """Numbers of the trained parameters whose gradients lie in buckets."""
        return tuple(number for number in self.trained if number not in self.sparse)

    def trained_ids(self, parameters: Sequence[Tensor]) -> list[int]:
        """The ids of those of its parameters whose gradients are reduced: one that is thawed after
        construction keeps its own, as with eager DDP."""
        return [id(parameters[number]) for number in self.trained]

    @property
    def flags(self) -> int:
        """The number under which the flags are sent that say which parameters were used."""
        return len(self.parameters)

    @property
    def flag_count(self) -> int:
        """One for each parameter whose gradient lies in a bucket, and one more
        (``agreement/usage.py``)."""
        return len(self.dense) + 1

    @property
    def sent(self) -> tuple[str, ...]:
        """What all numbers stand for, for people."""
        return (*self.parameters, *([FLAGS] if self.flag_dtype is not None else []))

    def name_for(self, index: int) -> str:
        """The group name in the graph for the gradient of parameter ``index``."""
        return f"{self.group_name}{PARAMETER_MARK}{index}"

    def names(self) -> list[str]:
        """All names that the module has for its process group."""
        return [self.group_name, *map(self.name_for, range(len(self.sent)))]

    def owner(self, number: int | None) -> Owner:
        """The module as the owner of a reduction, of that of parameter ``number`` if there is
        one."""
        return Owner(
            self.group_name,
            self.process_group,
            self.label,
            self.sent[number] if number is not None else "?",
            self.backend,
            self.world_size,
            number if number is not None else -1,
            self.strides_of(number) if number is not None else None,
            self.calls_hook and number != self.flags,
        )

    def moved_to(self, group: dist.ProcessGroup, device: torch.device) -> ManagedModule:
        """The module on another process group; what was measured in steps holds for the old one."""
        return replace(
            self,
            process_group=group.group_name,
            backend=backend_name(group, device),
            world_size=group.size(),
            profile=known_profile(group),
            steps=None,
        )

    def strides_of(self, number: int) -> tuple[int, ...]:
        """The strides in which a gradient, or the flags, are sent."""
        return self.strides[number] if number < len(self.strides) else (1,)


def describe(ddp: DistributedDataParallel, number: int) -> ManagedModule:
    """Return what is known of a module that has been constructed.

    Args:
        ddp: the module.
        number: its number on its process group.
    """
    group = ddp.process_group
    names = {id(parameter): name for name, parameter in ddp.module.named_parameters()}
    return ManagedModule(
        group_name=group_name_of(group, number),
        process_group=group.group_name,
        backend=backend_name(group, torch.device(ddp.device_type)),
        world_size=group.size(),
        label=f"DDP {number} ({type(ddp.module).__name__})",
        parameters=tuple(names[id(parameter)] for parameter in parameters_of(ddp)),
        caps=caps_of_ddp(ddp),
        strides=tuple(map(strides_to_send, parameters_of(ddp))),
        kinds=tuple(map(_kind_of, parameters_of(ddp))),
        trained=tuple(n for n, p in enumerate(parameters_of(ddp)) if p.requires_grad),
        flag_dtype=_flag_dtype(ddp),
        profile=known_profile(group),
        sparse=frozenset(n for n, _ in _numbered(ddp, are_sparse=True)),
    )


def _numbered(
    ddp: DistributedDataParallel, *, are_sparse: bool
) -> list[tuple[int, torch.nn.Parameter]]:
    """The trained parameters whose gradients are sparse, or those whose are not, by number."""
    layers = embeddings_with_rows(ddp.module)
    sparse = {id(parameter) for layer in layers for parameter in layer.parameters(recurse=False)}
    return [
        (number, parameter)
        for number, parameter in enumerate(parameters_of(ddp))
        if parameter.requires_grad and (id(parameter) in sparse) is are_sparse
    ]


def embeddings_with_rows(
    model: torch.nn.Module,
) -> Iterator[torch.nn.Embedding | torch.nn.EmbeddingBag]:
    """The layers of a model whose gradients are sparse: those of which DDP expects that."""
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag) and module.sparse:
            yield module


def _flag_dtype(ddp: DistributedDataParallel) -> torch.dtype | None:
    """That of a gradient, so that the flags find room in its bucket."""
    if not ddp.find_unused_parameters or ddp.static_graph:
        return None
    dtypes = [parameter.dtype for _, parameter in _numbered(ddp, are_sparse=False)]
    real = [dtype for dtype in dtypes if dtype.is_floating_point]
    return real[0] if real else torch.float32


def settings_of(module: ManagedModule, may_lack: bool) -> str:
    """What must be the same on all ranks, as JSON.

    Args:
        module: whose.
        may_lack: whether some of its parameters may go unused.
    """
    config = active_config()
    settings = {
        "torch._inductor.config.ddp_fusion": None if config is None else asdict(config),
        "bucket_cap_mb of DistributedDataParallel": module.caps.in_mib(),
        "find_unused_parameters of DistributedDataParallel": may_lack,
        "a communication hook of DistributedDataParallel": module.calls_hook,
        "embeddings with sparse=True": [module.parameters[n] for n in sorted(module.sparse)],
    }
    return json.dumps(settings)


def let_stand_for(names: Iterable[str], group: dist.ProcessGroup) -> None:
    """Let names that are in use stand for another group."""
    for name in names:
        unregister_process_group(name)
        register_process_group(name, group)


def usage_of(ddp: DistributedDataParallel, module: ManagedModule) -> Usage | None:
    """Return what the ranks are to know of the parameters that they use; ``None`` where all use
    the same."""
    if module.flag_dtype is None or ddp.static_graph:
        return None
    ref = weakref.ref(ddp)

    def has_gradient(number: int) -> bool:
        owner = ref()
        return owner is not None and parameters_of(owner)[number].grad is not None

    return Usage(module.dense, module.flags, has_gradient)


def group_name_of(group: dist.ProcessGroup, number: int) -> str:
    """Return the name that a module has for its process group."""
    return f"{group.group_name}/ddp{number}"


def caps_of_ddp(ddp: DistributedDataParallel) -> ModuleCaps:
    """The caps of a module's buckets, before any option."""
    if not ddp.bucket_bytes_cap_default:
        return given_caps(int(ddp.bucket_bytes_cap), ddp.bucket_bytes_cap_list)
    rows = {number for number, _ in _numbered(ddp, are_sparse=True)}
    sizes = [parameter.nbytes for parameter in parameters_of(ddp)]
    gradient_bytes = sum(size for number, size in enumerate(sizes) if number not in rows)
    return default_caps(gradient_bytes, DEFAULT_FIRST_BUCKET_BYTES, ddp.bucket_bytes_cap)


def _kind_of(parameter: Tensor) -> str:
    return f"{tuple(parameter.shape)} {parameter.dtype} {strides_to_send(parameter)}"


def strides_to_send(parameter: Tensor) -> tuple[int, ...]:
    """The strides in which a gradient is sent: the parameter's, or contiguous if not dense."""
    if is_dense(parameter):
        return tuple(parameter.stride())
    return tuple(torch.empty(parameter.shape, device="meta").stride())
