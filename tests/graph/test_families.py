"""The families of operators that a gradient passes through; none is missing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
import torch._dynamo
import torch._inductor.config as inductor_config
from torch import Tensor, fx
from torch._dynamo.exc import BackendCompilerFailed
from torch._inductor.custom_graph_pass import CustomGraphPass

from fusion_passes.graph.families import (
    CAST,
    CASTS,
    COMPLEX_VIEWS,
    COPY,
    DIVISIONS,
    DIVISIONS_OF_LISTS,
    ITEMS,
    PERMUTES,
    PLACES,
    RELAYOUTS,
    RESHAPES,
    VIEWS,
)

_aten = torch.ops.aten

FORMS: Final[dict[str, Callable[[Tensor], Any]]] = {
    "view": lambda x: x.view(-1),
    "_unsafe_view": lambda x: _aten._unsafe_view(x, [16]),
    "_reshape_alias": lambda x: _aten._reshape_alias(x, [16], [1]),
    "view_copy": lambda x: _aten.view_copy(x, [16]),
    "flatten": lambda x: x.flatten(),
    "unflatten": lambda x: x.unflatten(0, (2, 2)),
    "view_as": lambda x: x.view_as(torch.empty(2, 8)),
    "squeeze": lambda x: x.view(4, 1, 4).squeeze(),
    "squeeze.dim": lambda x: x.view(4, 1, 4).squeeze(1),
    "squeeze.dims": lambda x: x.view(4, 1, 4, 1).squeeze((1, 3)),
    "unsqueeze": lambda x: x.unsqueeze(0),
    "permute": lambda x: x.permute(1, 0),
    "t": lambda x: x.t(),
    "transpose": lambda x: x.transpose(0, 1),
    "swapaxes": lambda x: x.swapaxes(0, 1),
    "movedim": lambda x: x.movedim(0, 1),
    "mT": lambda x: x.mT,
    "adjoint": lambda x: x.adjoint(),
    "alias": _aten.alias,
    "detach": lambda x: x.detach(),
    "lift_fresh": _aten.lift_fresh,
    "as_strided": lambda x: x.as_strided((2, 4), (4, 1)),
    "contiguous": lambda x: x.t().contiguous(),
    "channels last": lambda x: x.view(1, 2, 4, 2).to(memory_format=torch.channels_last),
    "copy": lambda x: _aten.copy(torch.empty_strided((4, 4), (1, 4)), x),
    "to": lambda x: x.to(torch.bfloat16),
    "_to_copy": lambda x: _aten._to_copy(x, dtype=torch.float64),
    "type_as": lambda x: x.type_as(torch.empty(1, dtype=torch.float64)),
    "div": lambda x: x / 2,
    "div_": lambda x: x.clone().div_(2),
    "div.Scalar": lambda x: _aten.div.Scalar(x, 2),
    "_foreach_div": lambda x: torch._foreach_div([x, x + 1], 2)[0],
    "view_as_complex": lambda x: torch.view_as_complex(x.view(4, 2, 2)),
    "view_as_real": lambda x: torch.view_as_real(torch.complex(x, x)),
}
"""All ways in which torch's Python and its backward formulas write operators that pass a gradient
through."""

OTHERS: Final = ("mm", "add", "complex", "empty_strided")
"""Other operators in the graph of :data:`FORMS`."""


class _SeenError(Exception):
    """Ends a compile once its post-grad graph is recorded."""


class _See(CustomGraphPass):
    def __init__(self) -> None:
        self.targets: set[Any] = set()

    def __call__(self, graph: fx.Graph) -> None:
        self.targets |= {node.target for node in graph.nodes if node.op == "call_function"}
        raise _SeenError

    def uuid(self) -> None:
        return None


def test_whatever_inductor_leaves_of_them_is_in_a_family() -> None:
    see = _See()

    @torch.compile
    def backward(x: Tensor) -> list[Any]:
        return [form(torch.mm(x, x)) for form in FORMS.values()]

    with (
        inductor_config.patch(post_grad_custom_post_pass=see),
        pytest.raises((BackendCompilerFailed, _SeenError)),
    ):
        backward(torch.ones(4, 4))
    known = VIEWS | RELAYOUTS | CASTS | DIVISIONS | DIVISIONS_OF_LISTS | ITEMS
    left = {str(target) for target in see.targets - known}
    assert {name.split(".")[1] for name in left} <= set(OTHERS)
    assert len(see.targets & known) > 10, "the pass has seen a graph"


# --- What the families promise -----------------------------------------------------------------

ONE: Final = torch.arange(12.0).view(3, 1, 4)
COMPLEX: Final = torch.view_as_complex(torch.arange(12.0).view(3, 2, 2))

CALLS: Final[dict[object, tuple[Any, ...]]] = {
    _aten.view.default: (ONE, [12]),
    _aten._unsafe_view.default: (ONE, [12]),
    _aten.reshape.default: (ONE, [12]),
    _aten.squeeze.default: (ONE,),
    _aten.squeeze.dim: (ONE, 1),
    _aten.squeeze.dims: (ONE, [1]),
    _aten.unsqueeze.default: (ONE, 0),
    _aten.permute.default: (ONE, [2, 1, 0]),
    _aten.view_as_real.default: (COMPLEX,),
    _aten.view_as_complex.default: (ONE.view(3, 2, 2),),
    _aten.as_strided.default: (ONE, [2, 3], [3, 1], 2),
    _aten.clone.default: (ONE,),
    COPY: (torch.empty_strided((3, 1, 4), (1, 3, 3)), ONE),
    CAST: (ONE, torch.bfloat16),
    _aten.div.Tensor: (ONE, 2),
    _aten.div.Scalar: (ONE, 2),
}
"""A call of each operator of a family."""


def _value(call: tuple[Any, ...]) -> Tensor:
    """The tensor that passes through: the last tensor of the call."""
    value: Tensor = [argument for argument in call if isinstance(argument, Tensor)][-1]
    return value


def _numbers(value: Tensor) -> list[float]:
    real = torch.view_as_real(value) if value.is_complex() else value
    return real.double().flatten().tolist()


def _calls(family: frozenset[object]) -> list[tuple[Tensor, Tensor]]:
    """Input and result of each operator of a family."""
    return [(_value(CALLS[target]), target(*CALLS[target])) for target in family]  # type: ignore[operator]


def test_elements_keep_their_order() -> None:
    for value, result in _calls(RESHAPES | COMPLEX_VIEWS | RELAYOUTS | CASTS):
        assert _numbers(result) == _numbers(value)


def test_permuted_elements_are_the_same_in_another_order() -> None:
    for value, result in _calls(PERMUTES):
        assert _numbers(result) != _numbers(value)
        assert sorted(_numbers(result)) == sorted(_numbers(value))


def test_a_place_holds_some_of_the_elements() -> None:
    for value, result in _calls(PLACES):
        assert _numbers(result) == _numbers(value)[2:8]


def test_views_share_their_memory_and_nothing_else_does() -> None:
    for value, result in _calls(VIEWS):
        assert result.untyped_storage().data_ptr() == value.untyped_storage().data_ptr()
    for value, result in _calls(RELAYOUTS | CASTS | DIVISIONS):
        assert result.untyped_storage().data_ptr() != value.untyped_storage().data_ptr()


def test_divisions_divide_each_element() -> None:
    for value, result in _calls(DIVISIONS):
        assert _numbers(result) == [number / 2 for number in _numbers(value)]
    for target in DIVISIONS_OF_LISTS:
        one, other = target([ONE, ONE + 1], 2)  # type: ignore[operator]
        assert _numbers(other - one) == [0.5] * 12
