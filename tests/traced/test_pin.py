# ruff: noqa: E501  (a golden has one line a node)
"""The order of launches, kernels and waits as dependencies."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline

from tests.support.graphs import (
    Backward,
    RewriteFor,
    chain,
    check,
    coalesced,
    concat,
    pin,
    place,
    reduce,
    tensor,
)

_aten = torch.ops.aten


def _pinned(function: Backward, *rewrites: RewriteFor, runs_twice: bool = True) -> str:
    """Lines that say which nodes are pinned, and after which."""
    inputs = [tensor(2, 2)]
    text = check(function, inputs, chain(*rewrites, place(), pin()), runs_twice=runs_twice)
    return "".join(f"{line}\n" for line in text.splitlines() if " = control_deps(" in line)


def test_a_kernel_follows_the_launch_and_the_wait_follows_both() -> None:
    def backward(x, y):
        return reduce(torch.mm(x, y), "a"), torch.mm(y, x)

    assert_expected_inline(
        check(backward, [tensor(2, 2), tensor(2, 2)], chain(place(), pin())),
        """\
x_1: f32[2, 2]
y_1: f32[2, 2]
mm: f32[2, 2] = mm(x_1, y_1)
div: f32[2, 2] = div(mm, 2)
all_reduce: f32[2, 2] = all_reduce(div, 'sum', 'ddp0#a')
pinned_mm_1: ? = pinned_mm_1()
pinned_mm_2: f32[2, 2] = control_deps((all_reduce), pinned_mm_1, y_1, x_1)
pinned_wait_tensor: ? = pinned_wait_tensor()
pinned_wait_tensor_1: f32[2, 2] = control_deps((all_reduce, pinned_mm_2), pinned_wait_tensor, all_reduce)
return (pinned_wait_tensor_1, pinned_mm_2)
""",
    )


def test_a_kernel_that_reads_two_results_of_one_launch_follows_both_waits() -> None:
    """The second wait is pinned together with the first, and is no longer a node that a kernel
    could follow."""

    def backward(x):
        return torch.mm(reduce(x, "a"), reduce(torch.neg(x), "b"))

    text = check(backward, [tensor(2, 2)], chain(coalesced(), pin()))
    assert (
        "pinned_mm_1: f32[2, 2] = control_deps((getitem), pinned_mm, getitem_2, getitem_3)" in text
    )


def test_one_kernel_can_follow_several_launches() -> None:
    def backward(x):
        return reduce(x, "a"), reduce(torch.neg(x), "b"), torch.mm(x, x)

    assert_expected_inline(
        _pinned(backward, runs_twice=False),
        """\
pinned_mm_1: f32[2, 2] = control_deps((all_reduce, all_reduce_1), pinned_mm, x_1)
pinned_wait_tensor_1: f32[2, 2] = control_deps((all_reduce_1, pinned_mm_1), pinned_wait_tensor, all_reduce)
pinned_wait_tensor_3: f32[2, 2] = control_deps((all_reduce_1, pinned_mm_1), pinned_wait_tensor_2, all_reduce_1)
""",
    )


def test_only_the_first_kernel_behind_a_launch_is_bound_to_it() -> None:
    def backward(x):
        return reduce(x, "a"), torch.mm(x, torch.mm(x, x))

    assert_expected_inline(
        _pinned(backward),
        """\
pinned_mm_1: f32[2, 2] = control_deps((all_reduce), pinned_mm, x_1)
pinned_wait_tensor_1: f32[2, 2] = control_deps((all_reduce, mm_1), pinned_wait_tensor, all_reduce)
""",
    )


def test_what_a_pinned_kernel_reads_is_not_pinned_with_it() -> None:
    """Inductor computes the inputs of a node before it lowers the pinned node."""

    def backward(x):
        return reduce(x, "a"), torch.mm(torch.exp(x).t(), x)

    assert_expected_inline(
        _pinned(backward),
        """\
pinned_mm_1: f32[2, 2] = control_deps((all_reduce, t), pinned_mm, t, x_1)
pinned_wait_tensor_1: f32[2, 2] = control_deps((all_reduce, pinned_mm_1), pinned_wait_tensor, all_reduce)
""",
    )


def test_two_buckets_between_kernels() -> None:
    """Each kernel depends on the launches since the last kernel, each wait on the later of both."""

    def backward(x):
        first = reduce(torch.neg(x), "a", module="ddp2")
        one = torch.mm(x, x)
        second = reduce(torch.mm(one, x), "b")
        return first, second, torch.mm(one, one)

    assert_expected_inline(
        _pinned(backward, concat(), runs_twice=False),
        """\
pinned_mm_1: f32[2, 2] = control_deps((all_reduce_default), pinned_mm, x_1)
pinned_mm_3: f32[2, 2] = control_deps((all_reduce_default_1), pinned_mm_2, pinned_mm_1)
pinned_wait_tensor_default_1: f32[4] = control_deps((all_reduce_default_1, pinned_mm_3), pinned_wait_tensor_default, all_reduce_default)
pinned_wait_tensor_default_3: f32[4] = control_deps((all_reduce_default_1, pinned_mm_3), pinned_wait_tensor_default_2, all_reduce_default_1)
""",
    )


KERNELS: dict[str, Backward] = {
    "mm": torch.mm,
    "addmm": lambda x, y: torch.addmm(x, x, y),
    "bmm": lambda x, y: torch.bmm(_batch(x), _batch(y)),
    "baddbmm": lambda x, y: torch.baddbmm(_batch(x), _batch(x), _batch(y)),
    "convolution": lambda x, y: _aten.convolution.default(
        _batch(x), _batch(y), None, [1], [1], [1], False, [0], 1
    ),
}


def _batch(x: torch.Tensor) -> torch.Tensor:
    return _aten.reshape.default(x, [1, 4, 4]) if x.dim() == 2 else x


def _is_pinned(kernel: Backward) -> bool:
    def backward(x, y):
        return reduce(x, "a"), kernel(x, y)

    text = check(backward, [tensor(4, 4), tensor(4, 4)], chain(place(), pin()))
    return text.count(" = control_deps") == 2


@pytest.mark.parametrize("name", KERNELS)
def test_library_kernels_are_pinned(name: str) -> None:
    assert _is_pinned(KERNELS[name])


@pytest.mark.parametrize("operation", [torch.add, torch.mul, lambda x, y: torch.sum(x)])
def test_what_inductor_fuses_is_left_free(operation: Backward) -> None:
    assert not _is_pinned(operation)


@pytest.mark.parametrize(
    "view",
    [
        pytest.param(lambda g: g, id="itself"),
        pytest.param(lambda g: g.view(-1), id="reshape"),
        pytest.param(lambda g: g.unsqueeze(0), id="unsqueeze"),
        pytest.param(lambda g: g.unsqueeze(0).squeeze(0), id="squeeze"),
        pytest.param(lambda g: g.permute(1, 0).permute(1, 0), id="permute"),
    ],
)
def test_a_wait_does_not_name_the_kernel_whose_result_is_sent(view: Backward) -> None:
    """Otherwise Inductor would reduce a copy of it."""

    def backward(x):
        return reduce(view(torch.mm(x, x)), "a", divide=None)

    (wait,) = _pinned(backward, coalesced()).splitlines()
    assert "control_deps((getitem)" in wait
