"""Tensor code that is traced into a graph."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from fusion_passes.graph.edits import erase, pin, record, replace_uses
from fusion_passes.graph.text import graph_text
from tests.support.graphs import assert_same_numbers, execute, tensor, trace


def _calls(module: fx.GraphModule) -> list[fx.Node]:
    return [node for node in module.graph.nodes if node.op == "call_function"]


def test_what_a_function_does_becomes_nodes() -> None:
    module = trace(lambda x, y: (torch.neg(x), torch.neg(y)), [tensor(2, 3), tensor(4)])
    first, second = _calls(module)

    def function(tensors):
        pieces = torch.split(torch.cat([item.reshape(-1) for item in tensors]), [6, 4])
        return [pieces[0].view(3, 2), pieces[1] * 2]

    results = record(second, function, [first, module.graph.find_nodes(op="placeholder")[1]])
    assert_expected_inline(
        graph_text(module.graph),
        """\
x_1: f32[2, 3]
y_1: f32[4]
neg: f32[2, 3] = neg(x_1)
reshape_default: f32[6] = reshape(neg, [-1])
reshape_default_1: f32[4] = reshape(y_1, [-1])
cat_default: f32[10] = cat([reshape_default, reshape_default_1])
split_with_sizes_default: (f32[6], f32[4]) = split_with_sizes(cat_default, [6, 4])
getitem: f32[6] = getitem(split_with_sizes_default, 0)
getitem_1: f32[4] = getitem(split_with_sizes_default, 1)
reshape_default_2: f32[3, 2] = reshape(getitem, [3, 2])
mul_tensor: f32[4] = mul(getitem_1, 2)
neg_1: f32[4] = neg(y_1)
return (neg, neg_1)
""",
    )
    assert [node.name for node in results] == ["reshape_default_2", "mul_tensor"]
    assert len({first.meta["val"].fake_mode, *(n.meta["val"].fake_mode for n in results)}) == 1


@pytest.mark.parametrize("device", ["cpu", "cuda:1"])
def test_new_values_are_fake_and_on_the_device_of_the_inputs(device: str) -> None:
    module = trace(torch.neg, [tensor(4, device=device)])
    (neg,) = _calls(module)
    (result,) = record(neg, lambda tensors: [tensors[0] * 2], neg.all_input_nodes)
    value = result.meta["val"]
    assert isinstance(value, FakeTensor)
    assert value.device == torch.device(device)


def test_a_node_that_is_given_twice_is_one_tensor() -> None:
    module = trace(torch.neg, [tensor(4)])
    (neg,) = _calls(module)
    (result,) = record(neg, lambda tensors: [tensors[0] + tensors[1]], neg.all_input_nodes * 2)
    assert result.args == (neg.args[0], neg.args[0])


def test_two_nodes_with_one_value_stay_two() -> None:
    module = trace(lambda x: torch.neg(torch.abs(x)), [tensor(4)])
    absolute, neg = _calls(module)
    absolute.meta["val"] = neg.meta["val"]
    (new,) = record(module.graph.output_node(), lambda t: [t[0] + t[1]], [absolute, neg])
    assert new.args == (absolute, neg)


def test_a_result_can_be_an_input() -> None:
    module = trace(torch.neg, [tensor(4)])
    (neg,) = _calls(module)
    assert record(neg, lambda tensors: tensors, neg.all_input_nodes) == [neg.args[0]]


def test_uses_are_replaced_everywhere() -> None:
    def function(x, y):
        a, b = torch.neg(x), torch.abs(y)
        return torch.add(a, b), torch.cat([a, b]), torch.sub(a, b), [a, (b,)]

    module = trace(function, [tensor(4), tensor(4)])
    a, b, *_, by_name = _calls(module)
    by_name.args, by_name.kwargs = (), {"self": a, "other": b}
    x, y = module.graph.find_nodes(op="placeholder")
    replace_uses({a: x, b: y})
    assert (len(a.users), len(b.users)) == (0, 0)
    erase([a, b])
    assert_expected_inline(
        graph_text(module.graph),
        """\
x_1: f32[4]
y_1: f32[4]
add: f32[4] = add(x_1, y_1)
cat: f32[8] = cat([x_1, y_1])
sub: f32[4] = sub(self=x_1, other=y_1)
return (add, cat, sub, [x_1, (y_1)])
""",
    )


def test_what_is_pinned_behind_a_list_follows_its_first_item() -> None:
    """Torch 2.11 adds no dependency on a value that is not a tensor."""

    def function(x, y):
        product = torch.mm(x, x)
        low, high = torch.aminmax(y, dim=0)
        return product, high, low

    module = trace(function, [tensor(2, 2), tensor(2, 2)])
    numbers = execute(module)
    product, both = _calls(module)[:2]
    both.append(product)
    pin([product], [both])
    assert_expected_inline(
        graph_text(module.graph),
        """\
x_1: f32[2, 2]
y_1: f32[2, 2]
aminmax: (f32[2], f32[2]) = aminmax(y_1, dim=0)
getitem: f32[2] = getitem(aminmax, 0)
pinned_mm: ? = pinned_mm()
pinned_mm_1: f32[2, 2] = control_deps((getitem), pinned_mm, x_1)
getitem_1: f32[2] = getitem(aminmax, 1)
return (pinned_mm_1, getitem_1, getitem)
""",
    )
    module.graph.lint()
    assert_same_numbers(numbers, execute(module))


def test_sizes_that_were_traced_as_symbols_are_recorded_as_numbers() -> None:
    module = trace(torch.neg, [tensor(5, 4)], symbolic=True)
    (neg,) = _calls(module)

    def function(tensors):
        return [tensors[0].as_strided((tensors[0].numel(),), (1,))]

    (flat,) = record(neg, function, neg.all_input_nodes)
    assert flat.args == (neg.args[0], [20], [1])
