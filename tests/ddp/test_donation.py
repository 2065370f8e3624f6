"""A traced backward overwrites what the forward has saved for it, and nothing that is needed again.

One process with a Gloo group of one rank, beside eager DDP.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._functorch.config
import torch._inductor.config as inductor_config
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from fusion_passes import FusionConfig
from fusion_passes.config import FusionMode
from fusion_passes.ddp.donation import _with_own_memory
from testing.fake_world import one_rank, without_kernels

Losses = tuple[Tensor, Tensor]
Step = Callable[[Callable[[Tensor], Losses], nn.Module], None]


class Mixing(nn.Module):
    """Saves results of tanh, softmax and cat, whose gradients can be computed in their places."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = nn.Linear(32, 64), nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Losses:
        h = torch.tanh(self.a(x))
        g = torch.softmax(self.b(h), -1)
        both = torch.cat([g, h], -1)
        scale = torch.tensor([0.5, 2.0]).repeat(32)
        return self.c(g * h * scale).log_softmax(-1).square().sum(), both.square().sum()


@pytest.fixture(autouse=True)
def _world() -> Iterator[None]:
    torch._dynamo.reset()
    with one_rank(), inductor_config.patch(ddp_fusion=None):
        yield
    torch._dynamo.reset()


def _x(factor: float = 1) -> Tensor:
    return factor * torch.randn(16, 32, generator=torch.Generator().manual_seed(1))


def _sum(losses: Iterable[Tensor]) -> Any:
    return sum(losses)


def once(model: Callable[[Tensor], Losses], ddp: nn.Module) -> None:
    first, second = model(_x())
    (first + second).backward()


def retained(model: Callable[[Tensor], Losses], ddp: nn.Module) -> None:
    loss = _sum(model(_x()))
    for keep in (True, True, False):
        loss.backward(retain_graph=keep)


def one_loss_after_the_other(model: Callable[[Tensor], Losses], ddp: nn.Module) -> None:
    first, second = model(_x())
    first.backward(retain_graph=True)
    second.backward()


def two_forwards(model: Callable[[Tensor], Losses], ddp: nn.Module) -> None:
    losses = [*model(_x()), *model(_x(2))]
    _sum(losses).backward()


def a_part_at_a_time(model: Callable[[Tensor], Losses], ddp: nn.Module) -> None:
    loss = _sum(model(_x()))
    layers: Any = ddp.module
    loss.backward(retain_graph=True, inputs=list(layers.c.parameters()))
    loss.backward(inputs=[*layers.a.parameters(), *layers.b.parameters()])


def saved_elsewhere(model: Callable[[Tensor], Losses], ddp: nn.Module) -> None:
    with torch.autograd.graph.save_on_cpu():
        loss = _sum(model(_x()))
    loss.backward()


def computed_again(model: Callable[[Tensor], Losses], ddp: nn.Module) -> None:
    _sum(checkpoint(model, _x(), use_reentrant=False)).backward()


STEPS = (
    once,
    retained,
    one_loss_after_the_other,
    two_forwards,
    a_part_at_a_time,
    saved_elsewhere,
    computed_again,
)


def _gradients(flag: str | None, steps: tuple[Step, ...]) -> list[list[Tensor]]:
    """What each step leaves in ``.grad``, one after the other with the same module."""
    inductor_config.ddp_fusion = flag
    ddp = DistributedDataParallel(Mixing())
    model = torch.compile(ddp) if flag else ddp
    gradients = []
    for run in steps:
        ddp.zero_grad(set_to_none=True)
        run(model, ddp)
        gradients.append([parameter.grad.clone() for parameter in ddp.parameters()])
    inductor_config.ddp_fusion = None
    return gradients


@pytest.mark.nightly  # All scenarios overwrite what a forward has saved for its backward, too.
@pytest.mark.parametrize("flag", ["concat", "coalesced"])
def test_gradients_are_those_of_eager_ddp(flag: str) -> None:
    steps = (*STEPS, *STEPS[:2])
    wanted, given = _gradients(None, steps), _gradients(flag, steps)
    for step, want, got in zip(steps, wanted, given, strict=True):
        for pair in zip(got, want, strict=True):
            torch.testing.assert_close(*pair, rtol=1e-5, atol=1e-4, msg=_named(step))


def _named(step: Step) -> Callable[[str], str]:
    return lambda text: f"{step.__name__}: {text}"


def _overwritten(backward: Callable[[], object]) -> int:
    """How many inputs the generated code of a backward computes something in the place of."""
    with inductor_config.patch(fx_graph_cache=False), without_kernels():
        _, codes = run_and_get_code(backward)
    return len(re.findall(r" = (?!buf)\w+; del .*# reuse", codes[-1]))


def _traced(mode: FusionMode) -> FusionConfig:
    """Where compiled autograd traces backwards, the package says what may be overwritten.
    AOTAutograd says it itself."""
    return FusionConfig(mode=mode, backward_graph="compiled_autograd")


def _backward(flag: FusionMode | None) -> Callable[[], object]:
    inductor_config.ddp_fusion = _traced(flag) if flag else None
    model = torch.compile(DistributedDataParallel(Mixing()) if flag else Mixing())
    loss = sum(model(_x()))
    return lambda: (loss.backward(), model)


@pytest.mark.each_torch
@pytest.mark.parametrize("flag", ["concat", "coalesced"])
def test_backward_overwrites_what_one_without_ddp_does(flag: FusionMode) -> None:
    assert _overwritten(_backward(flag)) == _overwritten(_backward(None)) == 1


def test_torchs_own_switch_is_heeded() -> None:
    with torch._functorch.config.patch(donated_buffer=False):
        assert _overwritten(_backward("concat")) == 0


def test_under_cuda_graphs_nothing_is_overwritten() -> None:
    backward = _backward("concat")
    with inductor_config.patch({"triton.cudagraphs": True}):
        assert _overwritten(backward) == 0


def test_traced_backwards_of_others_are_left_as_they_are() -> None:
    with torch._dynamo.config.patch(compiled_autograd=True):
        inductor_config.ddp_fusion = "concat"
        DistributedDataParallel(Mixing())
        loss = sum(torch.compile(Mixing())(_x()))

        def traced() -> None:
            with torch._dynamo.compiled_autograd._enable(torch.compile, dynamic=False):
                loss.backward()

        assert _overwritten(traced) == 0


def test_what_a_users_hook_has_packed_is_not_overwritten() -> None:
    inductor_config.ddp_fusion = _traced("concat")
    model = torch.compile(DistributedDataParallel(Mixing()))
    packed: list[tuple[Tensor, Tensor]] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append((tensor, tensor.clone()))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = _sum(model(_x()))
    loss.backward()
    assert len(packed) >= 5
    assert all(torch.equal(now, then) for now, then in packed)


def test_a_second_backward_through_what_is_freed_is_torchs_own_error() -> None:
    inductor_config.ddp_fusion = "concat"
    ddp = DistributedDataParallel(Mixing())
    first, second = torch.compile(ddp)(_x())
    torch.autograd.grad(first, [*ddp.parameters()][:1])
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        second.backward()


def test_what_shares_memory_is_not_overwritten() -> None:
    whole, both = torch.zeros(4, 6), torch.zeros(8)
    inputs = [
        whole,
        whole.new_zeros(6, 4).t(),
        torch.zeros(10)[:5],
        both,
        both.view(2, 4),
        torch.zeros(4).as_strided((2, 2), (3, 0)),
        nn.Parameter(torch.zeros(3)),
        torch.zeros(0),
        torch.zeros(2, 2).to_sparse(),
    ]
    assert _with_own_memory(inputs) == {0, 1, 6, 7}
