"""What dividing and multiplying by a number means, wherever it is done."""

from __future__ import annotations

import pytest
import torch

from fusion_passes.graph.scaling import (
    NO_SCALING,
    Scaling,
    ScalingKind,
    scaled,
    scaled_together,
    store_scaled,
)

ONE, TWO = torch.tensor([3.0]), torch.tensor([5.0, 7.0])


def test_nothing_to_scale_by_gives_the_tensors_themselves() -> None:
    assert scaled(ONE, "none", 2.0) is ONE
    one, two = scaled_together([ONE, TWO], NO_SCALING)
    assert one is ONE
    assert two is TWO


@pytest.mark.parametrize("value", [1e20, 2.0**-70, 3.0])
@pytest.mark.parametrize("kind", ["div", "mul"])
def test_scaling_is_that_of_the_graph_for_any_number(kind: ScalingKind, value: float) -> None:
    operation = torch.div if kind == "div" else torch.mul
    expected = [operation(tensor, value) for tensor in (ONE, TWO)]
    assert torch.equal(scaled(TWO, kind, value), expected[1])
    for count in (1, 2):
        actual = scaled_together([ONE, TWO][:count], Scaling(kind, value))
        assert len(actual) == count
        assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=False))
    place = torch.empty(2)
    store_scaled(place, TWO, kind, value)
    assert torch.equal(place, expected[1])


def test_what_is_stored_in_another_dtype_is_scaled_in_its_own() -> None:
    place = torch.empty(1, dtype=torch.float16)
    store_scaled(place, torch.tensor([2.0**17]), "div", 4.0)
    assert place.item() == 2.0**15, "which fp16 has, and 2**17 it has not"


@pytest.mark.parametrize(
    ("scaling", "text"),
    [(NO_SCALING, ""), (Scaling("div", 4), " / 4"), (Scaling("mul", 0.5), " * 0.5")],
)
def test_a_scaling_says_what_it_does(scaling: Scaling, text: str) -> None:
    assert str(scaling) == text


@pytest.mark.parametrize("kind", ["sub", ""])
def test_no_other_kind_passes_for_one(kind: str) -> None:
    with pytest.raises(KeyError):
        scaled(ONE, kind, 2.0)
