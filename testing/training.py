"""Trains one model in several ways on real processes, and records all that can be compared.

:func:`train_all_ways` is a job for :class:`testing.processes.RankPool`.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch._dynamo
import torch._inductor.config
import torch.distributed as dist
from torch import Generator, Tensor, nn
from torch._C._distributed_c10d import _get_work_registry_size
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

from testing.models import Batch, Loss, linear_loss, whole_rows
from testing.scenarios.loop import BySign

Way = Literal["fused", "eager", "by hand", "eager in double"]
Style = Literal["inside", "outside"]


@dataclass
class Site:
    """Where a model is built: wraps its parts, and knows the process groups.

    Attributes:
        groups: by name; ``"world"`` is always there.
        wraps_ddp: whether :meth:`ddp` wraps in DDP, or notes what is to be averaged by hand.
        dtype: what :meth:`ddp` casts to first, if anything.
        parts: what :meth:`ddp` was called with, and the group's name.
    """

    groups: Mapping[str, ProcessGroup]
    wraps_ddp: bool
    dtype: torch.dtype | None = None
    parts: list[tuple[nn.Module, str]] = field(default_factory=list)

    def ddp(self, module: nn.Module, group: str = "world", **options: Any) -> nn.Module:
        """``module`` in DDP over a group."""
        if self.dtype is not None:
            module = module.to(self.dtype)
        if self.wraps_ddp:
            module = DistributedDataParallel(module, process_group=self.groups[group], **options)
        self.parts.append((module, group))
        return module


Build = Callable[[Site], nn.Module]


def in_ddp(make: Callable[..., nn.Module], **options: Any) -> Build:
    """Builds ``make()`` in one DDP module with these options."""
    return functools.partial(_build_in_ddp, make, options)


def _build_in_ddp(make: Callable[..., nn.Module], options: Mapping[str, Any], site: Site) -> Any:
    return site.ddp(make(), **options)


@dataclass(frozen=True)
class Recipe:
    """What is trained, and how the loop is written.

    Attributes:
        build: makes the model, at a site.
        loss: of a model and a batch.
        data: makes a batch of a size.
        style: the backward inside of a compiled step, or outside of a compiled model.
        steps: of the optimizer.
        batch_sizes: of the steps, in turn.
        micro_batches: backwards in a step.
        set_to_none: as for ``zero_grad``.
        training: whether the model is in train mode.
        learning_rate: of SGD with momentum; ``None`` for exact models, whose parameters all move
            by one against the gradient's sign.
        groups: process groups by name, each as the lists of its ranks.
    """

    build: Build
    loss: Loss = linear_loss
    data: Callable[[Generator, int], Batch] = whole_rows
    style: Style = "inside"
    steps: int = 3
    batch_sizes: tuple[int, ...] = (4,)
    micro_batches: int = 1
    set_to_none: bool = True
    training: bool = True
    learning_rate: float | None = None
    groups: Mapping[str, tuple[tuple[int, ...], ...]] = field(default_factory=dict)


@dataclass
class BackwardRecord:
    """What one backward has left.

    Attributes:
        gradients: ``.grad`` by the parameter's name; clones, with their strides.
        launches: collectives that Gloo was given since the last record, on all groups.
    """

    gradients: dict[str, Tensor | None]
    launches: int


@dataclass
class Record:
    """One training run on one rank."""

    backwards: list[BackwardRecord]
    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]
    reports: list[Any]
    warnings: list[str]


def train_all_ways(recipe: Recipe, flag: Any, ways: tuple[Way, ...]) -> dict[Way, Record]:
    """Trains a recipe's model from the same start on the same data, once for each of ``ways``.

    * ``fused``: DDP and ``torch.compile`` under ``ddp_fusion = flag``.
    * ``eager``: DDP with its C++ reducer; nothing is compiled. This is what must be reproduced.
    * ``by hand``: no DDP. The model is compiled as in ``fused``, its backward by compiled autograd
      too, and then each gradient is divided and all-reduced on its own.
    * ``eager in double``: as ``eager``, in fp64.
    """
    groups = _make_groups(recipe)
    return {way: _WAYS[way](recipe, flag, groups) for way in ways}


def _train_fused(recipe: Recipe, flag: Any, groups: Mapping[str, ProcessGroup]) -> Record:
    import fusion_passes
    from fusion_passes.state import process_state

    process_state.reset()
    before = len(fusion_passes.reports())
    # Of an earlier job of this process, which failed on purpose before it had waited.
    left_behind = _get_work_registry_size()
    flag_set = torch._inductor.config.patch(ddp_fusion=flag)
    with flag_set, noted_warnings(fusion_passes.FusionWarning) as texts:
        record = _train(recipe, Site(groups, wraps_ddp=True), compiled=True)
    # Numbers can be right by luck where a bucket was read too early.
    unwaited = _get_work_registry_size() - left_behind
    assert not unwaited, f"nobody has waited for {unwaited} tensors of compiled collectives"
    record.reports = list(fusion_passes.reports()[before:])
    record.warnings = texts
    return record


def _train_eager(recipe: Recipe, flag: Any, groups: Mapping[str, ProcessGroup]) -> Record:
    return _train(recipe, Site(groups, wraps_ddp=True), compiled=False)


def _train_in_double(recipe: Recipe, flag: Any, groups: Mapping[str, ProcessGroup]) -> Record:
    return _train(recipe, Site(groups, wraps_ddp=True, dtype=torch.float64), compiled=False)


def _train_by_hand(recipe: Recipe, flag: Any, groups: Mapping[str, ProcessGroup]) -> Record:
    if recipe.style == "inside":
        traced = torch._dynamo.config.patch(compiled_autograd=True)
    else:
        traced = torch._dynamo.compiled_autograd._enable(torch.compile, dynamic=False)
    with traced:
        return _train(recipe, Site(groups, wraps_ddp=False), compiled=True)


_WAYS: dict[Way, Callable[[Recipe, Any, Mapping[str, ProcessGroup]], Record]] = {
    "fused": _train_fused,
    "eager": _train_eager,
    "by hand": _train_by_hand,
    "eager in double": _train_in_double,
}


def _train(recipe: Recipe, site: Site, compiled: bool) -> Record:
    torch._dynamo.reset()
    model = recipe.build(site)
    model.train(recipe.training)
    backward = _backward_of(recipe, model, compiled)
    optimizer = _optimizer_of(recipe, model)
    backwards = []
    launches = _Launches(site.groups)
    for step in range(recipe.steps):
        optimizer.zero_grad(set_to_none=recipe.set_to_none)
        for micro in range(recipe.micro_batches):
            if not site.wraps_ddp:
                _broadcast_by_hand(site)
            backward(_batch(recipe, step, micro, site.dtype))
            if not site.wraps_ddp:
                _average_by_hand(site)
            backwards.append(BackwardRecord(_gradients(model), launches.count()))
        optimizer.step()
    return Record(
        backwards,
        {_plain(name): value.detach().clone() for name, value in model.named_parameters()},
        {_plain(name): value.detach().clone() for name, value in model.named_buffers()},
        [],
        [],
    )


def _optimizer_of(recipe: Recipe, model: nn.Module) -> torch.optim.Optimizer:
    if recipe.learning_rate is None:
        return BySign(model.parameters())
    return torch.optim.SGD(model.parameters(), lr=recipe.learning_rate, momentum=0.9)


def _backward_of(recipe: Recipe, model: nn.Module, compiled: bool) -> Callable[[Batch], None]:
    """The part of a training step that differs between the two styles."""

    def step(batch: Batch) -> None:
        recipe.loss(model, batch).backward()

    if not compiled:
        return step
    if recipe.style == "inside":
        return torch.compile(step)
    compiled_model = torch.compile(model)

    def outside_step(batch: Batch) -> None:
        recipe.loss(compiled_model, batch).backward()

    return outside_step


def _batch(recipe: Recipe, step: int, micro: int, dtype: torch.dtype | None) -> Batch:
    """Different on each rank, and for each backward."""
    seed = (step * 100 + micro) * 100 + dist.get_rank()
    size = recipe.batch_sizes[step % len(recipe.batch_sizes)]
    batch = recipe.data(Generator().manual_seed(seed), size)
    if dtype is not None:
        batch = (batch[0].to(dtype), batch[1].to(dtype))
    return batch


def _broadcast_by_hand(site: Site) -> None:
    for module, group_name in site.parts:
        for buffer in module.buffers():
            dist.broadcast(buffer, group=site.groups[group_name], group_src=0)


def _average_by_hand(site: Site) -> None:
    for module, group_name in site.parts:
        group = site.groups[group_name]
        for parameter in module.parameters():
            if parameter.grad is not None:
                average = parameter.grad / group.size()
                dist.all_reduce(average, group=group)
                parameter.grad.copy_(average)


class _Launches:
    """Counts collectives where none can hide: each backend numbers what it is given."""

    def __init__(self, groups: Mapping[str, ProcessGroup]) -> None:
        self._groups = list(groups.values())
        self._before = self._total()

    def count(self) -> int:
        """Since the last call."""
        total = self._total()
        launched, self._before = total - self._before, total
        return launched

    def _total(self) -> int:
        groups: list[Any] = self._groups
        return sum(group._get_sequence_number_for_group() for group in groups)


def _make_groups(recipe: Recipe) -> dict[str, ProcessGroup]:
    assert dist.group.WORLD is not None, "only on a rank"
    groups = {"world": dist.group.WORLD}
    for name, rank_lists in recipe.groups.items():
        for ranks in rank_lists:
            group = dist.new_group(list(ranks))
            if dist.get_rank() in ranks:
                groups[name] = group
    return groups


@contextlib.contextmanager
def noted_warnings(category: type[Warning]) -> Iterator[list[str]]:
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield texts
    texts += [str(item.message) for item in caught if issubclass(item.category, category)]


def _gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {
        _plain(name): None if parameter.grad is None else parameter.grad.clone()
        for name, parameter in model.named_parameters()
    }


def _plain(name: str) -> str:
    """A parameter's name without the levels that DDP adds."""
    return name.replace("module.", "")
