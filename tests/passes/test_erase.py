"""What nothing reads goes; what does more than to compute stays."""

from __future__ import annotations

import torch
from expecttest import assert_expected_inline

from fusion_passes.graph.collectives import ALL_REDUCE
from fusion_passes.passes.erase import EraseDeadCode
from testing.graphs import RewriteFor, check, check_unchanged, groups_of, reduce, tensor


def _erase() -> RewriteFor:
    return lambda graph: EraseDeadCode(groups_of(graph))


def test_a_dead_reader_of_a_gradient() -> None:
    def backward(x, y):
        result = reduce(x, "a")
        torch.mul(torch.neg(result), torch.sin(y))
        return result

    assert_expected_inline(
        check(backward, [tensor(4), tensor(4)], _erase()),
        """\
x_1: f32[4]
y_1: f32[4]
div: f32[4] = div(x_1, 2)
all_reduce: f32[4] = all_reduce(div, 'sum', 'ddp0#a')
wait_tensor: f32[4] = wait_tensor(all_reduce)
sin: f32[4] = sin(y_1)
return wait_tensor
""",
    )


def test_writes_random_numbers_and_collectives_stay() -> None:
    def backward(x):
        torch.rand_like(x)
        ALL_REDUCE(x, "sum", "other")
        x.add_(1)
        return reduce(x, "a")

    check_unchanged(backward, [tensor(4)], _erase())


def test_dead_code_that_reads_no_gradient_stays() -> None:
    """Inductor may count on it."""

    def backward(x, y):
        torch.as_strided(torch.neg(y), [2], [1])
        return reduce(x, "a")

    check_unchanged(backward, [tensor(4), tensor(4)], _erase())


def test_a_dead_reader_of_what_a_gradient_is_a_view_of() -> None:
    """Else the kernel of ``neg`` could not store it in its bucket."""

    def backward(x):
        value = torch.neg(x)
        torch.sin(value)
        result = reduce(value.reshape(2, 2), "a")
        torch.cos(result.reshape(4))
        return result

    text = check(backward, [tensor(4)], _erase())
    assert "sin" not in text
    assert "cos" not in text
