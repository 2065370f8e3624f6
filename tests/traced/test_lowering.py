"""A bucket, lowered by Inductor and run on two ranks, against the same operators in eager torch.

The result of a collective differs from its input here, so a gradient with another reader would show
it if the bucket were reduced in the gradient's own memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch._inductor.config
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.utils import run_and_get_code
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from fusion_passes.graph.collectives import all_reduce
from fusion_passes.graph.custom_ops import PACK, WIDEN
from fusion_passes.layout.layout import in_round_order
from fusion_passes.reporting.graphs import compile_log
from fusion_passes.traced.pack import register_lowerings
from testing.processes import RUN

RESULTS = list[dict[str, dict[str, Any]]]
"""The results of each rank, by the name of the case; see :func:`run_cases`."""
_aten = torch.ops.aten

ALLOCATES = "aten.convolution_backward allocates its own result"
ELSEWHERE = "another node reads it too"
INPUT = "it is a graph input"
VIEW = "it is a view of a buffer with another layout"


def reduced(
    *gradients: Tensor,
    strides: Sequence[tuple[int, ...]] | None = None,
    dtype: torch.dtype = torch.float32,
    divisor: float = 1.0,
    in_bucket: bool = False,
) -> list[Tensor]:
    """The gradients, packed into a bucket and reduced over all ranks, as views of it."""
    strides = strides or [_contiguous(gradient) for gradient in gradients]
    numels = [gradient.numel() for gradient in gradients]
    offsets, end = [0] * len(numels), 0
    for index in in_round_order(numels):
        offsets[index], end = end, end + numels[index]
    bucket = PACK(
        list(gradients),
        offsets,
        [number for numbers in strides for number in numbers],
        dtype,
        divisor,
        in_bucket,
        "test:0",
    )
    bucket = all_reduce(bucket, "sum", "0")
    if dtype != torch.float32:
        bucket = WIDEN(bucket, torch.float32, 2.0)
    return [
        bucket.as_strided(gradient.shape, numbers, offset)
        for gradient, numbers, offset in zip(gradients, strides, offsets, strict=True)
    ]


def _contiguous(tensor: Tensor) -> tuple[int, ...]:
    return torch.empty(tensor.shape, device="meta").stride()


@dataclass(frozen=True)
class Case:
    """A graph, and the gradients that are copied.

    Attributes:
        function: function from tensors to tensors.
        shapes: shapes of its inputs.
        copied: for each bucket in order, the reasons by the gradient's index.
        stores: number of calls that copy several gradients.
    """

    function: Callable[..., list[Tensor]]
    shapes: tuple[tuple[int, ...], ...]
    copied: tuple[dict[int, str], ...] = ({},)
    stores: int = 0


def _convolution(x: Tensor, w: Tensor) -> Tensor:
    """A gradient of a convolution's weight."""
    stride, padding, dilation, mask = [1, 1], [0, 0], [1, 1], [False, True, False]
    arguments = (x, w, [0], stride, padding, dilation, False, [0, 0], 1, mask)
    _, gradient, _ = _aten.convolution_backward(torch.ones_like(F.conv2d(x, w)), *arguments)
    return gradient


def _relaid(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.channels_last)


def _embedding(x: Tensor) -> Tensor:
    rows = torch.tensor([1, 3, 1, 0])
    return _aten.embedding_dense_backward(x, rows, 5, -1, False)


def _read_after(x: Tensor, y: Tensor) -> list[Tensor]:
    gradient = x @ y
    (result,) = reduced(gradient)
    return [result, gradient + result]


def _view_read_after(x: Tensor, y: Tensor) -> list[Tensor]:
    product = x @ y
    (result,) = reduced(product.t())
    return [result, product + result.t()]


def _alias_read_after(x: Tensor, y: Tensor) -> list[Tensor]:
    product = x @ y
    (result,) = reduced(_aten.alias(product))
    return [result, product + result]


def _computed_and_read_after(x: Tensor) -> list[Tensor]:
    gradient = x.sum(0)
    (result,) = reduced(gradient)
    return [result, gradient + result]


def _reshaped_and_read_after(x: Tensor, y: Tensor) -> list[Tensor]:
    product = x @ y
    (result,) = reduced(product.view(2, 8))
    return [result, product + result.view(4, 4)]


def _in_two_buckets(x: Tensor, y: Tensor) -> list[Tensor]:
    gradient = x @ y
    return [*reduced(gradient), *reduced(gradient, torch.sin(x))]


def _from_a_bucket(x: Tensor, y: Tensor) -> list[Tensor]:
    (first,) = reduced(x @ y)
    return [first, *reduced(first @ y, first)]


SQUARE = ((4, 4), (4, 4))

CASES: dict[str, Case] = {
    "a product beside others": Case(
        lambda x, y: reduced(x @ y, x.sum(0), y.sum(1), torch.sin(y)), ((3, 5), (5, 7))
    ),
    "one that is stored transposed": Case(
        lambda x, y: reduced(x @ y, strides=[(1, 2)]), ((2, 3), (3, 5))
    ),
    "an addition to what was there": Case(lambda x, y, g: reduced(g + x @ y), (*SQUARE, (4, 4))),
    "a batch of products": Case(lambda x, y: reduced(x @ y), ((2, 3, 4), (2, 4, 5))),
    "a sum of all": Case(lambda x: reduced(x.sum(), torch.cos(x)), ((4, 4),)),
    "a long sum": Case(lambda x: reduced((x * x).sum((0, 2)), x.sum(1)), ((8, 3, 1025),)),
    "an embedding": Case(lambda x, y: reduced(_embedding(x), x @ y), SQUARE),
    "channels last": Case(
        lambda x: reduced(torch.sin(x), x.sum(0), strides=[(60, 1, 15, 3), (20, 5, 1)]),
        ((2, 3, 4, 5),),
    ),
    "what repeats": Case(lambda x: reduced(torch.sin(x).expand(3, 4)), ((4,),)),
    "a product that repeats": Case(
        lambda x, y: reduced((x @ y)[0].expand(3, 4)), SQUARE, ({0: VIEW},), stores=1
    ),
    "a part": Case(lambda x, y: reduced((x @ y)[1:3]), SQUARE, ({0: VIEW},), stores=1),
    "sums that keep their dimension": Case(
        lambda x, y: reduced(x.sum(0, True).view(4), (x * y).sum((0, 1), True).view(())), SQUARE
    ),
    "a product in another shape": Case(lambda x, y: reduced((x @ y).view(2, 2, 4)), SQUARE),
    "a product with its dimensions in another order": Case(
        lambda x, y: reduced((x @ y).t(), strides=[(1, 5)]), ((3, 4), (4, 5))
    ),
    "a convolution in another shape": Case(
        lambda x, v: reduced(_convolution(x, v).squeeze((2, 3))),
        ((2, 3, 8, 8), (4, 3, 1, 1)),
        ({0: ALLOCATES},),
        stores=1,
    ),
    "an input in another shape": Case(
        lambda x: reduced(x.view(16)), ((4, 4),), ({0: INPUT},), stores=1
    ),
    "one that is read after in another shape": Case(
        _reshaped_and_read_after, SQUARE, ({0: ELSEWHERE},), stores=1
    ),
    "inputs": Case(
        lambda x, y: reduced(x, torch.sin(x), y), SQUARE, ({0: INPUT, 2: INPUT},), stores=1
    ),
    "convolutions": Case(
        lambda x, v, w: reduced(_convolution(x, v), x.sum(0), _convolution(x, w)),
        ((2, 3, 8, 8), (4, 3, 3, 3), (5, 3, 1, 1)),
        ({0: ALLOCATES, 2: ALLOCATES},),
        stores=1,
    ),
    "a convolution that is laid out anew": Case(
        lambda x, v: reduced(_relaid(_convolution(x, v)), strides=[(27, 1, 9, 3)]),
        ((2, 3, 8, 8), (4, 3, 3, 3)),
        ({0: "aten.convolution_backward returns it in another layout"},),
    ),
    "the same one twice": Case(
        lambda x, y: reduced(*[x @ y] * 2), SQUARE, ({0: ELSEWHERE, 1: ELSEWHERE},), stores=1
    ),
    "one in two buckets": Case(_in_two_buckets, SQUARE, ({0: ELSEWHERE}, {0: ELSEWHERE}), stores=2),
    "one that is read after": Case(_read_after, SQUARE, ({0: ELSEWHERE},), stores=1),
    "a view of what is read after": Case(_view_read_after, SQUARE, ({0: VIEW},), stores=1),
    "another name of what is read after": Case(
        _alias_read_after, SQUARE, ({0: ELSEWHERE},), stores=1
    ),
    "a sum that is read after": Case(_computed_and_read_after, ((4, 4),), ({0: ELSEWHERE},)),
    "what comes from a bucket": Case(_from_a_bucket, SQUARE, ({}, {1: ELSEWHERE}), stores=1),
    "divided where stored": Case(lambda x, y: reduced(x.sum(0), torch.sin(y), divisor=2.0), SQUARE),
    "a product divided where stored": Case(
        lambda x, y: reduced(x @ y, x.sum(0), divisor=2.0),
        SQUARE,
        ({0: "aten.mm cannot cast or scale its result"},),
        stores=1,
    ),
    "sums and a product in other shapes, divided where stored": Case(
        lambda x, y: reduced((x @ y).view(2, 8), x.sum(0, True).view(4), divisor=2.0),
        SQUARE,
        ({0: "aten.mm cannot cast or scale its result"},),
        stores=1,
    ),
    "divided in the bucket": Case(
        lambda x, y: reduced(x @ y, x.sum(0), divisor=2.0, in_bucket=True), SQUARE
    ),
    "sent as bf16": Case(
        lambda x, y: reduced(x @ y, x.sum(0), dtype=torch.bfloat16),
        SQUARE,
        ({0: "aten.mm cannot cast or scale its result"},),
        stores=1,
    ),
    "sent as fp16, scaled": Case(
        lambda x, y: reduced(torch.sin(x), y.sum(0), dtype=torch.float16, divisor=2.0), SQUARE
    ),
}

EACH_TORCH = frozenset(
    {
        "a product beside others",
        "one that is stored transposed",
        "an embedding",
        "channels last",
        "sums that keep their dimension",
        "a product in another shape",
        "a part",
        "inputs",
        "convolutions",
        "one that is read after",
        "what comes from a bucket",
        "divided where stored",
        "divided in the bucket",
        "sent as bf16",
    }
)
"""Each reason for a copy, each kind of kernel that stores, and each place of a division. A check
compiles only these."""

AUTOTUNED = ("a product beside others", "an addition to what was there")


def lower(
    function: Callable[..., Any], inputs: Sequence[Tensor], settings: dict[str, Any]
) -> tuple[Callable[..., Any], str, list[dict[int, str]]]:
    """Trace and compile a function as Inductor does a backward; the cache is off, because nothing
    is generated on a hit.

    Returns:
        What is called with a list of tensors, its code, and for each bucket the reasons for copies.
    """
    copied: list[dict[int, str]] = []
    register_lowerings(lambda _, reasons: copied.append(dict(reasons)))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = [mode.from_tensor(tensor) for tensor in inputs]
        module = make_fx(function, decomposition_table=select_decomp_table())(*fake)
    try:
        with torch._inductor.config.patch(fx_graph_cache=False, **settings):
            compiled, codes = run_and_get_code(lambda: compile_fx_inner(module, fake))
    finally:
        register_lowerings(compile_log.packed)
    return compiled, codes[-1], copied


def run_cases(names: Sequence[str], settings: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Compile cases and run them; a job for ranks.

    Returns:
        For each case: the outputs that differ from eager torch's, what was copied, and how often
        the generated code calls the operator that copies several.
    """
    results = {}
    for name in names:
        case = CASES[name]
        generator = torch.Generator().manual_seed(dist.get_rank())
        # Integers: nothing is rounded, whatever the order of sums.
        inputs = [torch.randint(-4, 5, s, generator=generator).float() for s in case.shapes]
        compiled, code, copied = lower(case.function, inputs, settings)
        expected = case.function(*inputs)
        actual = compiled([*inputs])
        results[name] = {
            "different": [
                index
                for index, (ours, theirs) in enumerate(zip(actual, expected, strict=True))
                if ours.stride() != theirs.stride() or not torch.allclose(ours, theirs, rtol=1e-6)
            ],
            "copied": copied,
            "stores": code.count("fusion_passes.store_"),
        }
    return results


@pytest.fixture(scope="module")
def results_of(run_on_ranks: RUN) -> Callable[[bool], RESULTS]:
    """The results of the cases for each torch, or of the others, from one job each."""

    # Not a parameter of the fixture: pytest would run it again for each set of several arguments.
    @functools.cache
    def run(is_for_each: bool) -> RESULTS:
        names = [name for name in CASES if (name in EACH_TORCH) == is_for_each]
        return run_on_ranks(2, run_cases, names=names, settings={})

    return run


@pytest.mark.xdist_group("lowered")  # One job runs all cases of a kind.
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name, marks=pytest.mark.each_torch if name in EACH_TORCH else pytest.mark.nightly
        )
        for name in CASES
    ],
)
def test_lowered_is_what_eager_torch_gives(
    results_of: Callable[[bool], RESULTS], name: str
) -> None:
    case = CASES[name]
    for rank in results_of(name in EACH_TORCH):
        assert rank[name]["different"] == []
        assert rank[name]["copied"] == list(case.copied)
        assert rank[name]["stores"] == case.stores


def test_lowered_with_max_autotune(run_on_ranks: RUN) -> None:
    """Then kernels are chosen among several, which fix the layouts of their results."""
    results = run_on_ranks(2, run_cases, names=AUTOTUNED, settings={"max_autotune": True})
    for rank in results:
        for name in AUTOTUNED:
            assert rank[name] == {"different": [], "copied": [{}], "stores": 0}, name
