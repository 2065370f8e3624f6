"""Small graphs traced from tensor code, and a runner that checks the properties of every rewrite.

A test writes a backward as a tensor function. It is traced under a fake mode into the form that
Inductor's post-grad passes get::

    def backward(x, y):
        return reduce(torch.neg(x), "a"), reduce(torch.neg(y), "b")

    check(backward, [tensor(2, 3), tensor(4)], concat())

Group names identify the owner of a reduction: ``ddp0`` and ``ddp1`` are DDP modules on the process
group ``world``, ``ddp2`` is one on the process group ``pairs``, ``ddp3`` one on ``cards`` (NCCL),
``ddp4`` one on ``others`` (an unknown backend). Any other name belongs to no module.
"""

from __future__ import annotations

import string
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from fusion_passes.config import ReduceMode, ScalingOption
from fusion_passes.graph.collectives import (
    ALL_REDUCE,
    ALL_REDUCE_COALESCED,
    ALL_REDUCE_IN_PLACE,
    WAIT,
    all_reduce,
    is_launch,
    is_pinned,
)
from fusion_passes.graph.text import graph_text
from fusion_passes.layout.layout import ParameterNumber, Piece
from fusion_passes.reducer.communication import AllReduce
from fusion_passes.traced.buckets import BucketPlan, BucketsOf, ModuleBuckets, plan_buckets
from fusion_passes.traced.coalesced import FuseByCoalescing
from fusion_passes.traced.concat import FuseByConcat
from fusion_passes.traced.find import (
    FoundReductions,
    GradientReduction,
    ReductionKey,
    find_gradient_reductions,
)
from fusion_passes.traced.owners import DdpGroups, Owner, OwnerOf
from fusion_passes.traced.pin import PinOrder
from fusion_passes.traced.pipeline import run_pipeline
from fusion_passes.traced.place import PlaceReductions
from fusion_passes.traced.verify import GraphFacts, graph_facts, verify
from tests.support.fake_world import fake_world

WORLD_SIZE = 4
AVERAGED_OVER = 2
"""World size of the DDP modules: :func:`reduce` divides by it."""

PROCESS_GROUP_OF = {
    "ddp0": "world",
    "ddp1": "world",
    "ddp2": "pairs",
    "ddp3": "cards",
    "ddp4": "others",
}
BACKEND_OF = {"world": "gloo", "pairs": "gloo", "cards": "nccl", "others": "unknown"}

Backward = Callable[..., Any]
Rewrite = Callable[[fx.Graph], bool]
RewriteFor = Callable[[fx.Graph], Rewrite]
"""Makes the pass for a graph; some passes take a plan of that graph."""


# --- What graphs are made of -------------------------------------------------------------------


@dataclass(frozen=True)
class TensorSpec:
    """Shape, strides, dtype and device of an input of a traced function."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str
    stride: tuple[int, ...] | None

    def fake(self) -> Tensor:
        """The input as a fake tensor; call it under a fake mode."""
        if self.stride is not None:
            return torch.empty_strided(
                self.shape, self.stride, dtype=self.dtype, device=self.device
            )
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)


def tensor(
    *shape: int,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    stride: tuple[int, ...] | None = None,
) -> TensorSpec:
    return TensorSpec(shape, dtype, device, stride)


def trace(
    function: Backward, inputs: Sequence[TensorSpec], *, symbolic: bool = False
) -> fx.GraphModule:
    """The post-grad graph of a tensor function, in its owning module."""
    if symbolic:
        real = [torch.empty(spec.shape, dtype=spec.dtype) for spec in inputs]
        module = make_fx(function, tracing_mode="symbolic")(*real)
    else:
        with FakeTensorMode():
            fake = [spec.fake() for spec in inputs]
        module = make_fx(function)(*fake)
    for node in module.graph.nodes:
        if node.target in (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default):
            node.target = torch.ops.aten.reshape.default
    return module


def reduce(
    gradient: Tensor,
    parameter: str,
    *,
    module: str = "ddp0",
    op: str = "sum",
    divide: float | None = 2,
) -> Tensor:
    """The trace of DDP's hook for a gradient, including the wait: the new ``.grad`` if there was
    none."""
    divided = gradient if divide is None else torch.div(gradient, divide)
    return all_reduce(divided, op, f"{module}#{parameter}")


def reduce_into(grad: Tensor, gradient: Tensor, parameter: str, **options: Any) -> Tensor:
    """The trace of DDP's hook for a gradient with an existing ``.grad``, which is a graph input."""
    return grad.copy_(reduce(torch.add(grad, gradient), parameter, **options))


def cast(value: Tensor, dtype: torch.dtype) -> Tensor:
    """A cast in the form that Inductor's decompositions produce."""
    return torch.ops.prims.convert_element_type.default(value, dtype)


def owner_of(group_name: str) -> Owner | None:
    """An :data:`fusion_passes.traced.owners.OwnerOf` for the group names of this file."""
    module, _, parameter = group_name.partition("#")
    process_group = PROCESS_GROUP_OF.get(module)
    if process_group is None:
        return None
    return Owner(
        module,
        process_group,
        module.upper(),
        parameter or "?",
        number_of(parameter) if parameter else ParameterNumber(-1),
    )


def groups_of(graph: fx.Graph) -> DdpGroups:
    """The group names of the graph that :func:`owner_of` knows."""
    return DdpGroups.of(graph, owner_of)


def find(graph: fx.Graph) -> FoundReductions:
    """The gradient reductions of a graph with the group names of this file."""
    return find_gradient_reductions(graph, groups_of(graph))


def number_of(parameter: str) -> ParameterNumber:
    """The parameter number in a name: 3 for ``w3`` and for ``d``."""
    digits = parameter.lstrip(string.ascii_letters + "_")
    letter = ord(parameter[:1] or "a") - ord("a")
    return ParameterNumber(int(digits) if digits.isdigit() else letter)


def piece(*numbers: int) -> Piece:
    """The parameters with these numbers."""
    return tuple(map(ParameterNumber, numbers))


def buckets_of(
    graph: fx.Graph, cap: int = 1 << 40, owners: OwnerOf = owner_of, **options: Any
) -> BucketsOf:
    """Layouts for the modules of a graph, as if the graph was that of the first averaged backward.
    ``cap`` bytes close a bucket of gradients of one kind; ``options`` are those of
    :func:`buckets_with`."""
    found = find_gradient_reductions(graph, DdpGroups.of(graph, owners))
    open_: dict[ReductionKey, list[GradientReduction]] = {}
    full: dict[str, list[Piece]] = {}
    for reduction in found.reductions:
        module = reduction.key.group_name
        bucket = open_.setdefault(reduction.key, [])
        bucket.append(reduction)
        full.setdefault(module, [])
        if sum(member.num_bytes for member in bucket) >= cap:
            full[module].append(_numbers(open_.pop(reduction.key)))
    for key, bucket in open_.items():
        full[key.group_name].append(_numbers(bucket))
    return lambda module: buckets_with(full.get(module, ()), module, **options)


def buckets_with(
    numbers: Sequence[Piece],
    module: str = "ddp0",
    reduce_dtype: torch.dtype | None = None,
    scaling: ScalingOption = "auto",
) -> ModuleBuckets:
    """Buckets with these parameters, of a module that reduces with these options."""
    group: Any = SimpleNamespace(size=lambda: AVERAGED_OVER)
    backend = BACKEND_OF[PROCESS_GROUP_OF[module]]
    communication = AllReduce(group, backend, dtype=reduce_dtype, scaling_option=scaling)
    return ModuleBuckets(tuple(numbers), communication)


def _numbers(reductions: Sequence[GradientReduction]) -> Piece:
    return tuple(reduction.owner.number for reduction in reductions)


def plan_of(graph: fx.Graph, cap: int = 1 << 40, **options: Any) -> BucketPlan:
    return plan_buckets(graph, find(graph), buckets_of(graph, cap, **options))


# --- The passes, made for a graph --------------------------------------------------------------


def concat(cap: int = 1 << 40, **options: Any) -> RewriteFor:
    return lambda graph: FuseByConcat(plan_of(graph, cap, **options).buckets)


def coalesced(cap: int = 1 << 40, **options: Any) -> RewriteFor:
    return lambda graph: FuseByCoalescing(plan_of(graph, cap, **options).buckets)


def place() -> RewriteFor:
    return lambda graph: PlaceReductions(groups_of(graph))


def pin() -> RewriteFor:
    return lambda graph: PinOrder(groups_of(graph))


def pipeline(mode: ReduceMode, **options: Any) -> RewriteFor:
    """All passes as one pass, which returns whether the graph's text changed."""

    def rewrite_for(graph: fx.Graph) -> Rewrite:
        of = buckets_of(graph, **options)

        def run(graph: fx.Graph) -> bool:
            before = graph_text(graph)
            run_pipeline(graph, mode, owner_of, of)
            return graph_text(graph) != before

        return run

    return rewrite_for


def chain(*rewrites: RewriteFor) -> RewriteFor:
    """Passes that run one after another; each is made for the graph that the one before leaves."""

    def run(graph: fx.Graph) -> bool:
        changed = [rewrite_for(graph)(graph) for rewrite_for in rewrites]
        return any(changed)

    return lambda graph: run


# --- The runner --------------------------------------------------------------------------------


def check(
    function: Backward,
    inputs: Sequence[TensorSpec],
    rewrite_for: RewriteFor,
    *,
    runs_twice: bool = True,
) -> str:
    """Run a pass on the graph of a function, and return the text of the resulting graph.

    Asserts the properties of every pass on every graph: the changed flag is right, the invariants
    hold, a second run (if requested) changes nothing, the numbers are bitwise those of the traced
    graph, and the text is the same on the first and on the last rank.
    """
    first, last = (
        _check_on(rank, function, inputs, rewrite_for, runs_twice) for rank in (0, WORLD_SIZE - 1)
    )
    assert first == last, "ranks disagree"
    return first


def check_unchanged(
    function: Backward, inputs: Sequence[TensorSpec], rewrite_for: RewriteFor
) -> None:
    """Run :func:`check` on a graph that the pass must leave alone."""
    assert check(function, inputs, rewrite_for) == graph_text(trace(function, inputs).graph)


def _check_on(
    rank: int,
    function: Backward,
    inputs: Sequence[TensorSpec],
    rewrite_for: RewriteFor,
    runs_twice: bool,
) -> str:
    with fake_world(WORLD_SIZE, rank):
        module = trace(function, inputs)
        graph = module.graph
        before, numbers = graph_text(graph), execute(module)
        facts = graph_facts(graph, groups_of(graph))
        changed = rewrite_for(graph)(graph)
        after = graph_text(graph)
        assert changed == (before != after), f"returned {changed}, which is not what it did"
        facts = _verify_rewritten(graph, facts)
        assert_same_numbers(numbers, execute(module))
        if runs_twice:
            changed = rewrite_for(graph)(graph)
            assert graph_text(graph) == after, "a second run changed the graph"
            assert not changed, "a second run said that it changed the graph"
            verify(graph, facts, groups_of(graph))
    return after


def _verify_rewritten(graph: fx.Graph, before: GraphFacts) -> GraphFacts:
    """Check the invariants, except that another reduce op or dtype may reduce the same elements."""
    after = graph_facts(graph, groups_of(graph))
    assert _elements(after) == _elements(before)
    return verify(graph, replace(before, reduced=after.reduced), groups_of(graph))


def _elements(facts: GraphFacts) -> Counter[str]:
    """Number of elements that are reduced, by the DDP module's group."""
    elements: Counter[str] = Counter()
    for (group, _, _), count in facts.reduced.items():
        elements[group] += count
    return +elements


def assert_same_numbers(expected: Sequence[Any], actual: Sequence[Any]) -> None:
    """Assert that values, dtypes and strides are bitwise equal."""
    assert len(expected) == len(actual)
    for index, (one, other) in enumerate(zip(expected, actual, strict=True)):
        assert (one.dtype, one.stride()) == (other.dtype, other.stride()), f"value {index}"
        assert torch.equal(one, other), f"value {index}: {one} became {other}"


# --- Real numbers ------------------------------------------------------------------------------


def execute(module: fx.GraphModule) -> list[Tensor]:
    """Run a graph on CPU tensors that depend only on the shapes of the inputs.

    Collectives are simulated: each process group and reduce op has a function of its own, and the
    result of a collective is NaN until its wait.

    Returns:
        The outputs, and then the inputs as the graph leaves them.
    """
    inputs = [
        _real_input(index, node.meta["val"])
        for index, node in enumerate(module.graph.find_nodes(op="placeholder"))
    ]
    outputs = _Player(module, {}).run(*inputs)
    values = outputs if isinstance(outputs, list | tuple) else [outputs]
    return [value.clone() for value in values if isinstance(value, Tensor)] + inputs


def _real_input(index: int, fake: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(index)
    values = torch.randn(fake.shape, dtype=torch.float64, generator=generator)
    if fake.is_complex():
        values = torch.complex(values, values.flip(0) if values.dim() else -values)
    real = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype)
    return real.copy_(values)


class _Player(fx.Interpreter):
    """Runs a graph with simulated collectives."""

    def __init__(self, module: fx.GraphModule, pending: dict[int, tuple[Tensor, Tensor]]) -> None:
        super().__init__(module)
        self._pending = pending

    def run_node(self, n: fx.Node) -> Any:
        if n.op != "call_function":
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        if is_pinned(n):
            _, subgraph, *inputs = args
            return _Player(subgraph, self._pending).run(*inputs)
        if n.target is WAIT:
            return self._wait(args[0])
        if n.target in (ALL_REDUCE, ALL_REDUCE_IN_PLACE):
            result = _reduced(args[0], args[1], args[2])
            return self._launch(args[0] if n.target is ALL_REDUCE_IN_PLACE else None, result)
        if n.target is ALL_REDUCE_COALESCED:
            return [self._launch(None, _reduced(item, args[1], args[2])) for item in args[0]]
        if is_launch(n):
            shape = n.meta["val"].shape
            return self._launch(None, torch.full(shape, args[0].sum(), dtype=args[0].dtype))
        return n.target(*args, **kwargs)  # type: ignore[operator]

    def _launch(self, into: Tensor | None, result: Tensor) -> Tensor:
        result = result.clone(memory_format=torch.contiguous_format)
        target = torch.empty_like(result) if into is None else into
        target.fill_(float("nan"))
        self._pending[id(target)] = (target, result)
        return target

    def _wait(self, target: Tensor) -> Tensor:
        _, result = self._pending.pop(id(target), (target, target))
        return target.copy_(result)


def _reduced(value: Tensor, reduce_op: Any, group_name: str) -> Tensor:
    """The simulated reduction: elementwise, so that the neighbours in a bucket do not matter, and
    by powers of two, so that scaling or casting before or after is bitwise the same."""
    owner = owner_of(group_name)
    if reduce_op == "avg":
        value, reduce_op = value / AVERAGED_OVER, "sum"
    label = zlib.crc32(f"{owner.group_name if owner else group_name} {reduce_op}".encode())
    return value * (2.0 ** (label % 7 + 1) * (-1) ** (label // 7))
