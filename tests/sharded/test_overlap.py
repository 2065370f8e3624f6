"""``shard_optimizer="overlap"``: parameters arrive when they are waited for and not earlier, and
whatever reads them waits. Each test is run by the first of two ranks, whose peer sends nothing: a
message arrives by adding 1 to what it would have replaced."""

from __future__ import annotations

import copy
import functools
import io
import pickle
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, cast

import pytest
import torch
import torch._dynamo
import torch._inductor.config as inductor_config
import torch.distributed as dist
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, fx, nn
from torch._inductor.utils import fresh_cache, run_and_get_code
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

import fusion_passes
from fusion_passes import FusionConfig
from fusion_passes.graph.text import graph_text
from fusion_passes.reducer.reducer import reducer_of
from fusion_passes.sharded import overlap, sends
from fusion_passes.sharded.overlap import WAIT_FOR_MODULE, WaitForParameters
from tests.support.fake_world import fake_world
from tests.support.graphs import tensor, trace

OVERLAP: Final = FusionConfig(shard_optimizer="overlap")


class Late:
    """Takes the place of what launches messages. ``order``: the sizes of those that were waited
    for; those that this rank sends count too."""

    def __init__(self) -> None:
        self.order: list[int] = []

    def __call__(
        self, group: Any, tensors: Sequence[tuple[int, Tensor]], backend: str
    ) -> list[Callable[[], None]]:
        del backend
        return [
            functools.partial(self._arrive, tensor, owner != group.rank())
            for owner, tensor in tensors
        ]

    def _arrive(self, tensor: Tensor, is_received: bool) -> None:
        self.order.append(tensor.numel())
        if is_received:
            with torch.no_grad():
                tensor.add_(1.0)


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Iterator[Late]:
    late = Late()
    monkeypatch.setattr(sends, "begin_broadcasts", late)
    monkeypatch.setattr(sends, "_ALONE_BYTES", 0)  # Each parameter is a message.
    torch._dynamo.reset()
    with fake_world(2, has_kernels=True):
        yield late


def managed(model: nn.Module, flag: FusionConfig = OVERLAP) -> DistributedDataParallel:
    with inductor_config.patch(ddp_fusion=flag):
        return DistributedDataParallel(model)


X: Final = torch.linspace(-1, 1, 8).view(2, 4)


class Block(nn.Module):
    """Layers of which some are read in other ways than by a call of them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.second = nn.Linear(4, 4)
        self.last = nn.Linear(4, 4)
        self.breaks = ""

    def forward(self, x: Tensor) -> Tensor:
        if self.breaks == "first":
            torch._dynamo.graph_break()
        x = F.gelu(self.first(x))
        if self.breaks == "inside":
            x = x * _norm(self.last.weight)
        x = self.second(self.norm(x))
        # Read by the module itself, twice.
        return F.linear(x, self.last.weight, self.last.bias) @ self.last.weight


@torch.compiler.disable
def _norm(weight: Tensor) -> Tensor:
    """Read a parameter in code that is not compiled."""
    return weight.square().sum()


class Convolutions(nn.Module):
    """Weights that Inductor copies to another layout as soon as a graph begins."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = nn.GroupNorm(2, 4)
        self.second = nn.Conv2d(4, 4, 3, padding=1)
        self.third = nn.Conv2d(4, 2, 3, padding=1)  # Another rank owns one of the two.
        self.last = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        image = F.silu(self.norm(self.first(x[:, None, None])))
        return self.last(self.third(self.second(image)).mean((1, 2)))


class Blocks(nn.Sequential):
    """A module whose forward Dynamo skips."""

    def __init__(self) -> None:
        super().__init__(Block(), nn.Linear(4, 4))


def step(ddp: nn.Module) -> torch.optim.Optimizer:
    """A backward and a step that changes nothing on this rank; the parameters of others are on
    their way behind it."""
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.0)
    ddp(X).square().sum().backward()
    for parameter in ddp.parameters():
        if parameter.grad is not None:  # The peer sends nothing: this is memory that nobody wrote.
            parameter.grad.zero_()
    optimizer.step()
    return optimizer


def arrived(ddp: DistributedDataParallel, model: nn.Module) -> nn.Module:
    """The model as it is when parameters have arrived once."""
    kinds = reducer_of(ddp).parameters.kinds.values()
    with torch.no_grad():
        for kind, parameter in zip(kinds, model.parameters(), strict=True):
            parameter.add_(float(kind.owner != 0))
    return model


def compiled(how: str, model: nn.Module) -> tuple[DistributedDataParallel, Callable[..., Any]]:
    """The module, compiled in one of the ways in which people do that."""
    if how in ("eager", "ddp", "fullgraph", "dynamic", "aot_eager", "reduce-overhead", "no passes"):
        ddp = managed(model)
        options: dict[str, dict[str, Any]] = {
            "ddp": {},
            "fullgraph": {"fullgraph": True},
            "dynamic": {"dynamic": True},
            "aot_eager": {"backend": "aot_eager"},
            "reduce-overhead": {"mode": "reduce-overhead"},
            "no passes": {"options": {"use_post_grad_passes": False}},
        }
        return ddp, ddp if how == "eager" else torch.compile(ddp, **options[how])
    if how == "inside":
        ddp = managed(cast("nn.Module", torch.compile(model)))
    elif how == "in place":
        model.compile()
        ddp = managed(model)
    elif how == "in place, after":
        ddp = managed(model)
        model.compile()
    elif how == "forward":
        model.forward = torch.compile(model.forward)
        ddp = managed(model)
    else:
        assert how == "part"
        part: Any = next(model.children())
        part.compile()
        ddp = managed(model)
    return ddp, ddp


WAYS: Final = (
    "eager",
    "ddp",
    "fullgraph",
    "dynamic",
    "aot_eager",
    "reduce-overhead",
    "no passes",
    "inside",
    "in place",
    "in place, after",
    "forward",
    "part",
)


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        *((Block, how) for how in WAYS),
        *((Blocks, how) for how in ("ddp", "inside", "in place")),
        *((Convolutions, how) for how in ("eager", "ddp", "inside")),
    ],
)
def test_a_forward_reads_what_has_arrived(late: Late, kind: Any, how: str) -> None:
    model = kind()
    reference = copy.deepcopy(model)
    ddp, forward = compiled(how, model)
    step(ddp if how in ("aot_eager", "reduce-overhead") else forward)  # type: ignore[arg-type]
    late.order.clear()
    expected = arrived(ddp, reference)(X)
    torch.testing.assert_close(forward(X), expected)
    assert len(late.order) == sum(
        kind.owner != 0 for kind in reducer_of(ddp).parameters.kinds.values()
    )
    torch.testing.assert_close(forward(X), expected)


def test_the_report_has_the_last_send_that_was_waited_for(late: Late) -> None:
    ddp = managed(Block())
    step(ddp)
    (module,) = fusion_passes.report().modules
    assert module.sent_parameters is None
    ddp(X)
    (module,) = fusion_passes.report().modules
    assert module.sent_parameters is not None
    assert module.sent_parameters.num_bytes == sum(p.nbytes for p in ddp.parameters())
    assert 0 < module.sent_parameters.waited_s <= module.sent_parameters.took_s


@pytest.mark.parametrize("breaks", ["first", "inside"])
@pytest.mark.parametrize("how", ["ddp", "inside", "in place"])
def test_code_between_graphs_reads_what_has_arrived(late: Late, how: str, breaks: str) -> None:
    model = Block()
    model.breaks = breaks
    reference = copy.deepcopy(model)
    ddp, forward = compiled(how, model)
    step(forward)  # type: ignore[arg-type]
    torch.testing.assert_close(forward(X), arrived(ddp, reference)(X))


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("is_compiled", [False, True])
def test_evaluations_of_the_bare_module_wait(late: Late, context: Any, is_compiled: bool) -> None:
    model = Block()
    ddp, reference = managed(model), copy.deepcopy(model)
    step(ddp)
    with context():
        output = (torch.compile(model) if is_compiled else model)(X)
        torch.testing.assert_close(output, arrived(ddp, reference)(X))


READS: Final[dict[str, Callable[[nn.Module], Any]]] = {
    "state_dict": lambda ddp: ddp.state_dict(),
    "deepcopy": copy.deepcopy,
    "deepcopy of the bare module": lambda ddp: copy.deepcopy(ddp.module),
    "pickle": lambda ddp: pickle.dumps(ddp.module),
    "save": lambda ddp: torch.save(ddp.module, io.BytesIO()),
}


@pytest.mark.parametrize("name", READS)
def test_what_reads_parameters_waits(late: Late, name: str) -> None:
    ddp = managed(Block())
    reference = copy.deepcopy(ddp.module)
    step(ddp)
    with inductor_config.patch(ddp_fusion=OVERLAP):
        READS[name](ddp)
    theirs = arrived(ddp, reference).parameters()
    for ours, other in zip(ddp.parameters(), theirs, strict=True):
        assert torch.equal(ours, other)


def test_the_state_of_a_part_waits_for_that_part(late: Late) -> None:
    """A thread that trains another module does not wait for this one."""
    ddp = managed(Block())
    step(ddp)
    part = ddp.module.second
    assert isinstance(part, nn.Module)
    part.state_dict()
    assert late.order == [parameter.numel() for parameter in part.parameters()]


def test_averages_of_weights_wait(late: Late) -> None:
    ddp = managed(Block())
    averaged = AveragedModel(ddp.module)
    reference = copy.deepcopy(ddp.module)
    step(ddp)
    averaged.update_parameters(ddp.module)
    theirs = arrived(ddp, reference).parameters()
    for ours, other in zip(averaged.module.parameters(), theirs, strict=True):
        assert torch.equal(ours, other)


def test_loaded_parameters_are_not_overwritten(late: Late) -> None:
    ddp = managed(Block())
    loaded = copy.deepcopy(ddp.state_dict())
    step(ddp)
    ddp.load_state_dict(loaded)
    ddp(X)
    for name, value in ddp.state_dict().items():
        assert torch.equal(value, loaded[name])


def test_the_next_step_waits_for_what_it_writes_alone(late: Late) -> None:
    ddp = managed(Block())
    parameters = list(ddp.parameters())
    one, other = (torch.optim.SGD(part, lr=0.0) for part in (parameters[:4], parameters[4:]))
    ddp(X).sum().backward()
    one.step()
    other.step()
    assert late.order == []
    one.step()
    assert late.order == [parameter.numel() for parameter in parameters[:4]]


def test_a_module_that_is_freed_sends_what_others_wait_for(late: Late) -> None:
    ddp = managed(Block())
    step(ddp)
    module, ref = ddp.module, weakref.ref(reducer_of(ddp))
    assert late.order == []
    del ddp
    assert ref() is None
    assert len(late.order) == len(list(module.parameters()))
    assert "forward" not in vars(module), "the bare module is as it was"


def test_process_groups_end_after_all_is_sent(late: Late) -> None:
    ddp = managed(Block())
    step(ddp)
    assert late.order == []
    dist.destroy_process_group()
    assert len(late.order) == len(list(ddp.parameters()))
    dist.init_process_group("fake", rank=0, world_size=2)


def test_copies_wait_in_their_own_forward(late: Late) -> None:
    ddp = managed(Block())
    with inductor_config.patch(ddp_fusion=OVERLAP):
        other = copy.deepcopy(ddp)
    assert other.module.forward.__self__ is other.module
    step(other)
    assert late.order == []
    other(X)
    assert late.order


def test_exported_programs_do_not_wait(late: Late) -> None:
    ddp = managed(Block())
    program = torch.export.export(ddp.module, (X,))
    assert "wait_for" not in str(program.graph)


def test_two_forwards_of_one_class_are_compiled_apart(late: Late) -> None:
    """Dynamo limits how often it compiles one code object."""
    codes = {managed(kind()).module.forward.__code__ for kind in (Block, Blocks)}
    assert len(codes) == 2


# --- Graphs --------------------------------------------------------------------------------------


def waits(module: fx.GraphModule, run: WaitForParameters) -> str:
    """The text of the graph after the pass; asserts that the pass runs once."""
    run(module.graph)
    module.graph.lint()
    after = graph_text(module.graph)
    run(module.graph)
    assert graph_text(module.graph) == after
    return after


def forward(w: Tensor, b: Tensor, x: Tensor, v: Tensor) -> Any:
    WAIT_FOR_MODULE("0/DDP 0")
    return [torch.relu(torch.addmm(b, x, w.t())) @ v, w, v]


INPUTS: Final = [tensor(8, 16), tensor(8), tensor(4, 16), tensor(8, 2)]


def test_each_parameter_is_waited_for_where_it_is_first_read() -> None:
    run = WaitForParameters(4, ((0, (8, 16)), (1, (8,)), (3, (8, 2))))
    assert_expected_inline(
        waits(trace(forward, INPUTS), run),
        """\
w_1: f32[8, 16]
b_1: f32[8]
x_1: f32[4, 16]
v_1: f32[8, 2]
wait_for_parameters__default: ? = wait_for_parameters_([w_1, b_1])
t: f32[16, 8]strides[1, 16] = t(w_1)
addmm: f32[4, 8] = addmm(b_1, x_1, t)
relu: f32[4, 8] = relu(addmm)
wait_for_parameters__default_1: ? = wait_for_parameters_([v_1])
mm: f32[4, 2] = mm(relu, v_1)
wait_for_parameters__default_2: ? = wait_for_parameters_([w_1], '0/DDP 0')
return [mm, w_1, v_1]
""",
    )


def test_inputs_that_are_numbered_otherwise_are_all_waited_for() -> None:
    run = WaitForParameters(4, ((0, (8, 16)), (2, (8,))))
    text = waits(trace(forward, INPUTS), run)
    assert "wait_for_parameters_([w_1, b_1, x_1])" in text


def test_a_graph_without_the_mark_is_left_alone() -> None:
    module = trace(lambda x: [x + 1], INPUTS[:1])
    before = graph_text(module.graph)
    assert waits(module, WaitForParameters(1, ((0, (8, 16)),))) == before


def test_a_graph_without_parameters_waits_for_all_at_its_end() -> None:
    def prefix(x: Tensor) -> Any:
        WAIT_FOR_MODULE("0/DDP 0")
        return [x + 1]

    text = waits(trace(prefix, INPUTS[:1]), WaitForParameters(1, ()))
    assert text.splitlines()[-2].endswith("wait_for_parameters_([x_1], '0/DDP 0')")


def test_a_copy_of_a_parameter_that_is_made_before_the_wait_is_an_error(
    late: Late, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overlap, "_MOST_DIMS", 4)
    error = "Inductor copies a parameter before the wait for it"
    with fresh_cache(), pytest.raises(Exception, match=error):
        torch.compile(managed(Convolutions()))(X)


@pytest.mark.parametrize("is_copy", [False, True])
def test_generated_code_waits_before_each_layer(late: Late, is_copy: bool) -> None:
    """Inductor's scheduler keeps the order: no wait comes earlier than it must."""
    ddp = managed(nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))))
    if is_copy:
        with inductor_config.patch(ddp_fusion=OVERLAP):
            ddp = copy.deepcopy(ddp)
    _, (code, *_) = run_and_get_code(torch.compile(ddp), X)
    calls = [
        line.strip().split("(")[0].removeprefix("torch.ops.fusion_passes.")
        for line in code.splitlines()
        if "wait_for_parameters_" in line or "extern_kernels.addmm" in line
    ]
    wait = "wait_for_parameters_.default"
    assert calls == [*[wait, "extern_kernels.addmm"] * 3, wait]
