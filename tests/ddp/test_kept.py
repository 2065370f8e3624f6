"""Which gradients that there are already can be added to what a compiled backward sends."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fusion_passes.ddp.kept import obstacle_in_kept


def _with(gradient: Tensor | None, shape: tuple[int, ...] = (2, 3)) -> nn.Parameter:
    parameter = nn.Parameter(torch.ones(shape))
    parameter.grad_dtype = None  # So that torch takes a gradient of another dtype.
    parameter.grad = gradient
    return parameter


CAN: dict[str, Tensor | None] = {
    "none": None,
    "zeros": torch.zeros(2, 3),
    "another layout": torch.ones(3, 2).t(),
    "part of a buffer": torch.ones(12)[3:9].view(2, 3),
}
CANNOT: dict[str, Tensor] = {
    "sparse": torch.eye(2, 3).to_sparse(),
    "in an autograd graph": torch.ones(2, 3, requires_grad=True) * 2,
    "expanded": torch.ones(1, 1).expand(2, 3),
    "with gaps": torch.ones(2, 6)[:, ::2],
    "another dtype": torch.ones(2, 3, dtype=torch.float64),
    "a subclass": nn.Parameter(torch.ones(2, 3), requires_grad=False),
}


@pytest.mark.parametrize("name", CAN)
def test_what_lies_like_a_gradient_can(name: str) -> None:
    assert obstacle_in_kept([_with(CAN[name]), _with(None)]) == ""


@pytest.mark.parametrize("name", CANNOT)
def test_what_is_of_another_kind_cannot(name: str) -> None:
    assert "differ in kind" in obstacle_in_kept([_with(torch.zeros(2, 3)), _with(CANNOT[name])])


def test_one_tensor_for_two_parameters_cannot() -> None:
    shared = torch.zeros(2, 3)
    assert "differ in kind" in obstacle_in_kept([_with(shared), _with(shared)])
