"""What a graph sends beside the gradients that it has: flags, and zeros for what it lacks."""

from __future__ import annotations

import torch
from expecttest import assert_expected_inline
from torch import fx

from fusion_passes.graph.text import graph_text
from fusion_passes.reductions.unused import Sent, SentBeside, send_beside
from testing.graphs import Backward, concat, find, owner_of, reduce, tensor, trace

FP32, FP16 = torch.float32, torch.float16


def beside(
    reached: frozenset[int] | None = frozenset({0}),
    absent: tuple[int, ...] = (0, 1),
    reduce_dtype: torch.dtype = FP32,
) -> SentBeside:
    """Of a module of three trained parameters, a, b and c, of four elements each. Flags are one
    more than parameters."""
    names = {0: "ddp0#a", 1: "ddp0#b", 2: "ddp0#c"}
    sent = {number: Sent(names[number], (4,), FP32, reduce_dtype, 2) for number in absent}
    flags = Sent("ddp0#d", (4,), FP32, reduce_dtype, 2)
    return SentBeside((0, 1, 2), flags, reached, sent)


def a_alone(x):
    return reduce(torch.neg(x), "a")


def sent(what: SentBeside | None, function: Backward = a_alone) -> fx.Graph:
    module = trace(function, [tensor(4)])
    send_beside(module.graph, lambda _: what, owner_of)
    module.graph.lint()
    return module.graph


def test_flags_and_zeros() -> None:
    assert_expected_inline(
        graph_text(sent(beside())),
        """\
x_1: f32[4]
neg: f32[4] = neg(x_1)
full_default: f32[1] = full([1], 1.0, dtype=torch.float32, device=cpu)
full_default_1: f32[3] = full([3], 0.0, dtype=torch.float32, device=cpu)
cat_default: f32[4] = cat([full_default, full_default_1])
div_tensor: f32[4] = div(cat_default, 2)
all_reduce_default: f32[4] = all_reduce(div_tensor, 'sum', 'ddp0#d')
wait_tensor_default: f32[4] = wait_tensor(all_reduce_default)
full_default_2: f32[4] = full([4], 0.0, dtype=torch.float32, device=cpu)
div_tensor_1: f32[4] = div(full_default_2, 2)
all_reduce_default_1: f32[4] = all_reduce(div_tensor_1, 'sum', 'ddp0#b')
wait_tensor_default_1: f32[4] = wait_tensor(all_reduce_default_1)
div: f32[4] = div(neg, 2)
all_reduce: f32[4] = all_reduce(div, 'sum', 'ddp0#a')
wait_tensor: f32[4] = wait_tensor(all_reduce)
gt_scalar: b8[4] = gt(wait_tensor_default, 0)
deliver__default: ? = deliver_(gt_scalar, [wait_tensor_default_1], 'ddp0', [1])
return wait_tensor
""",
    )


def test_they_share_the_gradients_bucket() -> None:
    graph = sent(beside())
    assert concat()(graph)(graph)
    text = graph_text(graph)
    assert text.count("= all_reduce(") == 1
    assert "pack_default: f32[12]" in text


def test_nothing_is_added_where_all_ranks_use_all_parameters() -> None:
    assert graph_text(sent(None)) == graph_text(trace(a_alone, [tensor(4)]).graph)


def test_no_zeros_where_a_part_of_the_backward_is_in_another_graph() -> None:
    graph = sent(beside(reached=frozenset({0, 1})))
    assert [reduction.owner.parameter for reduction in find(graph).reductions] == ["d", "a"]


def test_no_zeros_where_nobody_knows_what_a_backward_reaches() -> None:
    graph = sent(beside(reached=None))
    assert [reduction.owner.parameter for reduction in find(graph).reductions] == ["d", "a"]


def test_nothing_is_delivered_where_all_parameters_have_a_gradient() -> None:
    def backward(x):
        return [reduce(torch.neg(x), name) for name in "abc"]

    text = graph_text(sent(beside(frozenset({0, 1, 2})), backward))
    assert "deliver_" not in text
    assert text.count("= all_reduce(") == 4


def test_in_the_dtype_of_a_hook() -> None:
    graph = sent(beside(reduce_dtype=FP16))
    keys = {r.owner.parameter: r.key for r in find(graph).reductions}
    assert keys["b"].dtype == keys["d"].dtype == FP32
    assert keys["b"].reduce_dtype == keys["d"].reduce_dtype == FP16
