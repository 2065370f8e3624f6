"""What compiled autograd cannot trace by itself: a backward that fixes a size which
``torch._dynamo.mark_dynamic`` has marked, one that has saved a number of the program, hooks that
break its graph, nested tensors, and the derivative of a backward."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch._dynamo
import torch._functorch.config
import torch._inductor.config as inductor_config
from torch import Tensor, nn
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._dynamo.external_utils import call_hook
from torch._inductor.output_code import CompiledFxGraph
from torch._inductor.utils import fresh_cache
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import fusion_passes
from fusion_passes import FusionConfig, FusionWarning
from testing.fake_world import one_rank, without_kernels

pytestmark = pytest.mark.each_torch


def _model() -> nn.Module:
    """Its backward, traced, fixes the size of a batch."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))


def _train(flag: FusionConfig | None) -> list[Tensor | None]:
    """The gradients of three steps, of which the last two have another batch size."""
    torch._dynamo.reset()
    gradients: list[Tensor | None] = []
    with inductor_config.patch(ddp_fusion=flag), one_rank():
        ddp = DistributedDataParallel(_model())
        model = torch.compile(ddp) if flag else ddp
        for size in (3, 5, 5):
            x = torch.arange(4.0 * size).view(size, 4) / 8
            torch._dynamo.mark_dynamic(x, 0)
            torch._dynamo.maybe_mark_dynamic(x, 1)
            ddp.zero_grad()
            loss = model(x).square().mean()
            marks = {name: set(value) for name, value in vars(x).items() if "indices" in name}
            loss.backward()
            assert {name: vars(x)[name] for name in marks} == marks
            gradients += [parameter.grad for parameter in ddp.parameters()]
    return gradients


def test_a_traced_backward_may_fix_them() -> None:
    flag = FusionConfig(backward_graph="compiled_autograd")
    with warnings.catch_warnings():
        warnings.simplefilter("error", FusionWarning)
        torch.testing.assert_close(_train(flag), _train(None))


def test_a_mark_is_there_again_after_an_error() -> None:
    flag = FusionConfig(backward_graph="compiled_autograd")
    torch._dynamo.reset()
    with inductor_config.patch(ddp_fusion=flag), one_rank(), without_kernels():
        ddp = DistributedDataParallel(_model())
        x = torch.ones(3, 4)
        torch._dynamo.mark_dynamic(x, 0)
        out = torch.compile(ddp)(x)
        next(ddp.parameters()).register_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            out.sum().backward()
        assert x._dynamo_dynamic_indices == {0}  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "kind", ["on the gradient", pytest.param("after accumulation", marks=pytest.mark.nightly)]
)
def test_a_hook_that_breaks_the_graph_runs_as_it_is(kind: str) -> None:
    """Torch would compile it by itself, and one that reads ``.grad`` could not be compiled at the
    second shape, on an empty cache."""

    def train(flag: FusionConfig | None) -> tuple[list[Tensor | None], list[float]]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        norms: list[float] = []
        with inductor_config.patch(ddp_fusion=flag), one_rank():
            ddp: nn.Module = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
            # On one rank, averages are what a model without DDP has.
            ddp = DistributedDataParallel(ddp) if flag else ddp
            for parameter in ddp.parameters():
                if kind == "on the gradient":
                    parameter.register_hook(lambda grad: norms.append(grad.norm().item()))
                else:
                    parameter.register_post_accumulate_grad_hook(
                        lambda parameter: norms.append(parameter.grad.norm().item())
                    )
            model = torch.compile(ddp) if flag else ddp
            for _ in range(2):
                ddp.zero_grad()
                model(torch.arange(8.0).view(2, 4) / 8).square().mean().backward()
            return [parameter.grad for parameter in ddp.parameters()], sorted(norms)

    def kept_by_dynamo() -> list[Any]:
        entries: list[Any] = _debug_get_cache_entry_list(call_hook)
        return entries

    cache = fresh_cache() if kind == "after accumulation" else contextlib.nullcontext()
    with cache, pytest.warns(FusionWarning, match="the backward broke into 4 graphs"):
        ours = train(FusionConfig(mode="concat"))
    assert kept_by_dynamo() == []
    torch.testing.assert_close(ours, train(None))
    # It is torch's again, once the flag is unset.
    torch.compile(call_hook, backend="eager")(lambda grad: 2 * grad, torch.ones(2))
    assert kept_by_dynamo()
    torch._dynamo.reset()


class _Reading(TorchDispatchMode):
    """As torch's own around the first call of a compiled graph; it changes nothing."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


def test_a_number_of_the_program_can_be_read_as_a_gpu_reads_it() -> None:
    """Its compiled graphs call ``item()`` of inputs on the CPU, where a CPU's take the tensor."""
    read: list[float] = []
    run = CompiledFxGraph.__call__

    def reading(graph: CompiledFxGraph, inputs: Sequence[Any]) -> Any:
        with _Reading():
            read.extend(t.item() for t in inputs if isinstance(t, Tensor) and t.dim() == 0)
        return run(graph, inputs)

    def gradients(flag: FusionConfig | None) -> list[Tensor | None]:
        torch._dynamo.reset()
        with inductor_config.patch(ddp_fusion=flag), one_rank():
            ddp = DistributedDataParallel(_model()) if flag else _model()
            (3 * ddp(torch.ones(2, 4)) / 7).sum().backward()
            return [parameter.grad for parameter in ddp.parameters()]

    with mock.patch.object(CompiledFxGraph, "__call__", reading):
        torch.testing.assert_close(gradients(FusionConfig(mode="concat")), gradients(None))
    assert {3, 7} <= set(read)


class _Jagged(nn.Module):
    """Takes nested tensors, or the values and offsets of one; returns one, or its values."""

    def __init__(self, returns: str) -> None:
        super().__init__()
        self.returns = returns
        self.layer = nn.Linear(4, 4)

    def forward(self, given: Tensor, offsets: Tensor | None = None) -> Tensor:
        x = given if offsets is None else torch.nested.nested_tensor_from_jagged(given, offsets)
        out = torch.sin(self.layer(x))
        return out if self.returns == "nested" else out.values()


def _train_jagged(
    flag: FusionConfig | None, takes: str, returns: str, how: str
) -> list[Tensor | None]:
    """The gradients of three steps, in which rows have other lengths."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    gradients: list[Tensor | None] = []
    with inductor_config.patch(ddp_fusion=flag), one_rank():
        ddp = DistributedDataParallel(_Jagged(returns))
        model = torch.compile(ddp) if flag and how == "compiled" else ddp
        for length in (3, 5, 4):
            rows = [torch.arange(4.0 * n).view(n, 4) / 8 for n in (2, length)]
            ddp.zero_grad()
            if takes == "nested":
                out = model(torch.nested.nested_tensor(rows, layout=torch.jagged))
            else:
                out = model(torch.cat(rows), torch.tensor([0, 2, 2 + length]))
            (out.values() if returns == "nested" else out).sum().backward()
            gradients += [parameter.grad for parameter in ddp.parameters()]
    return gradients


@pytest.mark.parametrize("how", ["compiled", "not compiled"])
@pytest.mark.parametrize("returns", ["nested", "values"])
def test_nested_tensors_are_not_traced(returns: str, how: str) -> None:
    expected = _train_jagged(None, "nested", returns, how)
    with pytest.warns(FusionWarning, match="takes or returns nested tensors.* of values and offse"):
        found = _train_jagged(FusionConfig(mode="concat"), "nested", returns, how)
    torch.testing.assert_close(found, expected)


def test_nested_tensors_in_what_is_compiled_are_fused() -> None:
    expected = _train_jagged(None, "values", "values", "compiled")
    with warnings.catch_warnings():
        warnings.simplefilter("error", FusionWarning)
        found = _train_jagged(FusionConfig(mode="concat"), "values", "values", "compiled")
    torch.testing.assert_close(found, expected)
    assert {report.collectives_after for report in fusion_passes.reports()} == {1}


@torch._functorch.config.patch(donated_buffer=False)
def test_a_second_derivative_of_what_is_compiled_is_torchs_own_error() -> None:
    torch._dynamo.reset()
    with inductor_config.patch(ddp_fusion="concat"), one_rank(), without_kernels():
        x = torch.ones(2, 4, requires_grad=True)
        model = torch.compile(DistributedDataParallel(_model()))
        out = model(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        warned = pytest.warns(FusionWarning, match="it differentiates gradients")
        with warned, pytest.raises(RuntimeError, match="does not currently support double back"):
            (out.mean() + slope.square().sum()).backward()
