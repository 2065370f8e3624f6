"""Short trainings that use one feature of DDP each, to be run with and without the flag."""

from __future__ import annotations

import copy
import gc
import io
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch._dynamo
import torch._inductor.config
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from testing import models

Values = dict[str, Tensor | None]
Compile = Callable[[nn.Module], Callable[..., Tensor]]
Scenario = Callable[[Compile], Values]
STEPS = 3


@dataclass
class Outcome:
    """What came of a scenario on one rank.

    Attributes:
        eager: the values without the flag, nothing compiled.
        flagged: the values under the flag, compiled.
        warned: what the user was warned of under the flag.
        fused: names of the parameters whose gradients were fused.
    """

    eager: Values
    flagged: Values
    warned: list[str]
    fused: set[str]


def run_both_ways(scenario: Scenario, flag: str) -> Outcome:
    """A job for every rank."""
    import fusion_passes
    from fusion_passes.state import process_state

    eager = scenario(lambda module: module)
    torch._dynamo.reset()
    process_state.reset()
    known = len(fusion_passes.reports())
    with (
        torch._inductor.config.patch(ddp_fusion=flag),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        flagged = scenario(torch.compile)
    warned = [str(w.message) for w in caught if issubclass(w.category, fusion_passes.FusionWarning)]
    buckets = [bucket for report in fusion_passes.reports()[known:] for bucket in report.buckets]
    fused = {name for bucket in buckets for name in bucket.parameters}
    return Outcome(eager, flagged, warned, fused)


def train(
    ddp: nn.Module,
    wrap: Compile,
    forward: Callable[[Callable[..., Tensor], int], Tensor] | None = None,
    before: Callable[[int], None] = lambda step: None,
) -> Values:
    """A few steps. Returns the gradients of each, and the parameters and buffers in the end."""
    compiled = wrap(ddp)
    run = forward or (lambda model, step: model(batch(step)))
    parameters = dict(ddp.named_parameters())
    values: Values = {}
    for step in range(STEPS):
        before(step)
        for parameter in parameters.values():
            parameter.grad = None
        run(compiled, step).sum().backward()
        values |= {f"{step}: {n}": _copy(p.grad) for n, p in parameters.items()}
        _step(parameters)
    return values | state(ddp)


def state(module: nn.Module) -> Values:
    """Copies of the parameters and buffers."""
    return {name: _copy(value) for name, value in module.state_dict().items()}


def batch(step: int, size: int = 4) -> Tensor:
    """Whole numbers; others on each rank and in each step."""
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    return torch.randint(-2, 3, (size, models.WIDTH), generator=generator).float()


def _copy(value: Tensor | None) -> Tensor | None:
    if value is None:
        return None
    return (value.to_dense() if value.is_sparse else value).detach().clone()


@torch.no_grad()
def _step(parameters: Mapping[str, nn.Parameter]) -> None:
    for parameter in parameters.values():
        if parameter.grad is not None:
            parameter.sub_(_copy(parameter.grad).sgn())


class Branches(nn.Module):
    """Exact. Each of its branches takes part if it is asked to."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(models.WIDTH, models.WIDTH)
        self.branches = nn.ModuleList(nn.Linear(models.WIDTH, models.WIDTH) for _ in range(2))
        self.last = nn.Linear(models.WIDTH, models.OUTPUTS)
        models.fill_whole(self)

    def forward(self, x: Tensor, *, takes: tuple[int, ...] = ()) -> Tensor:
        x = self.first(x).relu()
        for number in takes:
            x = self.branches[number](x).relu()
        return self.last(x)


class Counting(nn.Module):
    """Exact, with a buffer that is another on each rank."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = models.mlp()
        self.register_buffer("count", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        self.count += x[0, :2]
        return self.layers(x) + self.count.sum()


# --- Scenarios ----------------------------------------------------------------------------------


def _branches(wrap: Compile, takes: Callable[[int], tuple[int, ...]], **options: Any) -> Values:
    ddp = DistributedDataParallel(Branches(), **options)
    return train(ddp, wrap, lambda model, step: model(batch(step), takes=takes(step)))


def unused_in_a_static_graph(wrap: Compile) -> Values:
    return _branches(wrap, lambda step: (0,), static_graph=True)


def delayed_reductions(wrap: Compile) -> Values:
    """Eager DDP does not wait for their collective: here it does, and ours has to."""
    if torch._inductor.config.ddp_fusion is None:
        with mock.patch.object(DistributedDataParallel, "_delayed_all_reduce_hook", _reduce_now):
            return _train_delayed(wrap)
    return _train_delayed(wrap)


def _reduce_now(ddp: Any, gradient: Tensor) -> Tensor:
    ddp._delay_grad_buffer.div_(dist.get_world_size())
    dist.all_reduce(ddp._delay_grad_buffer)
    return gradient


def _train_delayed(wrap: Compile) -> Values:
    model = models.mlp()
    delayed = [(name, parameter) for name, parameter in model.named_parameters() if "4" in name]
    ddp = DistributedDataParallel(
        model,
        delay_all_reduce_named_params=delayed,
        param_to_hook_all_reduce=model[0].weight,
    )
    return train(ddp, wrap)


def _sum_buffers(_: object, buffers: Mapping[str, Tensor]) -> list[torch.futures.Future[Any]]:
    return [dist.all_reduce(b, async_op=True).get_future() for b in buffers.values()]


def buffer_hook(wrap: Compile) -> Values:
    ddp = DistributedDataParallel(Counting())
    ddp._register_buffer_comm_hook(None, _sum_buffers)
    return train(ddp, wrap)


def disabled_join(wrap: Compile) -> Values:
    ddp = DistributedDataParallel(models.mlp())
    with ddp.join(enable=False):
        return train(ddp, wrap)


def _of_own_reducer() -> DistributedDataParallel:
    ddp = DistributedDataParallel(models.mlp())
    ddp._register_buffer_comm_hook(None, _sum_buffers)
    return ddp


def two_reducers_in_one_backward(wrap: Compile) -> Values:
    """A module that can be fused, and one that DDP's own reducer trains."""
    fused = DistributedDataParallel(models.mlp(outputs=models.WIDTH))
    other = _of_own_reducer()
    both = nn.ModuleDict({"fused": fused, "other": other})
    compiled = wrap(fused), wrap(other)
    return train(both, lambda module: module, lambda _, step: compiled[1](compiled[0](batch(step))))


def two_reducers_in_two_backwards(wrap: Compile) -> Values:
    other = _of_own_reducer()
    fused = DistributedDataParallel(models.mlp())
    return {f"fused {n}": v for n, v in train(fused, wrap).items()} | train(other, wrap)


def caps_in_a_list(wrap: Compile) -> Values:
    return train(DistributedDataParallel(models.mlp(), bucket_cap_mb_list=[25, 50]), wrap)


def copied(wrap: Compile) -> Values:
    """A copy is trained in the middle of the original's training; it starts from there."""
    ddp = DistributedDataParallel(models.mlp())
    first = train(ddp, wrap)
    again = train(copy.deepcopy(ddp), wrap)
    values = train(ddp, wrap)
    return (
        first
        | {f"copy {n}": v for n, v in again.items()}
        | {f"2. {n}": v for n, v in values.items()}
    )


def saved_and_loaded(wrap: Compile) -> Values:
    ddp = DistributedDataParallel(Counting())
    ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
    first = train(ddp, wrap)
    file = io.BytesIO()
    torch.save(ddp, file)
    del ddp
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    if wrap is not torch.compile:  # DDP's own copies forget their hook.
        loaded.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return first | {f"loaded {n}": v for n, v in train(loaded, wrap).items()}


def state_dict_of_another(wrap: Compile) -> Values:
    first = DistributedDataParallel(models.mlp())
    train(first, wrap)
    second = DistributedDataParallel(models.mlp())
    second.load_state_dict(first.state_dict())
    return train(second, wrap)


def second_module_over_the_same_model(wrap: Compile) -> Values:
    model = models.mlp()
    first = DistributedDataParallel(model)
    values = {f"first {n}": v for n, v in train(first, wrap).items()}
    del first
    gc.collect()
    hooks = sum(len(p._post_accumulate_grad_hooks or {}) for p in model.parameters())
    values["hooks left"] = torch.tensor(hooks)
    return values | train(DistributedDataParallel(model), wrap)


def another_process_group(wrap: Compile) -> Values:
    """Two ranks more join in the middle: in pairs, then all, then all over a group of its own."""
    rank = dist.get_rank()
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    everybody = dist.new_group([0, 1, 2, 3])
    others = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    ddp = DistributedDataParallel(models.mlp(), process_group=pairs[rank // 2])
    values = {f"pairs {n}": v for n, v in train(ddp, wrap).items()}
    torch._dynamo.utils.counters.clear()
    ddp._update_process_group(others[rank % 2])
    values |= {f"others {n}": v for n, v in train(ddp, wrap).items()}
    captures = torch._dynamo.utils.counters["compiled_autograd"]["captures"]
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    values["compiled anew"] = torch.tensor([captures, graphs])
    ddp._update_process_group(everybody)
    return values | {f"all {n}": v for n, v in train(ddp, wrap).items()}


def another_process_group_after_an_error(wrap: Compile) -> Values:
    """Rank 1 stays out of a backward, and rank 0 gets an error. Both go on over a new group."""
    group = dist.new_group()
    ddp = DistributedDataParallel(models.mlp(), process_group=group)
    values = {f"before {n}": v for n, v in train(ddp, wrap).items()}
    loss = wrap(ddp)(batch(0)).sum()
    # From here on, for nothing is compiled any more.
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=3), group)
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError, match=r"[Tt]imed out"):
            loss.backward()
    ddp._update_process_group(dist.new_group())
    return values | {f"behind {n}": v for n, v in train(ddp, wrap).items()}


def no_sync_around_a_forward_or_its_backward(wrap: Compile) -> Values:
    """The forward decides what is averaged; a second backward through it is not."""
    ddp = DistributedDataParallel(models.mlp())
    compiled = wrap(ddp)
    values: Values = {}
    for step in range(2):
        ddp.zero_grad()
        with ddp.no_sync():
            local = compiled(batch(step)).sum()
        local.backward()
        values |= {f"{step}: local {n}": _copy(p.grad) for n, p in ddp.named_parameters()}
        averaged = compiled(batch(step, 3)).sum()
        with ddp.no_sync():
            averaged.backward(retain_graph=True)
        values |= {f"{step}: averaged {n}": _copy(p.grad) for n, p in ddp.named_parameters()}
        averaged.backward()
        values |= {f"{step}: again {n}": _copy(p.grad) for n, p in ddp.named_parameters()}
    return values


def hooks_of_users(wrap: Compile) -> Values:
    """Hooks on gradients and on parameters, put there before DDP was constructed and after. What
    they see is what eager DDP shows them."""
    seen: Values = {}
    model = models.mlp()

    def note(label: str) -> Callable[[Any], None]:
        def hook(value: Any) -> None:
            gradient = value.grad if isinstance(value, nn.Parameter) else value
            seen[f"{label} {len(seen)}"] = _copy(gradient)

        return hook

    weight = model.get_parameter("2.weight")
    weight.register_post_accumulate_grad_hook(note("early"))
    ddp = DistributedDataParallel(model)
    weight.register_hook(note("gradient"))
    weight.register_hook(lambda gradient: 2 * gradient)
    weight.register_post_accumulate_grad_hook(note("late"))
    return train(ddp, wrap) | seen


def beside_fully_sharded(wrap: Compile) -> Values:
    """A fully sharded layer in front of a DDP module."""
    sharded = models.fill_whole(nn.Linear(models.WIDTH, models.WIDTH))
    fully_shard(sharded)
    ddp = DistributedDataParallel(models.mlp())
    compiled = wrap(ddp)
    parameters = dict(nn.ModuleDict({"sharded": sharded, "ddp": ddp}).named_parameters())
    values: Values = {}
    for step in range(STEPS):
        for parameter in parameters.values():
            parameter.grad = None
        compiled(sharded(batch(step))).sum().backward()
        gradients = {name: parameter.grad for name, parameter in parameters.items()}
        values |= {
            f"{step}: {name}": _copy(gradient.to_local() if "sharded" in name else gradient)
            for name, gradient in gradients.items()
        }
    return values
