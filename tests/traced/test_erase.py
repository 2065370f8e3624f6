"""Dead nodes are erased, unless they have a side effect."""

from __future__ import annotations

import torch
from expecttest import assert_expected_inline
from torch import fx

from fusion_passes.graph.collectives import ALL_REDUCE
from fusion_passes.traced.erase import EraseDeadCode
from tests.support.graphs import check, check_unchanged, reduce, tensor


def _erase(graph: fx.Graph) -> EraseDeadCode:
    del graph
    return EraseDeadCode()


def test_a_dead_reader_of_a_gradient() -> None:
    def backward(x, y):
        result = reduce(x, "a")
        torch.mul(torch.neg(result), torch.sin(y))
        return result

    assert_expected_inline(
        check(backward, [tensor(4), tensor(4)], _erase),
        """\
x_1: f32[4]
y_1: f32[4]
div: f32[4] = div(x_1, 2)
all_reduce: f32[4] = all_reduce(div, 'sum', 'ddp0#a')
wait_tensor: f32[4] = wait_tensor(all_reduce)
return wait_tensor
""",
    )


def test_writes_random_numbers_and_collectives_stay() -> None:
    def backward(x):
        torch.rand_like(x)
        ALL_REDUCE(x, "sum", "other")
        x.add_(1)
        return reduce(x, "a")

    check_unchanged(backward, [tensor(4)], _erase)


def test_a_dead_reader_of_what_a_gradient_is_a_view_of() -> None:
    """Otherwise the kernel of ``neg`` could not store it in its bucket."""

    def backward(x):
        value = torch.neg(x)
        torch.sin(value)
        result = reduce(value.reshape(2, 2), "a")
        torch.cos(result.reshape(4))
        return result

    text = check(backward, [tensor(4)], _erase)
    assert "sin" not in text
    assert "cos" not in text
