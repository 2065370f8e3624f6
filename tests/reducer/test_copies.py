"""Reasons why gradients are copied into their buckets instead of being stored there by a compiled
backward."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
import inspect
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch._dynamo
import torch._functorch.config as functorch_config
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import fusion_passes
from fusion_passes import FusionWarning
from fusion_passes.reducer import backward, copies
from fusion_passes.reducer.compiled_forward import CompiledForward
from fusion_passes.reducer.reducer import reducer_of
from fusion_passes.torch_private.autograd import hooks_on_node
from tests.support.fake_world import without_kernels

pytestmark = pytest.mark.usefixtures("fused_rank")

ALL = ("0.bias", "0.weight", "1.bias", "1.weight", "2.bias", "2.weight")
X = torch.ones(2, 4)


def layers() -> tuple[Any, Any]:
    """Three layers in DDP, compiled."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))))
    return ddp, torch.compile(ddp)


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))


def gradients(ddp: nn.Module) -> tuple[Tensor | None, ...]:
    return tuple(parameter.grad for parameter in ddp.parameters())


def reasons(ddp: Any, loss: Callable[[], Any], count: int = 2, **backward: Any) -> dict[str, str]:
    """The reasons for the copies in the last of several steps, by parameter."""
    for _ in range(count):
        ddp.zero_grad()
        loss().backward(**backward)
    reducer = reducer_of(ddp)
    found = {
        reducer.parameters.names[n]: why
        for n, why in reducer.record.why_copied(reducer.parameters.kinds).items()
    }
    assert len(found) == len(reducer.parameters.numbers) - reducer.record.num_stored or not count
    return dict(sorted(found.items()))


def test_the_first_step_copies_all_and_the_next_ones_nothing() -> None:
    ddp, compiled = layers()
    found = [reasons(ddp, lambda: compiled(X).sum(), count) for count in (0, 1, 1)]
    assert found == [{}, dict.fromkeys(ALL, copies.FIRST), {}]


def test_what_is_not_compiled() -> None:
    ddp, _ = layers()
    ddp.module[0] = torch.compile(ddp.module[0])
    found = reasons(ddp, lambda: ddp(X).sum())
    assert found == dict.fromkeys(ALL[2:], copies.NOT_COMPILED)


def test_a_weight_that_the_loss_reads_too() -> None:
    ddp, compiled = layers()
    weight = ddp.module[1].weight
    found = reasons(ddp, lambda: compiled(X).sum() + weight.sum())
    assert found.pop("1.weight") == copies.SEVERAL
    # Gradients that a graph stores in one piece with it cannot be marked ready without it.
    assert found == {name: copies.BESIDE for name in ALL if name != "1.weight"}


def test_several_forwards_of_one_backward() -> None:
    """The last backward stores the sum of all gradients."""
    ddp, compiled = layers()
    found = reasons(ddp, lambda: sum(compiled(n * X).sum() for n in range(3)))
    assert found == {}


def test_a_layer_that_is_used_more_often_than_the_others() -> None:
    """Its gradient is the sum of a different number of parts than the other gradients of its
    piece."""
    ddp, compiled = layers()
    last = torch.compile(ddp.module[2])
    found = reasons(ddp, lambda: compiled(X).sum() + last(X).sum())
    assert {found.pop("2.bias"), found.pop("2.weight")} == {copies.SEVERAL}
    assert found == dict.fromkeys(ALL[:4], copies.BESIDE)


@pytest.mark.parametrize(
    "register", ["register_hook", "register_post_accumulate_grad_hook", "node"]
)
def test_a_hook_of_the_user(register: str) -> None:
    ddp, compiled = layers()
    weight = ddp.module[2].weight
    if register == "node":
        torch.autograd.graph.get_gradient_edge(weight).node.register_prehook(lambda g: g)
    else:
        getattr(weight, register)(lambda _: None)
    found = reasons(ddp, lambda: compiled(X).sum())
    why = copies.NODE_HOOKED if register == "node" else copies.HOOKED
    assert found.pop("2.weight") == why
    assert found == {name: copies.BESIDE for name in ALL if name != "2.weight"}


def test_hooks_on_nodes_that_nobody_tells_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody has restored torch's own function, so hooks may exist that the package does not
    know."""
    ddp, compiled = layers()
    assert reasons(ddp, lambda: compiled(X).sum()) == {}
    nodes = reducer_of(ddp).hooks.nodes.values()
    replaced = torch.autograd.function._HookMixin._register_hook
    torchs = staticmethod(inspect.unwrap(replaced))
    with monkeypatch.context() as patch:
        patch.setattr(torch.autograd.function._HookMixin, "_register_hook", torchs)
        seen: list[bool] = []
        weight = ddp.module[2].weight
        node = torch.autograd.graph.get_gradient_edge(weight).node
        handle = node.register_hook(lambda *_: seen.append(weight.grad is not None))
        found = reasons(ddp, lambda: compiled(X).sum())
        assert found == dict.fromkeys(ALL, copies.HOOKS_UNKNOWN)
        assert seen == [True] * 2
        handle.remove()
    assert [hooks_on_node(node) for node in nodes] == [(0, 1)] * 6, "none that asks was left"
    assert reasons(ddp, lambda: compiled(X).sum()) == {}


def test_a_backward_that_the_package_is_not_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody has restored torch's own function."""
    ddp, compiled = layers()
    torchs = inspect.unwrap(torch.autograd._engine_run_backward)
    for module in (torch.autograd, torch.autograd.graph):
        monkeypatch.setattr(module, "_engine_run_backward", torchs)
    found = reasons(ddp, lambda: compiled(X).sum())
    assert found == dict.fromkeys(ALL, copies.UNSEEN)


@pytest.mark.parametrize(
    ("options", "why"),
    [({"create_graph": True}, copies.CREATES_GRAPH), ({"inputs": True}, copies.SOME_INPUTS)],
)
def test_how_backward_is_called(options: dict[str, Any], why: str) -> None:
    ddp, compiled = layers()
    if "inputs" in options:
        options = {"inputs": list(ddp.parameters())}
    with functorch_config.patch(donated_buffer=False):  # Torch requires it for create_graph.
        found = reasons(ddp, lambda: compiled(X).sum(), **options)
    assert found == dict.fromkeys(ALL, why)


@without_kernels()
def test_two_modules_that_average_one_weight() -> None:
    ddp, compiled = layers()
    others = torch.compile(DistributedDataParallel(nn.Sequential(ddp.module[2])))
    found = reasons(ddp, lambda: compiled(X).sum() + others(X).sum())
    assert {name for name, why in found.items() if why == copies.SHARED} == {"2.bias", "2.weight"}


@without_kernels()
def test_a_graph_that_was_compiled_before_the_buckets_were_agreed_on() -> None:
    """The graph was compiled in the order of another branch, and groups gradients differently."""

    class Branches(Parts):
        def forward(self, x: Tensor, *, is_first: bool) -> Tensor:
            for part in self.parts if is_first else reversed(self.parts):
                x = part(x).sin()
            return x

    ddp = DistributedDataParallel(Branches(), bucket_cap_mb=100 / 2**20)
    compiled = torch.compile(ddp)

    with ddp.no_sync():
        compiled(X, is_first=False).sum().backward()
    assert reasons(ddp, lambda: compiled(X, is_first=True).sum()) == {}
    found = reasons(ddp, lambda: compiled(X, is_first=False).sum())
    assert set(found.values()) == {copies.OTHER_PIECES}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_module_that_was_converted(dtype: torch.dtype) -> None:
    """Its buckets keep the dtype of construction; eager DDP does not average then."""
    ddp, compiled = layers()
    for _ in range(2):
        compiled(X).sum().backward()
    ddp.to(dtype)
    with pytest.warns() if dtype == torch.float64 else contextlib.nullcontext() as warned:
        found = reasons(ddp, lambda: compiled(X.to(dtype)).sum(), 1)
    assert found == dict.fromkeys(ALL, copies.CONVERTED)
    if warned is not None:
        (text,) = (str(each.message) for each in warned if each.category is FusionWarning)
        assert "rounded before they are averaged: they have a wider dtype" in text
    expected = torch.autograd.grad(ddp.module(X.to(dtype)).sum(), list(ddp.parameters()))
    torch.testing.assert_close(gradients(ddp), expected, rtol=0.02, atol=0)


def test_under_anomaly_mode() -> None:
    """Otherwise it would find another rank's NaN in a bucket that is being all-reduced."""
    ddp, compiled = layers()
    assert reasons(ddp, lambda: compiled(X).sum()) == {}
    with torch.autograd.detect_anomaly():
        found = reasons(ddp, lambda: compiled(X).sum(), 1)
    assert found == dict.fromkeys(ALL, copies.ANOMALY)
    assert reasons(ddp, lambda: compiled(X).sum(), 1) == {}


@pytest.mark.parametrize("on_node", [False, True])
def test_a_hook_that_comes_when_its_gradient_is_marked_ready(on_node: bool) -> None:
    """An input's hook registers it, after the graph stored the gradients and before autograd
    accumulated all of them."""
    ddp, compiled = layers()
    for _ in range(2):
        compiled(X).sum().backward()
    x = X.clone().requires_grad_()

    def register(_: Tensor) -> None:
        for parameter in ddp.parameters():
            if on_node:
                node: Any = torch.autograd.graph.get_gradient_edge(parameter).node
                node.register_prehook(lambda gradients: gradients)
            else:
                parameter.register_hook(lambda gradient: gradient)

    x.register_hook(register)
    loss = compiled(x).sum()
    with pytest.raises(RuntimeError, match="while the backward that gives its gradient ran"):
        loss.backward()


def test_gradients_at_other_positions_than_they_were_compiled_for() -> None:
    """A gradient whose size differs from the parameter's is not stored as the parameter's."""
    ddp, compiled = layers()
    assert reasons(ddp, lambda: compiled(X).sum()) == {}
    made = CompiledForward

    def renumbered(destinations: Any, *args: Any) -> Any:
        known = destinations.gradients
        other = dict(zip(known, [*known.values()][::-1], strict=True))
        return made(dataclasses.replace(destinations, gradients=other, _stored={}), *args)

    with mock.patch.object(backward, "CompiledForward", renumbered):
        found = reasons(ddp, lambda: compiled(X).sum(), 1)
    assert found == dict.fromkeys(ALL, copies.RENUMBERED)
    expected = torch.autograd.grad(ddp.module(X).sum(), list(ddp.parameters()))
    torch.testing.assert_close(gradients(ddp), expected)


def test_a_module_that_is_wrapped_anew() -> None:
    """The hooks of its first reducer are removed, although the nodes of its parameters still
    exist."""
    ddp = layers()[0]
    loss = ddp(X).sum()  # Keeps the nodes alive.
    model = ddp.module
    del ddp
    gc.collect()
    again = DistributedDataParallel(model)
    compiled = torch.compile(again)
    assert reasons(again, lambda: compiled(X).sum()) == {}
    del loss


def test_a_backward_inside_of_another_one() -> None:
    class Model(Parts):
        def forward(self, x: Tensor) -> Tensor:
            for part in self.parts:
                x = checkpoint(part, x, use_reentrant=True)
            return x

    ddp = DistributedDataParallel(Model())
    found = reasons(ddp, lambda: ddp(X.clone().requires_grad_()).sum())
    assert found == {f"parts.{name}": copies.INNER for name in ALL}


def test_what_a_step_does_not_use() -> None:
    class Skips(Parts):
        def forward(self, x: Tensor) -> Tensor:
            return self.parts[1](self.parts[0](x))

    ddp = DistributedDataParallel(Skips(), find_unused_parameters=True)
    compiled = torch.compile(ddp)
    found = reasons(ddp, lambda: compiled(X).sum())
    assert found == {"parts.2.bias": copies.UNUSED, "parts.2.weight": copies.UNUSED}


def test_sparse_gradients_and_another_backend_than_inductor() -> None:
    model = nn.Sequential(nn.Embedding(8, 4, sparse=True), nn.Linear(4, 4))
    ddp = DistributedDataParallel(model)
    compiled = torch.compile(ddp, backend="aot_eager")
    rows = torch.tensor([1, 2])
    found = reasons(ddp, lambda: compiled(rows).sum())
    assert found.pop("0.weight") == copies.SPARSE
    assert found == dict.fromkeys(ALL[2:4], copies.NOT_STORED)


class Counting(nn.Module):
    """Layers of one shape, each with a buffer that the forward writes: views of one tensor, which
    the forward may read too."""

    counts: Tensor

    def __init__(self, *, reads_all: bool) -> None:
        super().__init__()
        self.reads_all = reads_all
        self.parts = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.register_buffer("counts", torch.zeros(8))
        for index, view in enumerate(self.counts.split(4)):
            self.register_buffer(f"count_{index}", view)

    def forward(self, x: Tensor) -> Tensor:
        for index, part in enumerate(self.parts):
            x = part(x).sin()
            with torch.no_grad():
                getattr(self, f"count_{index}").add_(1)
        return x + self.counts.sum() if self.reads_all else x


@pytest.mark.parametrize("reads_all", [False, True])
def test_inputs_that_torch_numbers_otherwise_are_not_stored(reads_all: bool) -> None:
    """If the forward writes one of several overlapping inputs, AOTAutograd replaces these by one
    base and moves it to the front: other inputs get other positions, and there are fewer. Views
    that do not overlap keep their positions."""
    torch.manual_seed(0)
    model = Counting(reads_all=reads_all)
    alone, ddp = copy.deepcopy(model), DistributedDataParallel(model, broadcast_buffers=False)
    compiled = torch.compile(ddp)
    names = [name for name, _ in model.named_parameters()]
    for _ in range(3):
        expected = torch.autograd.grad(alone(X).square().sum(), [*alone.parameters()])
        found = reasons(ddp, lambda: compiled(X).square().sum(), 1)
        torch.testing.assert_close(gradients(ddp), expected)
    assert found == (dict.fromkeys(sorted(names), copies.NOT_STORED) if reads_all else {})


@pytest.mark.parametrize("follows_another", [False, True])
def test_delayed_gradients_are_left_out_of_graphs(follows_another: bool) -> None:
    """This also holds if another module of the class was compiled before without delayed
    gradients."""
    other, others = layers()
    reasons(other, lambda: others(X).sum(), 2 if follows_another else 0)
    model = layers()[0].module
    ddp = DistributedDataParallel(
        model,
        delay_all_reduce_named_params=[("1.weight", model[1].weight)],
        param_to_hook_all_reduce=model[0].weight,
    )
    compiled = torch.compile(ddp)
    found = reasons(ddp, lambda: compiled(X).sum())
    assert found.pop("1.weight") == copies.DELAYED
    assert set(found.values()) <= ({copies.BESIDE} if follows_another else set())


@without_kernels()
def test_what_a_compiled_backward_copies_itself_is_in_the_report() -> None:
    """This includes a graph from a cache, which is not lowered in this process."""
    for _ in range(2):
        torch._dynamo.reset()
        ddp = DistributedDataParallel(nn.Conv2d(1, 4, 3))
        compiled = torch.compile(ddp)
        for _ in range(2):
            ddp.zero_grad()
            compiled(torch.ones(2, 1, 8, 8)).sum().backward()
        *_, module = fusion_passes.report().modules
        copied = dict(pair for bucket in module.buckets for pair in bucket.copied)
        assert module.stored == 2
        why = "aten.convolution_backward allocates its own result"
        assert copied == {"weight": why, "bias": why}
