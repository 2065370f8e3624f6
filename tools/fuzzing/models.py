"""Builds a case's models on a rank, and wraps them in DDP."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map

from fuzzing.blocks import BLOCKS, WIDTH
from fuzzing.case import Case, Part
from testing.models import Average


class Model(nn.Module):
    """A sequence of blocks for each head, or one sequence for all heads."""

    def __init__(self, part: Part, group: Any = None) -> None:
        super().__init__()
        rows = part.heads if part.split else 1
        names = [part.blocks[row::rows] for row in range(rows)]
        self.rows = nn.ModuleList(nn.ModuleList(BLOCKS[name]() for name in row) for row in names)
        self.heads = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(part.heads))
        self.residual = part.residual
        self.averages = "averages" in part.traits
        self.group = group
        self.output = part.output

    def forward(self, x: Tensor, tokens: Tensor) -> Any:
        """The outputs of all heads, each a batch of rows."""
        ends = [self.follow(row, x, tokens) for row in self.rows]
        if len(ends) == 1:
            ends *= len(self.heads)
        outputs = [head(end) for head, end in zip(self.heads, ends, strict=True)]
        if self.output == "tensor":
            return outputs[0]
        return dict(enumerate(outputs)) if self.output == "dict" else tuple(outputs)

    def follow(self, row: Any, x: Tensor, tokens: Tensor) -> Tensor:
        """The output of one sequence; under autocast, blocks return other dtypes than their
        input's."""
        for block in row:
            y = block(x.float(), tokens).float()
            x = x + y if self.residual else y
            if self.averages:
                x = x - Average.apply(x.sum(0), self.group) / 8
        return x


class Tripled(DistributedDataParallel):
    """A subclass of DDP with its own forward, as in training frameworks."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Three times what the model returns."""
        return tree_map(lambda output: output * 3.0, super().forward(*inputs, **kwargs))


def build(case: Case, *, compiled: bool) -> list[DistributedDataParallel]:
    """Construct a case's DDP modules; if ``compiled``, their models are compiled before."""
    return [_build_part(case, part, number, compiled) for number, part in enumerate(case.parts)]


def _build_part(case: Case, part: Part, number: int, compiled: bool) -> DistributedDataParallel:
    rank = dist.get_rank() if "other ranks" in part.traits else 0
    torch.manual_seed(case.seed * 1000 + number * 100 + rank)
    group = dist.new_group(list(range(case.ranks))) if case.groups else None
    model = Model(part, group)
    _apply_traits(model, part)
    ignored = _ignored(model)
    if ignored:
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
    if compiled and case.loop.style == "inner":
        model.compile(dynamic=case.loop.dynamic)
    if compiled and case.loop.style == "part":
        for block in list(_blocks(model))[::2]:
            block.compile(dynamic=case.loop.dynamic)
    wrapper = Tripled if part.subclass else DistributedDataParallel
    ddp = wrapper(model, process_group=group, **part.ddp)
    if part.hook is not None:
        ddp.register_comm_hook(group, getattr(default_hooks, part.hook))
    if "hooked after" in part.traits:
        _trained(model)[0].register_hook(lambda gradient: gradient * 2)
    if "swapped after" in part.traits:
        head: Any = model.heads[0]
        head.weight = nn.Parameter(head.weight.detach().clone())
    if "eval" in part.traits:
        ddp.eval()
    return ddp


def _blocks(model: Model) -> Iterator[nn.Module]:
    row: Any
    for row in model.rows:
        yield from row


def _apply_traits(model: nn.Module, part: Part) -> None:
    if "frozen" in part.traits:
        for parameter in list(model.parameters())[::3]:
            parameter.requires_grad_(False)
    if "tied" in part.traits:
        # The first layer with the same shape, wherever it is, or the head itself.
        layers = [layer for layer in model.modules() if type(layer) is nn.Linear]
        head = layers[-1]
        first = next(layer for layer in layers if layer.weight.shape == head.weight.shape)
        if type(first.weight) is nn.Parameter and not hasattr(first, "parametrizations"):
            head.weight = first.weight
    if "unused" in part.traits:
        model.unused = nn.Parameter(torch.ones(3))


def _ignored(model: nn.Module) -> list[str]:
    return [
        f"{name}.{parameter}"
        for name, module in model.named_modules()
        if getattr(module, "ddp_ignores", False)
        for parameter, _ in module.named_parameters()
    ]


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]
