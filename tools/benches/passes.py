"""Times the passes beside torch's own, on graphs of 100, 1,000 and 10,000 gradient reductions.

Prints a Markdown table. CPU seconds are those of the passes alone, on graphs that are traced
before; what counts are the ratios, since all cells run on one machine in one run. Torch's passes
take quadratic time: a cell that would take longer than ``--torch-limit-s``, going by the smaller
sizes, is left out and says so.

    python tools/bench.py passes                # the table
    python tools/bench.py passes --output DIR   # kept
    python tools/bench.py passes --check        # fails over 5 s for 10,000
"""

from __future__ import annotations

import functools
import logging
import math
import statistics
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import fx
from torch._inductor.fx_passes import ddp_fusion as torch_fusion
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.passes.shape_prop import _extract_tensor_metadata
from torch.testing._internal.distributed.fake_pg import FakeStore
from tqdm import tqdm

from benches.results import Origin, page, parser_of, table, write
from fusion_passes.config import ReduceMode
from fusion_passes.passes.pipeline import run_pipeline
from fusion_passes.plan.buckets import ModuleBuckets
from fusion_passes.plan.caps import BucketCaps
from fusion_passes.plan.layout import GradientKind, plan_layout
from fusion_passes.profile.tables import MIB
from fusion_passes.reductions.owners import Owner

SIZES = (100, 1_000, 10_000)
GRADIENT = (40, 64)
"""Shape of a gradient: 10,000 of 10 KiB make 98 MiB, five buckets under DDP's default caps."""
MODULE = "0/ddp0"
"""The name in graphs of the module's process group; each gradient has one that begins so."""
LIMIT_S = 5.0
LIMIT_GROWTH = 20.0
"""From 1,000 to 10,000 gradients. Linear is 10; sorting and cache misses get as much again."""

Way = Callable[[fx.GraphModule], None]


def main(arguments: Sequence[str]) -> int:
    """Run the bench; 1 if ``--check`` found a limit passed."""
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="times each cell is run (3)")
    parser.add_argument("--torch-limit-s", type=float, default=60.0, help="CPU seconds (60)")
    parser.add_argument("--check", action="store_true", help="fail if a limit is passed")
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error(f"--rounds must be at least 1, but is {options.rounds}")
    logging.getLogger("comm_fusion").setLevel(logging.WARNING)
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    seconds = measure(options.rounds, options.torch_limit_s)
    origin = Origin.here("passes", arguments)
    cells = [{"method": name, "gradients": size, "cpu_s": s} for (name, size), s in seconds.items()]
    text = as_markdown(seconds, options.torch_limit_s, origin)
    print(text)
    write(options.output, "passes", origin, {"cells": cells}, text)
    return int(options.check and not within_limits(seconds))


def ways() -> dict[str, Way]:
    """What is timed, by name. Torch's passes are those that it would run by default, in order."""
    return {
        "concat": functools.partial(_run_ours, "concat"),
        "coalesced": functools.partial(_run_ours, "coalesced"),
        "torch concat": functools.partial(_run_torch, torch_fusion.fuse_ddp_with_concat_op),
        "torch coalesced": functools.partial(_run_torch, torch_fusion.fuse_ddp_with_coalesced_op),
    }


def measure(rounds: int, torch_limit_s: float) -> dict[tuple[str, int], float]:
    """Median CPU seconds by way and size, in interleaved rounds."""
    seconds: dict[tuple[str, int], float] = {}
    cells = [(size, name) for size in SIZES for name in ways()]
    with tqdm(total=len(cells) * rounds, desc="passes", unit="run") as bar:
        for size in SIZES:
            taken: dict[str, list[float]] = {}
            for _ in range(rounds):
                for name, way in ways().items():
                    smaller = seconds.get((name, size // 10))
                    is_torch = name.startswith("torch")
                    too_long = size > SIZES[0] and (
                        smaller is None or smaller * 100 > torch_limit_s
                    )
                    if not (is_torch and too_long):
                        graph = build_graph(size, named=not is_torch)
                        taken.setdefault(name, []).append(_time(way, graph))
                    bar.update()
            for name, times in taken.items():
                seconds[name, size] = statistics.median(times)
    return seconds


def build_graph(size: int, *, named: bool) -> fx.GraphModule:
    """A chain of operators with a traced gradient reduction behind each.

    Args:
        size: how many operators.
        named: whether each reduction has a group name of its own, as this package traces it, or all
            have that of their process group.
    """
    graph = fx.Graph()
    c10d = torch.ops._c10d_functional
    mode = FakeTensorMode()
    with mode:
        value = torch.empty(GRADIENT)

    def call(target: Callable[..., object], *arguments: object) -> fx.Node:
        node = graph.call_function(target, arguments)  # type: ignore[arg-type]
        return _with_value(node, value)

    last = _with_value(graph.placeholder("x"), value)
    waits = []
    for number in range(size):
        last = call(torch.ops.aten.relu.default, last)
        gradient = call(torch.ops.aten.neg.default, last)
        scaled = call(torch.ops.aten.div.Tensor, gradient, 2)
        group_name = f"{MODULE}#{number}" if named else "0"
        start = call(c10d.all_reduce.default, scaled, "sum", group_name)
        waits.append(call(c10d.wait_tensor.default, start))
    graph.output(tuple(waits))
    return fx.GraphModule(torch.nn.Module(), graph)


def _with_value(node: fx.Node, value: torch.Tensor) -> fx.Node:
    # Nodes must not share a value that says which memory they show: each gets one of its own.
    with value.fake_mode:  # type: ignore[attr-defined]
        node.meta["val"] = torch.empty_like(value)
    node.meta["tensor_meta"] = _extract_tensor_metadata(value)
    return node


def _time(way: Way, module: fx.GraphModule) -> float:
    start = time.process_time()
    way(module)
    return time.process_time() - start


def _run_ours(mode: ReduceMode, module: fx.GraphModule) -> None:
    size = len(module.graph.output_node().all_input_nodes)
    plan = run_pipeline(module.graph, mode, _owner_of, lambda _: _buckets(size))
    members = sum(len(bucket.members) for bucket in plan.buckets)
    assert members > len(plan.buckets) > 0, "nothing was fused, so nothing was timed"


def _owner_of(name: str) -> Owner:
    _, _, number = name.partition("#")
    index = int(number) if number else -1
    return Owner(MODULE, "0", "DDP 0", f"parameter {number}", "gloo", 2, index)


@functools.cache
def _buckets(size: int) -> ModuleBuckets:
    """Those that a module of so many gradients has had from its first backward on."""
    kind = GradientKind(math.prod(GRADIENT), torch.float32, torch.device("cpu"))
    pieces = [(number,) for number in range(size)]
    layout = plan_layout(pieces, dict.fromkeys(range(size), kind), BucketCaps(1 * MIB, 25 * MIB))
    return ModuleBuckets(tuple(bucket.numbers for bucket in layout.buckets))


def _run_torch(fuse: Callable[..., None], module: fx.GraphModule) -> None:
    nodes = len(module.graph.nodes)
    fake_mode = next(iter(module.graph.nodes)).meta["val"].fake_mode
    with V.set_fake_mode(fake_mode):
        fuse(module.graph, bucket_size_mb=25)
        torch_fusion.schedule_comm_wait(module.graph)
    assert len(module.graph.nodes) != nodes, "nothing was fused, so nothing was timed"


def as_markdown(seconds: dict[tuple[str, int], float], torch_limit_s: float, origin: Origin) -> str:
    """The table, with what is needed to read and to repeat it."""
    meaning = (
        "CPU seconds for one graph with that many gradient reductions; in brackets, times what "
        "`concat` takes in the same run. Ours include the checks after every pass."
    )
    rows = [
        [f"{size:,}", *(_cell(seconds, name, size, torch_limit_s) for name in ways())]
        for size in SIZES
    ]
    shown = table(["gradients", *ways()], rows, words=0)
    return page("Time that the passes take", origin, meaning, shown)


def _cell(seconds: dict[tuple[str, int], float], name: str, size: int, torch_limit_s: float) -> str:
    if (name, size) not in seconds:
        return f"left out: over {torch_limit_s:g} s"
    ratio = seconds[name, size] / seconds["concat", size]
    return f"{seconds[name, size]:.2f} ({ratio:.1f})"


def within_limits(seconds: dict[tuple[str, int], float]) -> bool:
    """Whether ours keep the limits; says which is passed."""
    kept = True
    for name in ("concat", "coalesced"):
        largest, growth = seconds[name, SIZES[-1]], seconds[name, SIZES[-1]]
        growth /= seconds[name, SIZES[-2]]
        if largest >= LIMIT_S:
            print(f"{name}: {largest:.2f} s for {SIZES[-1]:,} gradients, limit {LIMIT_S:g} s")
            kept = False
        if growth >= LIMIT_GROWTH:
            print(f"{name}: {growth:.1f} times the time for 10 times the gradients")
            kept = False
    return kept
