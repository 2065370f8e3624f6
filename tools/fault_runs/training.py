"""The programs of the scenarios. Most faults hit :func:`train`: a few linear layers, with points
where a fault can happen.

* ``step``: before the forward
* ``forward``: in the Python of a layer's forward
* ``forward-op``: in an operator of the forward
* ``hook``: in a hook of a parameter's gradient, in the middle of the backward
* ``backward``: in an operator of the backward, in the middle of a graph
* ``compile``: in the compile of the forward; before the first forward where none is compiled
* ``compile-backward``: in a compile that the backward starts; before the backward where it
  starts none
* ``after-backward``: between the backward and the optimizer's step
* ``update``: when the optimizer's step has begun
* ``after-update``: when the optimizer has changed the parameters
* ``send``: with a sharded optimizer, when the messages after the step have begun; behind the step
  where there are none
"""

from __future__ import annotations

import functools
import gc
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._inductor.compile_fx
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import fusion_passes  # It reads the flag from the environment.
from fault_runs.rank import USER_TEXT, Run, UserError
from fault_runs.scenarios import PEERS
from fusion_passes.sharded import sends

WIDTH, LAYERS, ROWS = 16, 4, 4
STEPS = 8
CHECKPOINT = "checkpoint.pt"
LIVES = 3

_points: dict[str, Callable[[str], None]] = {}
"""Under ``"meet"``: the function that an operator calls."""


@torch.library.custom_op("faults::point", mutates_args=())
def point(tensor: Tensor, name: str) -> Tensor:
    """Copy a tensor, and cause the fault with this name."""
    _points["meet"](name)
    return tensor.clone()


@point.register_fake
def _(tensor: Tensor, name: str) -> Tensor:  # noqa: ARG001  Both are the operator's.
    return torch.empty_like(tensor)


def _backward(_: Any, gradient: Tensor) -> tuple[Tensor, None]:
    return torch.ops.faults.point(gradient, "backward"), None


point.register_autograd(_backward)


class Net(nn.Module):
    """Linear layers; the second one contains the points."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.raises: bool = False

    def forward(self, rows: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            rows = torch.tanh(layer(rows))
            if number == 1:
                if self.raises:
                    self.raise_in_forward()
                rows = torch.ops.faults.point(rows, "forward-op")
        return rows

    @torch.compiler.disable
    def raise_in_forward(self) -> None:
        _points["meet"]("forward")


def build(run: Run) -> tuple[Net, DistributedDataParallel]:
    """The model with its hooks, in DDP.

    Options: ``hook`` is ``"traced"`` or ``"disabled"``, which breaks the backward into graphs;
    ``graph`` is the flag's ``backward_graph``.
    """
    if run.options.get("graph") and run.way not in PEERS:
        mode: Any = run.way
        flag = fusion_passes.FusionConfig(mode=mode, backward_graph=run.options["graph"])
        torch._inductor.config.ddp_fusion = flag
    if run.way == "sharded":
        torch._inductor.config.ddp_fusion = fusion_passes.FusionConfig(shard_optimizer=True)
    torch.manual_seed(0)
    _points["meet"] = run.meet
    net = Net()
    ddp = DistributedDataParallel(net)
    if run.options.get("hook"):
        weight = net.layers[1].weight
        assert isinstance(weight, Tensor)
        weight.register_hook(_hook(run))
    return net, ddp


def _hook(run: Run) -> Callable[[Tensor], Tensor]:
    def hook(gradient: Tensor) -> Tensor:
        if run.is_armed:
            run.is_armed = False
            raise UserError(USER_TEXT)
        return gradient * 2

    if run.options["hook"] == "disabled":
        disabled: Callable[[Tensor], Tensor] = torch.compiler.disable(hook)
        return disabled
    return hook


def batch(step: int, rank: int) -> Tensor:
    """A batch, different on each rank and in each step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(ROWS, WIDTH, generator=generator)


def train(run: Run) -> dict[str, Any]:
    """Train some steps.

    Options: ``steps``; ``goes_on`` catches the exception of a step and continues with the next one,
    ``"at once"`` or ``"together"``, when all ranks are done with the step; ``checkpoint`` resumes
    from one.
    """
    run.init_group()
    net, ddp = build(run)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.5)
    optimizer.register_step_pre_hook(lambda *_: run.meet("update"))
    optimizer.register_step_post_hook(lambda *_: run.meet("after-update"))
    if run.way == "sharded":
        _meet_in_messages(run)
    forward = torch.compile(ddp) if run.is_compiled else ddp
    _meet_in_compiles(run)
    first = _resume(run, ddp, optimizer)
    goes_on, launched = run.options.get("goes_on"), 0
    for step in range(first, int(run.options.get("steps", STEPS))):
        run.step, launches = step, _launches()
        try:
            _step(run, net, forward, optimizer)
            run.note("step")
        except Exception as error:
            if not goes_on:
                raise
            run.note_error(error)
        launched = _launches() - launches
        if goes_on == "together":
            wait_for_all(run)
        if run.options.get("checkpoint"):
            _save(run, ddp, optimizer)
        time.sleep(float(run.options.get("pause_s", 0)))
    parameters = _sums(net)
    del forward, ddp, net
    dist.destroy_process_group()
    return {"parameters": parameters, "launched": launched, "first": first}


def _launches() -> int:
    """Number of collectives that the backend was given."""
    group: Any = dist.distributed_c10d._get_default_group()
    return int(group._get_sequence_number_for_group())


def _step(
    run: Run, net: Net, forward: Callable[[Tensor], Tensor], optimizer: torch.optim.Optimizer
) -> None:
    optimizer.zero_grad()
    if run.is_hit("step") and run.fault is not None and run.fault.action == "skip":
        run.note("fault")
        return
    run.meet("step")
    if not run.is_compiled:
        run.meet("compile")
    net.raises = run.is_hit("forward")
    if run.is_hit("hook"):  # The hook is traced: it can't write files.
        run.is_armed, run.fault = True, None
        run.note("fault")
    loss = forward(batch(run.step, run.rank)).square().sum()
    net.raises = False
    # Stock compiled DDP has compiled its backward with the forward.
    if run.way in PEERS:
        run.meet("compile-backward")
    _points["compile"] = run.meet
    loss.backward()
    _points.pop("compile", None)
    run.meet("after-backward")
    optimizer.step()
    if run.way != "sharded":
        run.meet("send")


def _meet_in_compiles(run: Run) -> None:
    """Insert points into compiles; with a warm cache, a graph passes here before it is found."""
    inner = torch._inductor.compile_fx.compile_fx

    @functools.wraps(inner)
    def compile_fx(*args: Any, **kwargs: Any) -> Any:
        run.meet("compile-backward" if "compile" in _points else "compile")
        return inner(*args, **kwargs)

    torch._inductor.compile_fx.compile_fx = compile_fx


def _meet_in_messages(run: Run) -> None:
    """Insert a point behind the launch of the messages that owners send after a step."""
    module: Any = sends
    inner = module.begin_exchange

    @functools.wraps(inner)
    def begin_exchange(*args: Any, **kwargs: Any) -> Any:
        begun = inner(*args, **kwargs)
        run.meet("send")
        return begun

    module.begin_exchange = begin_exchange


def wait_for_all(run: Run, wait_s: float = 40.0) -> None:
    """Return once all ranks are done with a step, successfully or not. Rank 0, which has the store,
    returns last, because it may end then."""
    _count_to_all(f"done/{run.step}", wait_s)
    if run.rank == 0:
        _count_to_all(f"returns/{run.step}", wait_s)
    else:
        dist.distributed_c10d._get_default_store().add(f"returns/{run.step}", 1)


def _count_to_all(key: str, wait_s: float) -> None:
    store = dist.distributed_c10d._get_default_store()
    store.add(key, 1)
    deadline = time.monotonic() + wait_s
    while store.add(key, 0) < dist.get_world_size():
        if time.monotonic() > deadline:
            raise TimeoutError(f"only some ranks came to {key!r} in {wait_s} s")
        time.sleep(0.05)


def _resume(run: Run, ddp: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    checkpoint = run.directory / CHECKPOINT
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
        run.fault = None
    if not run.options.get("checkpoint") or not checkpoint.exists():
        return 0
    saved = torch.load(checkpoint)
    ddp.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    return int(saved["step"])


def _save(run: Run, ddp: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if run.rank == 0:
        state = {"model": ddp.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state | {"step": run.step + 1}, run.directory / "new.pt")
        (run.directory / "new.pt").replace(run.directory / CHECKPOINT)
    dist.barrier()


# --- What is made and dropped, and what must stay flat -----------------------------------------


def remake_groups(run: Run) -> dict[str, Any]:
    """Make the process group, train, and destroy it; several times in one process."""
    result: dict[str, Any] = {}
    for life in range(LIVES):
        torch._dynamo.reset()
        run.init_group(f"store-{life}")
        result = {"parameters": _train(run, int(run.options.get("steps", 3)))}
        gc.collect()
        # Gloo ends operations that another rank is still in, without the flag too.
        wait_for_all(run)
        dist.destroy_process_group()
    return result


def make_many(run: Run) -> dict[str, Any]:
    """Construct DDP modules and free them; every tenth one is trained."""
    run.init_group()
    modules = int(run.options.get("modules", 200))
    parameters, before = list[float](), dict[str, int]()
    for number in range(modules):
        if number % 10 == 0:
            torch._dynamo.reset()
            parameters = _train(run, 1)
        else:
            build(run)
        if number == modules // 2:
            before = _measures()
        run.note("step")
    growth = _growth(before, _measures())
    dist.destroy_process_group()
    return {"parameters": parameters, "growth": growth}


def train_long(run: Run) -> dict[str, Any]:
    """Train many steps, and measure the growth in the last two thirds."""
    run.init_group()
    steps = int(run.options.get("steps", 1000))
    measured = list[dict[str, int]]()

    def measure(step: int) -> None:
        if step in (steps // 3, steps - 1):
            measured.append(_measures())

    parameters = _train(run, steps, rate=1e-3, after_step=measure)
    dist.destroy_process_group()
    return {"parameters": parameters, "growth": _growth(measured[0], measured[-1])}


def _train(
    run: Run, steps: int, rate: float = 0.1, after_step: Callable[[int], None] = lambda _: None
) -> list[float]:
    net, ddp = build(run)
    forward = torch.compile(ddp) if run.is_compiled else ddp
    optimizer = torch.optim.SGD(ddp.parameters(), lr=rate)
    for step in range(steps):
        run.step = step
        optimizer.zero_grad()
        forward(batch(step, run.rank)).square().sum().backward()
        optimizer.step()
        after_step(step)
    return _sums(net)


def _sums(net: nn.Module) -> list[float]:
    return [float(parameter.double().sum()) for parameter in net.parameters()]


def _growth(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    return {name: value - before[name] for name, value in after.items()}


def _measures() -> dict[str, int]:
    """Values that must stay flat, when all ranks are at the same point."""
    gc.collect()
    dist.barrier()
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    measures = {
        "memory_kb": int(status["VmRSS"].split()[0]),
        "threads": int(status["Threads"]),
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
        "store_keys": dist.distributed_c10d._get_default_store().num_keys(),
        "objects": len(gc.get_objects()),
    }
    dist.barrier()
    return measures
