"""Graphs that the pipeline has fused, compiled and run on two ranks, against the same graphs as
they were traced, in eager torch.

What is reduced in place must not be read by anything else. So these graphs go on reading gradients,
under all the names that they can have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx

from fusion_passes import FusionConfig
from fusion_passes.passes.pipeline import run_pipeline
from fusion_passes.torch_private import register_process_group, unregister_process_group
from testing.graphs import Backward, caps, owner_of, reduce, reduce_as, reduce_into
from tests.support.lowered import lower

RUN = Callable[..., list[Any]]
_aten = torch.ops.aten

NAMES = ["ddp0", *(f"ddp0#{name}" for name in "abcd")]
SQUARE = ((4, 4), (4, 4))
LAST = [20, 1, 10, 5]
"""Strides of [2, 5, 2, 2] in channels-last order."""


def _read_after(x: Tensor, y: Tensor) -> list[Tensor]:
    gradient = x @ y
    result = reduce(gradient, "a")
    return [result, gradient + result, reduce(torch.sin(x), "b")]


def _view_read_after(x: Tensor, y: Tensor) -> list[Tensor]:
    product = x @ y
    result = reduce(_aten.permute(product, [1, 0]), "a")
    return [result, product + result.t()]


def _read_behind_a_view(x: Tensor, y: Tensor) -> list[Tensor]:
    gradient = x @ y
    view = _aten.permute(gradient, [1, 0])
    result = reduce(gradient, "a")
    return [result, view + result]


def _relaid_and_read_after(x: Tensor) -> list[Tensor]:
    gradient = torch.sin(x)
    layout = _aten.new_empty_strided(gradient, [2, 5, 2, 2], LAST)
    result = _aten.copy(layout, reduce(gradient, "a"))
    return [result, gradient + result]


def _transposed_and_read_after(x: Tensor, y: Tensor) -> list[Tensor]:
    """The result lies as the transposed product does, which is sent as it lies."""
    product = x @ y
    gradient = _aten.permute(product, [1, 0])
    layout = _aten.new_empty_strided(gradient, [4, 4], [1, 4])
    result = _aten.copy(layout, reduce(gradient, "a"))
    return [result, product + result]


def _alias_read_after(x: Tensor, y: Tensor) -> list[Tensor]:
    product = x @ y
    result = reduce(_aten.alias(product), "a")
    return [result, product + result]


def _twice(x: Tensor, y: Tensor) -> list[Tensor]:
    gradient = x @ y
    return [reduce(gradient, "a"), reduce(gradient, "b")]


def _inputs(x: Tensor, y: Tensor) -> list[Tensor]:
    first = reduce(x, "a")
    return [first, reduce(y, "b"), x + first]


def _existing(a: Tensor, b: Tensor, x: Tensor) -> list[Tensor]:
    reduce_into(a, x @ x, "a")
    reduce_into(b, x.sum(0), "b")
    return []


def _existing_and_read(a: Tensor, b: Tensor, x: Tensor) -> list[Tensor]:
    before = a + 1
    after = reduce_into(a, x @ x, "a") + 1
    reduce_into(b, x.sum(0), "b")
    return [before, after]


def _compressed(x: Tensor, y: Tensor) -> list[Tensor]:
    gradient = x @ y
    result = reduce_as(gradient, "a", torch.bfloat16)
    return [result, gradient + result, reduce_as(x.sum(0), "b", torch.bfloat16)]


def _feeds_another(x: Tensor, y: Tensor) -> list[Tensor]:
    first = reduce(x @ y, "a")
    return [first, reduce(first @ x, "b"), reduce(torch.sin(first), "c")]


GRAPHS: dict[str, tuple[Backward, tuple[tuple[int, ...], ...]]] = {
    "one that is read after": (_read_after, SQUARE),
    "a view of what is read after": (_view_read_after, SQUARE),
    "one whose view is read after": (_read_behind_a_view, SQUARE),
    "one that is relaid and read after": (_relaid_and_read_after, ((2, 5, 2, 2),)),
    "one that lies transposed and is read after": (_transposed_and_read_after, SQUARE),
    "another name of what is read after": (_alias_read_after, SQUARE),
    "one for two parameters": (_twice, SQUARE),
    "inputs": (_inputs, SQUARE),
    "existing gradients": (_existing, ((4, 4), (4,), (4, 4))),
    "existing gradients that are read": (_existing_and_read, ((4, 4), (4,), (4, 4))),
    "compressed": (_compressed, SQUARE),
    "one that feeds another": (_feeds_another, SQUARE),
}

CONFIGS = {
    "concat": FusionConfig(),
    "concat, averaged": FusionConfig(scaling="collective"),
    "coalesced": FusionConfig(mode="coalesced"),
    "coalesced, averaged": FusionConfig(mode="coalesced", scaling="collective"),
    "concat, one by one": FusionConfig(),
}


def run_graphs(config: FusionConfig, cap: int) -> dict[str, list[int]]:
    """A job for ranks: which outputs and inputs of each graph differ from eager torch's."""
    with _names_registered():
        return {name: _differences(*graph, config, cap) for name, graph in GRAPHS.items()}


def _differences(
    function: Backward, shapes: tuple[tuple[int, ...], ...], config: FusionConfig, cap: int
) -> list[int]:
    generator = torch.Generator().manual_seed(dist.get_rank())
    # Small whole numbers: no sum or product is rounded, not in bf16 either.
    inputs = [torch.randint(-2, 3, shape, generator=generator).float() for shape in shapes]
    expected_inputs = [value.clone() for value in inputs]
    expected = [*function(*expected_inputs), *expected_inputs]

    def rewrite(graph: fx.Graph) -> None:
        run_pipeline(graph, config, owner_of, caps(cap))

    lowered = lower(function, inputs, {}, rewrite)
    actual = [*lowered.run(inputs), *inputs]
    return [
        index
        for index, (ours, theirs) in enumerate(zip(actual, expected, strict=True))
        if ours.stride() != theirs.stride() or not torch.allclose(ours, theirs, rtol=1e-6)
    ]


@contextmanager
def _names_registered() -> Iterator[None]:
    assert dist.group.WORLD is not None
    for name in NAMES:
        register_process_group(name, dist.group.WORLD)
    try:
        yield
    finally:
        for name in NAMES:
            unregister_process_group(name)


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(
            name,
            marks=[
                *([pytest.mark.nightly] if "averaged" in name else []),
                *([pytest.mark.newest_torch] if name == "concat" else []),
            ],
        )
        for name in CONFIGS
    ],
)
def test_fused_graphs_are_what_was_traced(run_on_ranks: RUN, config: str) -> None:
    cap = 1 if "one by one" in config else 1 << 30
    results = run_on_ranks(2, run_graphs, config=CONFIGS[config], cap=cap)
    for rank in results:
        assert {name: wrong for name, wrong in rank.items() if wrong} == {}
