"""Launches are early, and waits are late; where they are, and the texts about it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from fusion_passes.graph.collectives import ALL_REDUCE, all_reduce, is_launch
from fusion_passes.traced.place import Placement, placements_of
from tests.support.graphs import (
    Backward,
    RewriteFor,
    TensorSpec,
    cast,
    chain,
    check,
    coalesced,
    concat,
    groups_of,
    place,
    reduce,
    reduce_into,
    tensor,
    trace,
)

_aten = torch.ops.aten


def _placed(
    function: Backward, *inputs: TensorSpec, rewrite: RewriteFor | None = None
) -> list[str]:
    """Names of the nodes in the order after one or several passes."""
    text = check(function, list(inputs), rewrite or place())
    return [line.split(":")[0] for line in text.splitlines() if "=" in line]


def test_a_wait_goes_to_the_end_where_only_the_output_reads_it() -> None:
    def backward(x, y):
        return reduce(torch.mm(x, y), "a"), torch.mm(y, x)

    order = _placed(backward, tensor(2, 2), tensor(2, 2))
    assert order == ["mm", "div", "all_reduce", "mm_1", "wait_tensor"]


def test_a_wait_goes_to_its_first_user_and_no_farther() -> None:
    def backward(x, y):
        a = reduce(x, "a")
        before = torch.neg(y)
        user = torch.add(a, before)
        return user, torch.sin(y)

    order = _placed(backward, tensor(4), tensor(4))
    assert order == ["div", "all_reduce", "neg", "wait_tensor", "add", "sin"]


def test_a_launch_goes_to_its_gradient() -> None:
    def backward(x, y):
        gradient = torch.neg(x)
        between = torch.sin(y)
        return between, reduce(gradient, "a"), torch.cos(y)

    order = _placed(backward, tensor(4), tensor(4))
    assert order == ["neg", "div", "all_reduce", "sin", "cos", "wait_tensor"]


@pytest.mark.parametrize(
    ("fuse", "launch", "waits"),
    [
        (
            concat,
            ("pack_default", "all_reduce_default", "mm", "mm_1"),
            ("wait_tensor_default", "as_strided_default", "as_strided_default_1"),
        ),
        (
            coalesced,
            ("all_reduce_coalesced_default", "mm", "getitem", "getitem_1", "mm_1"),
            ("wait_tensor_default", "wait_tensor_default_1"),
        ),
    ],
)
def test_a_bucket_goes_with_its_launch(
    fuse: Callable[[], RewriteFor], launch: tuple[str, ...], waits: tuple[str, ...]
) -> None:
    def backward(x, y):
        gradients = torch.neg(x), torch.abs(y)
        between = torch.mm(x, x)
        return reduce(gradients[0], "a"), between, reduce(gradients[1], "b"), torch.mm(x, between)

    order = _placed(backward, tensor(2, 2), tensor(4), rewrite=chain(fuse(), place()))
    assert order == ["neg", "abs_1", *launch, *waits]


def test_a_copy_into_grad_goes_behind_the_last_compute() -> None:
    def backward(x, grad):
        result = reduce(torch.add(grad, x), "a")
        other = torch.sin(x)
        grad.copy_(result)
        return torch.cos(other)

    order = _placed(backward, tensor(4), tensor(4))
    assert order.index("sin") < order.index("wait_tensor") < order.index("copy_")


@pytest.mark.parametrize(
    "view",
    [
        pytest.param(lambda g: g.unsqueeze(0), id="unsqueeze"),
        pytest.param(lambda g: g.squeeze(1), id="squeeze"),
        pytest.param(lambda g: _aten.squeeze.dims(g, [1]), id="squeeze.dims"),
        pytest.param(lambda g: g.view(-1), id="reshape"),
        pytest.param(lambda g: g.permute(1, 0), id="permute"),
        pytest.param(lambda g: cast(g, torch.bfloat16), id="cast"),
    ],
)
def test_a_view_or_cast_before_the_launch_goes_with_it(view: Backward) -> None:
    """A weight that its layer views in another shape has a gradient that is a view."""

    def backward(x, y):
        gradient = torch.neg(x)
        between = torch.sin(y)
        return between, reduce(view(gradient), "a")

    order = _placed(backward, tensor(4, 1), tensor(4))
    assert order.index("all_reduce") < order.index("sin")


@pytest.mark.parametrize(
    "form",
    [
        pytest.param(lambda g, name: cast(reduce(g, name), torch.bfloat16), id="cast"),
        pytest.param(lambda g, name: reduce(g, name).unsqueeze(0), id="unsqueeze"),
        pytest.param(lambda g, name: reduce(g, name).squeeze(), id="squeeze"),
        pytest.param(lambda g, name: _aten.div.Scalar(reduce(g, name), 2), id="div.Scalar"),
        pytest.param(
            lambda g, name: torch.view_as_real(reduce(torch.complex(g, g), name)), id="as real"
        ),
    ],
)
def test_what_merely_follows_a_wait_does_not_hold_it_back(form: Backward) -> None:
    """A change of shape, dtype or scale that only the output reads can be as late as the output."""

    def backward(x, y):
        return form(torch.neg(x), "a"), torch.mm(y, y)

    order = _placed(backward, tensor(2, 3, stride=(1, 2)), tensor(2, 2))
    assert order.index("mm") < order.index("wait_tensor")


def test_coalesced_results_that_are_scaled_together_do_not_hold_back_their_waits() -> None:
    """Gradients that are sent as bf16 are scaled in their exact dtype: after the wait, by one
    operator."""

    def backward(x, y):
        first, second = cast(x, torch.float32), cast(y, torch.float32)
        return reduce(first, "a"), reduce(second, "b"), torch.mm(y, y)

    sent = coalesced(reduce_dtype=torch.bfloat16)
    small = tensor(2, 2, dtype=torch.bfloat16)  # Nothing is rounded.
    order = _placed(backward, small, small, rewrite=chain(sent, place()))
    assert order.index("mm") < order.index("wait_tensor_default")
    assert order.index("wait_tensor_default_1") < order.index("_foreach_div_scalar")


def test_results_that_are_scaled_together_with_others_are_waited_for_before() -> None:
    def backward(x, y):
        first, _ = torch._foreach_div([reduce(torch.neg(x), "a"), y], 2)
        return first, torch.mm(y, y)

    order = _placed(backward, tensor(2, 2), tensor(2, 2))
    assert order.index("wait_tensor") < order.index("_foreach_div") < order.index("mm")


# --- What does not move ------------------------------------------------------------------------


def test_a_gradient_that_is_computed_like_a_scaling_stays() -> None:
    """It has two tensor inputs: if it moved to the launch, it would keep both alive."""

    def backward(x, y):
        first, second = torch.abs(x), torch.abs(y)
        gradient = torch.div(first, second)
        between = torch.mm(x, y)
        late = torch.mm(between, y)
        return reduce(gradient, "a"), reduce(late, "b")

    order = _placed(backward, tensor(2, 2), tensor(2, 2), rewrite=chain(concat(), place()))
    assert order.index("div") < order.index("mm")


def test_a_kernel_with_several_gradients_stays() -> None:
    def backward(x, y):
        one, other = _aten.split_with_sizes.default(torch.neg(x), [2, 2])
        between = torch.sin(y)
        return reduce(one, "a"), between, reduce(other, "b")

    check(backward, [tensor(4), tensor(4)], chain(concat(), place()))


# --- The order of launches on a process group --------------------------------------------------


@pytest.mark.parametrize(
    ("first", "early_module", "issued"),
    [
        pytest.param(
            lambda x: reduce(x, "a"), "ddp1", ["ddp0#a", "ddp1#b"], id="modules on one group"
        ),
        pytest.param(
            lambda x: reduce(x, "a"), "ddp2", ["ddp2#b", "ddp0#a"], id="modules on two groups"
        ),
        pytest.param(
            lambda x: all_reduce(x, "max", "world"), "ddp0", ["world", "ddp0#b"], id="others on it"
        ),
        pytest.param(
            lambda x: all_reduce(x, "max", "other"), "ddp0", ["ddp0#b", "other"], id="elsewhere"
        ),
    ],
)
def test_launches_on_one_group_keep_their_order(
    first: Backward, early_module: str, issued: list[str]
) -> None:
    """The second launch's gradient is ready first. Launches of others keep their place too."""

    def backward(x):
        early = torch.neg(x)
        return first(torch.sin(x)), reduce(early, "b", module=early_module)

    check(backward, [tensor(4)], place())
    graph = trace(backward, [tensor(4)]).graph
    place()(graph)(graph)
    launches = filter(is_launch, graph.find_nodes(op="call_function", target=ALL_REDUCE))
    assert [launch.args[2] for launch in launches] == issued


def test_a_write_keeps_its_order_to_the_reads_around_it() -> None:
    def backward(x, grad):
        before = torch.neg(grad)
        reduce_into(grad, x, "a")
        return before, torch.sin(grad)

    order = _placed(backward, tensor(4), tensor(4))
    assert order.index("neg") < order.index("copy_") < order.index("sin")


def test_a_gradient_that_is_not_divided() -> None:
    def backward(x, y):
        return torch.sin(y), reduce(x, "a", divide=None)

    assert _placed(backward, tensor(4), tensor(4)) == ["all_reduce", "sin", "wait_tensor"]


# --- What is said about it -----------------------------------------------------------------------


def _placements(function: Backward, *inputs: TensorSpec) -> tuple[Placement, ...]:
    graph = trace(function, list(inputs)).graph
    concat()(graph)(graph)
    launches = groups_of(graph).launches_in(graph)
    place()(graph)(graph)
    return placements_of(graph, launches)


def test_what_only_the_output_reads_is_waited_for_at_the_end() -> None:
    def backward(x, y):
        return reduce(torch.mm(x, y), "a"), torch.mm(y, x)

    (placement,) = _placements(backward, tensor(2, 2), tensor(2, 2))
    assert placement.why_waited() == "at the end"
    assert (placement.overlapped, placement.following) == (1, 1)


def test_what_the_graph_reads_is_waited_for_early() -> None:
    def backward(x, y):
        a = reduce(torch.mm(x, y), "a")
        used = torch.sin(torch.mm(y, x) + a)
        return a, torch.mm(torch.mm(used, x), y)

    (placement,) = _placements(backward, tensor(2, 2), tensor(2, 2))
    assert placement.why_waited() == (
        "early, because add (aten.add.Tensor) reads it: "
        "1 of the 3 library kernels after its launch run before"
    )


def test_the_first_of_several_readers_counts() -> None:
    def backward(x, y):
        a, b = reduce(torch.neg(x), "a"), reduce(torch.sin(x), "b")
        first = torch.mm(b, y)
        return torch.mm(first, a), torch.mm(first, first)

    (placement,) = _placements(backward, tensor(2, 2), tensor(2, 2))
    assert placement.reader is not None
    assert placement.reader.name == "mm"
    assert (placement.overlapped, placement.following) == (0, 3)


def test_a_collective_of_its_group_can_hold_a_launch_back() -> None:
    """Both are in the queue of one process group, whose order is kept."""

    def backward(x, y):
        early, late = torch.neg(x), torch.mm(x, y)
        return reduce(late, "a", module="ddp0"), reduce(early, "b", module="ddp1")

    first, second = _placements(backward, tensor(2, 2), tensor(2, 2))
    assert (first.following, second.following) == (0, 0), "behind the product"
