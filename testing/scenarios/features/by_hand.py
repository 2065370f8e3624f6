"""Cases in which eager DDP can be wrong: without the flag, gradients are averaged by hand, without
a DDP module.

These are DDP's arguments for delayed reductions, whose collective eager DDP does not wait for, and
parameters whose strides change after DDP is constructed: eager DDP mixes up their elements.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from testing.models import OUTPUTS, WIDTH, Branching, Exact, TwoDtypes
from testing.scenarios import loop
from testing.scenarios.loop import Style
from testing.scenarios.run import Run


def average(model: nn.Module) -> None:
    """Average a model's gradients over all ranks, one by one; a parameter without a gradient on
    this rank gets one."""
    for parameter in model.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        if parameter.grad.is_sparse:
            parameter.grad = parameter.grad.to_dense()
        local = parameter.grad.contiguous()
        parts = [torch.empty_like(local) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, local)
        parameter.grad.copy_(torch.stack(parts).sum(0) / len(parts))


def train(run: Run, model: nn.Module, *, is_compiled: bool = True, **how: Any) -> None:
    """Run backwards of a model: in DDP under the flag, otherwise of the bare model, averaged by
    hand. All but the last micro-batch of a step are under ``no_sync``. ``how``: further fields of
    the loop."""

    def average_if(model: nn.Module, synced: bool) -> None:
        if synced and not run.is_fused:
            average(model)

    style: Style = "outside" if is_compiled else "as it is"
    fields: dict[str, Any] = {"style": style, "no_sync": True, "moves": False, **how}
    loop.train(run, model, before_note=average_if, **fields)


def wrapped(run: Run, model: nn.Module, **options: Any) -> nn.Module:
    """A model in DDP under the flag, otherwise the bare model."""
    return run.ddp(model, **options) if run.is_fused else model.to(run.device)


# --- Delayed reductions --------------------------------------------------------------------------


def delayed_in(run: Run, model: nn.Module, *names: str, hooked: str = "", **options: Any) -> Any:
    """:func:`wrapped`, with the all-reduce of the named parameters delayed until ``hooked`` (by
    default, the first of them) has its gradient."""
    known = dict(model.named_parameters())
    named = [(name, known[name]) for name in known if name.startswith(names)]
    return wrapped(
        run,
        model,
        delay_all_reduce_named_params=named,
        param_to_hook_all_reduce=known[hooked or named[0][0]],
        **options,
    )


def delayed(run: Run, **how: Any) -> None:
    """Delayed reductions of the first layer, of the last one, and of all layers; in one and in
    small buckets."""
    for names in (("0.",), ("4.",), ("",)):
        for cap_mb in (None, 1e-4):
            model = delayed_in(run, run.mlp(), *names, bucket_cap_mb=cap_mb)
            train(run, model, **how)


def delayed_eager(run: Run) -> None:
    """Delayed reductions without a compiled graph."""
    train(run, delayed_in(run, run.mlp(), "2."), is_compiled=False, zero="kept")


def delayed_options(run: Run) -> None:
    """Delayed reductions of ignored parameters, of parameters of several dtypes, and together with
    other options of DDP, which do not apply to them."""
    model = run.mlp(2)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["0.weight"])
    ignored = delayed_in(run, model, "0.")
    train(run, ignored)
    run.note("ignored", model._ddp_params_and_buffers_to_ignore)
    dtypes = delayed_in(run, TwoDtypes(), "low.", "single.")
    train(run, dtypes)
    train(run, delayed_in(run, run.mlp(2), "2.", static_graph=True))
    train(run, delayed_in(run, run.mlp(2), "2.", find_unused_parameters=True))
    # Each rank has another weight if DDP broadcasts nothing.
    model = run.mlp(2)
    with torch.no_grad():
        model.get_parameter("0.weight").add_(dist.get_rank() if run.is_fused else 0)
    train(run, delayed_in(run, model, "0.weight", init_sync=False))


def delayed_unused(run: Run, **options: Any) -> None:
    """A delayed parameter that no rank uses, or only one rank, has zeros there; so has one without
    a hook. This holds in DDP too, which otherwise does not track unused parameters."""
    takes = "abc/bc bc bc/abc abc"
    for hooked in ("a.weight", "first.weight"):
        model = delayed_in(run, Branching(outputs=OUTPUTS), "a.", hooked=hooked, **options)
        train(run, model, takes=takes)


class _Repeating(Exact, first=WIDTH, layer=WIDTH, last=OUTPUTS):
    """Exact. Reentrant checkpointing of a layer that is used several times: its gradient is
    accumulated as often in one backward."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(self.first(x)).relu()
        for _ in range(2):
            x = checkpoint(self.layer, x, use_reentrant=True)
        out: Tensor = self.last(x)
        return out


def delayed_repeated(run: Run) -> None:
    """A gradient that is accumulated several times in one backward."""
    for zero in ("none", "kept"):
        train(run, delayed_in(run, _Repeating(), "layer."), is_compiled=False, zero=zero)


class _Table(nn.Module):
    """Exact. A sparse table whose rows are selected by the signs of the inputs."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.table = nn.Embedding(3, WIDTH, sparse=True)
        self.layers = layers
        with torch.no_grad():
            self.table.weight.copy_(torch.arange(3.0 * WIDTH).reshape(3, WIDTH) - WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.table(x[:, 0].sign().long() + 1)
        out: Tensor = self.layers(x + rows)
        return out


def delayed_sparse(run: Run) -> None:
    """A sparse table."""
    model = delayed_in(run, _Table(run.mlp(2)), "table.", hooked="layers.0.weight")
    train(run, model)


def delayed_instances(run: Run) -> None:
    """Instances of one model that share compiled code: one without delayed reductions, one with
    them, and a deep copy of the second."""
    models = [wrapped(run, run.mlp()), delayed_in(run, run.mlp(), "2.")]
    models.append(copy.deepcopy(models[1]))
    for model in (*models, *models):
        if run.is_fused:
            run.manage(model)
        train(run, model, steps=2)


# --- Strides that change after DDP is constructed -------------------------------------------------


class Strided(Exact):
    """Exact. A convolution, and a square weight after it, whose elements cannot be told apart by
    shape."""

    def __init__(self) -> None:
        super().__init__(
            conv=nn.Conv2d(2, WIDTH, 2),
            square=nn.Parameter(torch.empty(WIDTH, WIDTH)),
            last=nn.Linear(WIDTH, OUTPUTS),
        )

    def forward(self, x: Tensor) -> Tensor:
        features = self.conv(x.reshape(-1, 2, 2, 2)).flatten(1)
        out: Tensor = self.last(nn.functional.linear(features, self.square))
        return out


def _with_channels_last(model: nn.Module) -> None:
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def _transposed(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.data = parameter.data.t().contiguous().t()


CHANGES: Final = {"channels last": _with_channels_last, "transposed": _transposed}


def strides_changed(run: Run, where: Sequence[int], **how: Any) -> None:
    """On these ranks, the strides of parameters change before the first forward, after it, and
    after the buckets are rebuilt."""
    for change in CHANGES.values():
        for step in range(3):
            torch._dynamo.reset()  # Otherwise Dynamo would stop recompiling the code.
            model = wrapped(run, Strided())
            train(run, model, steps=step, **how)
            if dist.get_rank() in where:
                change(model)
            train(run, model, **how)
