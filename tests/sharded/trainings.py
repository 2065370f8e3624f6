"""Trainings with a whole and with a sharded optimizer, both under the flag: they must give the same
parameters."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

import torch
import torch._dynamo
import torch._inductor.config as inductor_config
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from fusion_passes import FusionConfig
from fusion_passes.config import ShardOptimizer
from testing.threads import run_at_once

PLAIN: Final = FusionConfig()
SHARDED: Final = FusionConfig(shard_optimizer=True)
WIDTH: Final = 32
STEPS: Final = 10

Tensors = list[Tensor]


def network(dtype: torch.dtype = torch.float32, *, depth: int = 5) -> nn.Sequential:
    """Layers whose gradients round, with an odd number of outputs."""
    torch.manual_seed(0)
    hidden = [part for _ in range(depth - 1) for part in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
    return nn.Sequential(*hidden, nn.Linear(WIDTH, 3)).to(dtype)


def rows(step: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A batch, another one in each step and on each rank."""
    seed = step * dist.get_world_size() + dist.get_rank()
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(seed)).to(dtype)


def wrapped(flag: FusionConfig, model: nn.Module, **options: Any) -> DistributedDataParallel:
    """A module in buckets so small that there are several."""
    with inductor_config.patch(ddp_fusion=flag):
        return DistributedDataParallel(model, **{"bucket_cap_mb": 0.005, **options})


def backward(forward: Callable[..., Any], step: int, dtype: torch.dtype = torch.float32) -> None:
    forward(rows(step, dtype)).square().mean().backward()


def steps(ddp: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    for step in range(first, last):
        backward(ddp, step)
        optimizer.step()
        optimizer.zero_grad()


def parameters_of(*models: nn.Module) -> Tensors:
    for model in models:
        model.state_dict()  # Waits for parameters that are on their way.
    return [parameter.detach().clone() for model in models for parameter in model.parameters()]


def state_elements(optimizers: Iterable[torch.optim.Optimizer]) -> int:
    states = [state for optimizer in optimizers for state in optimizer.state.values()]
    tensors = [value for state in states for value in state.values() if isinstance(value, Tensor)]
    return sum(tensor.numel() for tensor in tensors if tensor.dim())


# --- Optimizers ----------------------------------------------------------------------------------


def _muon(model: nn.Module) -> list[torch.optim.Optimizer]:
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    return [torch.optim.Muon(matrices, lr=0.01), torch.optim.AdamW(others, lr=0.01)]


def _of(name: str, **options: Any) -> Callable[[nn.Module], list[torch.optim.Optimizer]]:
    return lambda model: [getattr(torch.optim, name)(model.parameters(), **options)]


OPTIMIZERS: Final[Mapping[str, Callable[[nn.Module], list[torch.optim.Optimizer]]]] = {
    "sgd": _of("SGD", lr=0.1),
    "momentum": _of("SGD", lr=0.1, momentum=0.9),
    "adamw": _of("AdamW", lr=0.01),
    "adafactor": _of("Adafactor", lr=0.01),
    "muon": _muon,
    "fused adamw": _of("AdamW", lr=0.01, fused=True),
    "foreach adamw": _of("AdamW", lr=0.01, foreach=True),
    "adagrad": _of("Adagrad", lr=0.01),
}


def plain(
    flag: FusionConfig, optimizer: str, dtype: torch.dtype, *, is_compiled: bool
) -> tuple[Tensors, int]:
    """The most common loop. Return the parameters, and the number of elements of the state."""
    torch._dynamo.reset()
    ddp = wrapped(flag, network(dtype))
    optimizers = OPTIMIZERS[optimizer](ddp)
    forward: Any = torch.compile(ddp) if is_compiled else ddp
    for step in range(STEPS):
        backward(forward, step, dtype)
        for each in optimizers:
            each.step()
        for each in optimizers:
            each.zero_grad()
    return parameters_of(ddp), state_elements(optimizers)


# --- Loops ---------------------------------------------------------------------------------------


def clipped(flag: FusionConfig) -> Tensors:
    """Norms of all, of one parameter, and of the largest element; and the values."""
    ddp, norms = wrapped(flag, network()), []
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01)
    for step in range(STEPS):
        backward(ddp, step)
        norms.append(clip_grad_norm_(ddp.parameters(), 0.05))
        norms.append(clip_grad_norm_(ddp.module[0].weight, 0.01))
        norms.append(clip_grad_norm_(list(ddp.parameters()), 0.01, norm_type=float("inf")))
        norms.append(clip_grad_norm_((p for p in ddp.parameters()), 0.04, norm_type=1.0))
        gradients = [p.grad for p in ddp.parameters() if p.grad is not None]
        norms.append(torch.nn.utils.get_total_norm(gradients))
        clip_grad_value_(ddp.parameters(), 1e-3)
        optimizer.step()
        optimizer.zero_grad()
    assert {norm.dtype for norm in norms} == {torch.float32}
    return [*parameters_of(ddp), torch.stack(norms)]


def clipped_beside_another(flag: FusionConfig) -> Tensors:
    """A norm over a sharded module and parameters of plain DDP, which all ranks have."""
    first, second = wrapped(flag, network()), wrapped(PLAIN, network())
    every = [*first.parameters(), *second.parameters()]
    optimizer, norms = torch.optim.SGD(every, lr=0.1), []
    for step in range(3):
        backward(first, step)
        backward(second, step)
        norms.append(clip_grad_norm_(every, 0.1))
        norms.append(clip_grad_norm_(second.parameters(), 0.01))
        optimizer.step()
        optimizer.zero_grad()
    return [*parameters_of(first, second), torch.stack(norms)]


def scaled(flag: FusionConfig) -> Tensors:
    """``GradScaler``: the gradient of one parameter is infinite in one step, on one rank."""
    ddp, scales = wrapped(flag, network()), []
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    for step in range(STEPS):
        loss = scaler.scale(ddp(rows(step)).square().mean())
        if step in (2, 3) and dist.get_rank() == 1:
            loss = loss + ddp.module[0].bias.sum() * float("inf")
        loss.backward()
        if step % 2:
            scaler.unscale_(optimizer)
            clip_grad_norm_(ddp.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        scales.append(torch.tensor(scaler.get_scale()))
        optimizer.zero_grad()
    return [*parameters_of(ddp), torch.stack(scales)]


def accumulated(flag: FusionConfig, zero: str, *, every: int = 1, factor: float = 1.0) -> Tensors:
    """Gradients that are cleared in a way, or never; all but each ``every``-th backward under
    ``no_sync``; and averages that are changed in place."""
    ddp = wrapped(flag, network())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.5)
    for step in range(3 * every):
        is_last = step % every == every - 1
        with contextlib.nullcontext() if is_last else ddp.no_sync():
            backward(ddp, step)
        if is_last:
            for parameter in ddp.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)
            optimizer.step()
        if is_last and zero != "never":
            optimizer.zero_grad(set_to_none=zero == "none")
    return parameters_of(ddp)


def averaged_twice(flag: FusionConfig) -> Tensors:
    """Two averaged backwards for each step, and a closure that some optimizers call."""
    ddp = wrapped(flag, network())
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01)

    def closure(step: int) -> Tensor:
        optimizer.zero_grad()
        backward(ddp, 2 * step)
        loss = ddp(rows(2 * step + 1)).square().mean()
        loss.backward()
        return loss

    for step in range(5):
        optimizer.step(functools.partial(closure, step))
    return parameters_of(ddp)


def closure_after_no_sync(flag: FusionConfig) -> Tensors:
    """A closure that averages what was accumulated before the step, as Lightning's does."""
    ddp = wrapped(flag, network())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)

    def closure(step: int) -> None:
        backward(ddp, step)

    for step in range(4):
        with ddp.no_sync():
            backward(ddp, 2 * step)
        optimizer.step(functools.partial(closure, 2 * step + 1))
        optimizer.zero_grad()
    return parameters_of(ddp)


def of_one_owner(flag: FusionConfig) -> Tensors:
    """A rank that owns nothing clips and scales what it does not have."""
    torch.manual_seed(0)
    ddp, norms = wrapped(flag, nn.Linear(WIDTH, 3, bias=False)), []
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for step in range(3):
        scaler.scale(ddp(rows(step)).square().mean()).backward()
        scaler.unscale_(optimizer)
        norms.append(clip_grad_norm_(ddp.parameters(), 0.05))
        clip_grad_value_(ddp.parameters(), 1e-3)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return [*parameters_of(ddp), torch.stack(norms)]


def of_several_dtypes(flag: FusionConfig) -> Tensors:
    """The norm has one dtype on all ranks, whatever dtypes a rank owns."""
    torch.manual_seed(0)
    parts = [torch.randn(WIDTH, 9), torch.randn(3).bfloat16()]
    model = nn.ParameterList(parts)

    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: Tensor) -> Tensor:
            return (x @ self.model[0]).square().mean() + self.model[1].square().sum() * x[0, 0]

    ddp, norms = wrapped(flag, Sum()), []
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(3):
        backward(ddp, step)
        norms.append(clip_grad_norm_(ddp.parameters(), 0.05))
        optimizer.step()
        optimizer.zero_grad()
    assert {norm.dtype for norm in norms} == {torch.float32}
    return [*parameters_of(ddp), torch.stack(norms)]


def clipped_in_threads(flag: FusionConfig) -> Tensors:
    """Two threads, each with a module on a group of its own, compute norms at the same time."""
    groups = [dist.new_group(range(dist.get_world_size())) for _ in range(2)]
    ddps = [wrapped(flag, network(), process_group=group) for group in groups]
    norms: list[Tensors] = [[], []]
    meeting = threading.Barrier(2, timeout=20)

    def train(number: int) -> None:
        ddp = ddps[number]
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        for step in range(20):
            backward(ddp, 100 * number + step)
            meeting.wait()
            norms[number].append(clip_grad_norm_(ddp.parameters(), 0.05))
            optimizer.step()
            optimizer.zero_grad()

    run_at_once([functools.partial(train, number) for number in range(2)])
    return [*parameters_of(*ddps), *map(torch.stack, norms)]


def scheduled(flag: FusionConfig) -> Tensors:
    """Several parameter groups, one of which is added later, and a scheduler."""
    ddp = wrapped(flag, network())
    *first, last = ddp.module
    optimizer = torch.optim.SGD(nn.Sequential(*first).parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for step in range(6):
        if step == 2:
            optimizer.add_param_group({"params": last.parameters(), "lr": 0.3})
        steps(ddp, optimizer, step, step + 1)
        scheduler.step()
    return parameters_of(ddp)


def frozen(flag: FusionConfig) -> Tensors:
    """Parameters that are frozen before construction, and some that are frozen and thawed later."""
    model = network()
    model[0].requires_grad_(False)
    ddp = wrapped(flag, model, find_unused_parameters=True)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01)
    for step in range(8):
        model[2].requires_grad_(step not in (2, 3))
        steps(ddp, optimizer, step, step + 1)
    return parameters_of(ddp)


class Branches(nn.Module):
    """Several layers. A forward runs some of them, and two of them share a weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.last, self.tied = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.tied.weight = self.last.weight

    def forward(self, x: Tensor, takes: str) -> Tensor:
        x = self.first(x) if "a" in takes else x
        x = self.second(x) if "b" in takes else x
        return self.tied(self.last(x))


def unused(flag: FusionConfig) -> Tensors:
    """``find_unused_parameters``: branches that one rank takes, that all take, and that none takes,
    with momentum, which moves a parameter without a gradient on no rank."""
    ddp = wrapped(flag, Branches(), find_unused_parameters=True)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
    taken = ["a/b", "/", "ab/", "b/b", "a/a", "/ab"]
    for step, takes in enumerate(taken):
        ranks = takes.split("/")
        ddp(rows(step), ranks[dist.get_rank() % 2]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return parameters_of(ddp)


def several(flag: FusionConfig) -> Tensors:
    """Two modules, one on a group of its own, and an optimizer for both."""
    group = dist.new_group(range(dist.get_world_size()))
    first, second = wrapped(flag, network()), wrapped(flag, network(), process_group=group)
    optimizer = torch.optim.AdamW([*first.parameters(), *second.parameters()], lr=0.01)
    norms = []
    for step in range(5):
        x = first(rows(step)).square().mean() + second(rows(step)).square().mean()
        x.backward()
        norms.append(clip_grad_norm_([*first.parameters(), *second.parameters()], 0.1))
        optimizer.step()
        optimizer.zero_grad()
    return [*parameters_of(first, second), torch.stack(norms)]


def complex_and_other_strides(flag: FusionConfig) -> Tensors:
    """Complex parameters, and ones that are not contiguous."""
    torch.manual_seed(0)
    model = nn.ParameterList(
        [
            torch.randn(WIDTH, 5, dtype=torch.complex64),
            torch.randn(5, WIDTH).t(),
            torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
            torch.randn(200, 200).t(),
            torch.zeros(0),
        ]
    )

    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: Tensor) -> Tensor:
            products = x.to(torch.complex64) @ self.model[0], x @ self.model[1]
            rest = [p.square().mean() * x.sum() for p in [*self.model][2:4]]
            return products[0].abs().sum() + products[1].sum() + sum(rest) + self.model[4].sum()

    ddp = wrapped(flag, Sum())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01, momentum=0.9)
    steps(ddp, optimizer, 0, 3)
    return parameters_of(ddp)


def compiled_steps(flag: FusionConfig) -> Tensors:
    """A compiled optimizer, and then a whole step in one compiled function."""
    torch._dynamo.reset()
    ddp = wrapped(flag, network(depth=2))
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01)
    compiled: Any = torch.compile(optimizer.step)

    def whole(step: int) -> None:
        backward(ddp, step)
        clip_grad_norm_(ddp.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()

    for step in range(3):
        backward(ddp, step)
        compiled()
        optimizer.zero_grad()
    function: Any = torch.compile(whole)
    for step in range(3):
        function(step)
    return parameters_of(ddp)


def fp16(flag: FusionConfig) -> Tensors:
    """fp16 gradients whose sum over the ranks overflows, and which accumulate."""
    ddp = wrapped(flag, nn.Linear(4, 4).half())
    with torch.no_grad():
        for parameter in ddp.parameters():
            parameter.zero_()
    optimizer = torch.optim.SGD(ddp.parameters(), lr=2.0**-15)
    for factor in (40000, 10000):
        (ddp(torch.ones(1, 4, dtype=torch.half)).sum() * factor).backward()
    optimizer.step()
    return parameters_of(ddp)


LOOPS: Final[Mapping[str, Callable[[FusionConfig], Tensors]]] = {
    "clipped": clipped,
    "clipped beside another": clipped_beside_another,
    "scaled": scaled,
    "never cleared": functools.partial(accumulated, zero="never"),
    "kept": functools.partial(accumulated, zero="kept"),
    "changed in place": functools.partial(accumulated, zero="never", factor=0.5),
    "no_sync": functools.partial(accumulated, zero="none", every=3),
    "no_sync, kept": functools.partial(accumulated, zero="kept", every=3),
    "no_sync, never cleared": functools.partial(accumulated, zero="never", every=3),
    "no_sync, changed in place": functools.partial(accumulated, zero="never", every=2, factor=0.5),
    "averaged twice": averaged_twice,
    "closure after no_sync": closure_after_no_sync,
    "of one owner": of_one_owner,
    "of several dtypes": of_several_dtypes,
    "clipped in threads": clipped_in_threads,
    "scheduled": scheduled,
    "frozen": frozen,
    "unused": unused,
    "several": several,
    "complex and other strides": complex_and_other_strides,
    "compiled steps": compiled_steps,
    "fp16": fp16,
}


# --- Jobs for ranks ------------------------------------------------------------------------------


def largest_difference(ours: Tensors, theirs: Tensors) -> float:
    """In eps of the dtype and of the largest element of each tensor."""
    found = 0.0
    for one, other in zip(ours, theirs, strict=True):
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        if torch.equal(one, other):
            continue
        eps = torch.finfo(one.dtype).eps * other.abs().max().item()
        found = max(found, (one - other).abs().max().item() / eps)
    return found


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def of_optimizers(
    names: Iterable[str], dtype: torch.dtype, *, is_compiled: bool, option: ShardOptimizer = True
) -> dict[str, tuple[float, float]]:
    """For each optimizer the largest difference of parameters, and the share of the state."""
    found = {}
    with one_thread():
        for name in names:
            theirs, whole = plain(PLAIN, name, dtype, is_compiled=is_compiled)
            flag = FusionConfig(shard_optimizer=option)
            ours, part = plain(flag, name, dtype, is_compiled=is_compiled)
            found[name] = largest_difference(ours, theirs), part / max(whole, 1)
    return found


def of_loop(name: str, option: ShardOptimizer) -> float:
    with one_thread():
        theirs = LOOPS[name](PLAIN)
        return largest_difference(LOOPS[name](FusionConfig(shard_optimizer=option)), theirs)
