"""Every way of writing a training loop is fused, or the user is warned why it is not.

One process with a fake group of two ranks: what is looked at is what was compiled and what was
said. The numbers are looked at in ``tests/equality/``.
"""

from __future__ import annotations

import re
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch._dynamo
import torch._inductor.config as inductor_config
import torch.distributed as dist
from torch import Tensor, nn
from torch._inductor.utils import fresh_cache, run_and_get_code
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import fusion_passes
from fusion_passes import FusionConfig, FusionReport, FusionWarning
from fusion_passes.agreement.participant import Participant
from fusion_passes.agreement.protocol import participants
from fusion_passes.ddp import late, rounds
from fusion_passes.ddp.hooks import _placed
from fusion_passes.ddp.late import reduce_late
from fusion_passes.install import switch
from fusion_passes.reporting.journal import journal
from testing.fake_world import fake_world, two_layers

pytestmark = pytest.mark.each_torch


@pytest.fixture(autouse=True)
def _world(request: pytest.FixtureRequest) -> Iterator[None]:
    """Its parameter is whether kernels compute anything."""
    torch._dynamo.reset()
    journal.clear()
    has_kernels = getattr(request, "param", False)
    with fake_world(has_kernels=has_kernels), inductor_config.patch(ddp_fusion=None):
        yield
    torch._dynamo.reset()


def _managed(flag: object = "concat", **options: Any) -> DistributedDataParallel:
    inductor_config.ddp_fusion = flag
    return DistributedDataParallel(two_layers(), **options)


def _inputs() -> Tensor:
    return torch.ones(2, 4)


def _said(run: Callable[[], object]) -> list[str]:
    """The warnings of the package while ``run`` runs."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    return [str(item.message) for item in caught if issubclass(item.category, FusionWarning)]


def _only_report() -> FusionReport:
    (report,) = fusion_passes.reports()
    return report


def test_no_thread_waits_for_other_ranks_inside_of_its_backward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Untraced backwards hold up a thread that is to be traced. If one of them waited for another
    rank's collective, whose thread is held up in the same way, neither would end."""
    ddp, traced = _managed(), threading.Event()

    def trace() -> None:
        with switch._runner._turns.traced():
            traced.set()

    def reduce(participants: Any) -> None:
        threading.Thread(target=trace, daemon=True).start()
        seen.append(traced.wait(5))
        reduce_late(participants)

    seen: list[bool] = []
    monkeypatch.setattr(rounds, "reduce_late", reduce)
    _said(lambda: ddp(_inputs()).sum().backward(create_graph=True))
    assert seen == [True]


def test_an_interrupt_while_a_backward_waits_for_another_thread_leaves_nothing_behind() -> None:
    """As of a cell of a notebook that is stopped: later backwards wait for nobody."""
    ddp = _managed(FusionConfig(backward_graph="compiled_autograd"))
    compiled, main = torch.compile(ddp), threading.main_thread().ident
    began, stopped = threading.Event(), threading.Event()
    assert main is not None

    def hold(_: Tensor) -> None:
        began.set()
        while not switch._runner.is_tracing:
            time.sleep(0.01)
        time.sleep(0.1)  # It waits now, or soon.
        signal.pthread_kill(main, signal.SIGINT)
        stopped.wait(10)

    def held() -> None:
        output = nn.Linear(4, 4)(_inputs())
        output.register_hook(hold)
        output.sum().backward()

    loss = compiled(_inputs()).sum()
    other = threading.Thread(target=held, daemon=True)
    other.start()
    assert began.wait(10)
    with pytest.raises(KeyboardInterrupt):
        loss.backward()
    stopped.set()
    other.join()
    later = threading.Thread(
        target=lambda: nn.Linear(4, 4)(_inputs()).sum().backward(), daemon=True
    )
    later.start()
    later.join(10)
    assert not later.is_alive(), "it waits for ever"


class _Deep(nn.Module):
    """Two layers. So many backwards are inside of one another that autograd runs the second's in a
    thread of its own, as it runs all on a GPU; ``between`` is called before the first's."""

    def __init__(self, between: Callable[[], object]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.between = between
        self.threads: set[int] = set()
        self.second.weight.register_hook(lambda _: self.threads.add(threading.get_ident()))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x.register_hook(lambda _: self.between() and None)
        return self._nested(x, 70)

    def _nested(self, x: Tensor, depth: int) -> Tensor:
        if not depth:
            return self.second(x)
        return cast("Tensor", checkpoint(self._nested, x, depth - 1, use_reentrant=True))


def test_a_backward_in_threads_of_autograds_is_not_ended_by_that_of_another_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launched: list[tuple[int, ...]] = []
    run = late._run

    def note(lists: Any) -> None:
        launched.extend(item.parameters for _, mine in lists for item in mine.collectives)
        run(lists)

    def train_another() -> None:
        other = threading.Thread(
            target=lambda: short(_inputs()).sum().backward(create_graph=True), daemon=True
        )
        other.start()
        other.join(10)
        assert not other.is_alive()
        launched.append(())

    inductor_config.ddp_fusion = "concat"
    deep = DistributedDataParallel(_Deep(train_another))
    short = DistributedDataParallel(nn.Linear(4, 4, bias=False))
    monkeypatch.setattr(late, "_run", note)
    _said(lambda: deep(_inputs()).sum().backward(create_graph=True))
    assert threading.get_ident() not in deep.module.threads
    assert launched == [(0,), (), (3, 2, 1, 0)]


def _freeing(victims: list[object], attribute: str) -> type[Participant]:
    """Participants that free a victim each time when they are asked for an attribute."""

    def read(self: Participant) -> Any:
        if victims:
            victims.pop()
        return vars(self)[attribute]

    def write(self: Participant, value: Any) -> None:
        vars(self)[attribute] = value

    return type("Freeing", (Participant,), {attribute: property(read, write)})


@pytest.mark.parametrize("attribute", ["usage", "thread", "rounds", "history"])
def test_modules_may_be_freed_while_another_one_trains(attribute: str) -> None:
    """As the collector does, which may run at any time."""
    inductor_config.ddp_fusion = "concat"
    victims: list[object] = []

    def free() -> None:
        if victims:
            victims.pop()

    _placed[-1] = cast("Any", free)
    ddp = DistributedDataParallel(two_layers(), find_unused_parameters=True)
    (mine,) = participants.values()
    victims += [_managed() for _ in range(50)]
    mine.__class__ = _freeing(victims, attribute)
    try:
        compiled = torch.compile(ddp)
        for _ in range(2):
            compiled(_inputs()).sum().backward()
        inductor_config.ddp_fusion = FusionConfig(bucket_cap_mb=1)  # All agree anew.
        compiled(_inputs()).sum().backward()
    finally:
        _placed.pop(-1)
        mine.__class__ = Participant
    assert len(victims) < 50


@pytest.mark.parametrize(
    ("cap_bytes", "parameters"),
    [
        pytest.param(16, [(3,), (2,), (1,), (0,)], id="each alone"),
        pytest.param(80, [(3, 2), (1, 0)], id="a layer"),
        pytest.param(81, [(3, 2, 1), (0,)], id="one byte more"),
    ],
)
def test_caps_hold_for_what_is_reduced_after_the_backward(
    monkeypatch: pytest.MonkeyPatch, cap_bytes: int, parameters: list[tuple[int, ...]]
) -> None:
    ddp = _managed(FusionConfig(bucket_cap_mb=cap_bytes / 2**20))
    launched: list[tuple[int, ...]] = []
    run = late._run

    def note(lists: Any) -> None:
        launched.extend(item.parameters for _, mine in lists for item in mine.collectives)
        run(lists)

    monkeypatch.setattr(late, "_run", note)
    _said(lambda: ddp(_inputs()).sum().backward(create_graph=True))
    assert launched == parameters


def _captures() -> int:
    return torch._dynamo.utils.counters["compiled_autograd"]["captures"]


def test_a_gradient_is_saved_with_its_bucket_and_a_clone_without() -> None:
    """What docs/buckets.md says of memory that gradients share."""
    ddp = _managed()
    torch.compile(ddp)(_inputs()).sum().backward()
    gradients = [parameter.grad for parameter in ddp.parameters()]
    bucket = sum(gradient.nbytes for gradient in gradients if gradient is not None)
    for gradient in gradients:
        assert gradient is not None
        assert gradient.untyped_storage().nbytes() == bucket
        assert gradient.clone().untyped_storage().nbytes() == gradient.nbytes


def test_backward_inside_the_compiled_step() -> None:
    ddp = _managed()

    @torch.compile
    def step(x: Tensor) -> None:
        ddp(x).sum().backward()

    assert _said(lambda: step(_inputs())) == []
    report = _only_report()
    assert (report.collectives_before, report.collectives_after) == (4, 1)
    assert report.buckets[0].parameters == ("1.weight", "1.bias", "0.weight", "0.bias")


def test_backward_outside_the_compiled_module() -> None:
    ddp = _managed("coalesced")
    compiled = torch.compile(ddp)
    assert _said(lambda: compiled(_inputs()).sum().backward()) == []
    assert _only_report().mode == "coalesced"
    assert _only_report().collectives_after == 1


def test_backward_after_an_eager_forward() -> None:
    ddp = _managed()
    assert _said(lambda: ddp(_inputs()).sum().backward()) == []
    assert _only_report().collectives_after == 1


def test_step_that_was_decorated_before_the_flag_was_set() -> None:
    holder: list[nn.Module] = []

    @torch.compile
    def step(x: Tensor) -> None:
        holder[0](x).sum().backward()

    holder.append(_managed())
    assert _said(lambda: step(_inputs())) == []
    assert _only_report().collectives_after == 1


def test_flag_that_is_set_in_one_thread_and_used_in_another() -> None:
    ddp = _managed()
    compiled = torch.compile(ddp)
    thread = threading.Thread(target=lambda: compiled(_inputs()).sum().backward())

    def run() -> None:
        thread.start()
        thread.join()

    (said,) = _said(run)
    assert "runs in another thread than the one that constructed it" in said
    assert _only_report().collectives_after == 1


@pytest.mark.parametrize("mode", ["concat", "coalesced"])
def test_operators_that_are_called_and_not_lowered_leave_collectives_lowered(mode: str) -> None:
    """Inductor keeps the order of what it lowers alone: called, launches that did not depend on
    each other were sorted in another order on each rank."""
    ddp = _managed(mode)
    compiled = torch.compile(ddp, options={"fallback_by_default": True})
    with fresh_cache():
        said, codes = run_and_get_code(lambda: _said(lambda: compiled(_inputs()).sum().backward()))
    assert said == []
    assert _only_report().collectives_after == 1
    backward = codes[-1]
    assert "aten.mm.default(" in backward
    assert "_c10d_functional.all_reduce" in backward
    # What is called gives a value; what is lowered writes in place.
    assert not re.search(r"= torch\.ops\.(_c10d_functional|fusion_passes)\.", backward)


class _Halved(nn.Module):
    """Its backward fills a tensor of the batch's size, rather than to keep it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return (self.layer(x).exp() * torch.full((4, x.shape[0]), 0.5).t()).sum()


@pytest.mark.slow
@pytest.mark.parametrize("_world", [True], indirect=True, ids=["with kernels"])
def test_dynamic_shapes_from_the_cache() -> None:
    """A second start takes forward and backward from AOTAutograd's cache."""
    inductor_config.ddp_fusion = "concat"
    ddp = DistributedDataParallel(_Halved())
    seen: list[list[Any]] = []
    with fresh_cache():
        for _ in range(2):
            torch._dynamo.reset()
            ddp.zero_grad()
            torch.compile(ddp, dynamic=True)(_inputs()).backward()
            seen.append([parameter.grad for parameter in ddp.parameters()])
        assert torch._dynamo.utils.counters["aot_autograd"]["autograd_cache_hit"] > 0
    cold, warm = seen
    assert all(torch.equal(mine, other) for mine, other in zip(cold, warm, strict=True))
    assert [report.collectives_after for report in fusion_passes.reports()] == [1, 1]


def test_option_of_one_compile_chooses_its_fusion() -> None:
    ddp = _managed("concat")
    compiled = torch.compile(ddp, options={"ddp_fusion": "coalesced"})
    assert _said(lambda: compiled(_inputs()).sum().backward()) == []
    assert _only_report().mode == "coalesced"
    assert inductor_config.ddp_fusion == "concat"


def test_option_of_one_compile_chooses_the_fusion_of_a_backward_inside() -> None:
    ddp = _managed("concat")

    def step(x: Tensor) -> None:
        ddp(x).sum().backward()

    options: dict[str, Any] = {"ddp_fusion": FusionConfig(mode="coalesced", bucket_cap_mb=1e-6)}
    compiled = torch.compile(step, options=options)
    said = _said(lambda: compiled(_inputs()))
    assert _only_report().mode == "coalesced"
    assert [len(bucket.parameters) for bucket in _only_report().buckets] == [1, 1, 1, 1]
    assert len(said) == 1
    assert "Raise DistributedDataParallel's bucket_cap_mb" in said[0]


def test_another_value_of_the_flag_recompiles() -> None:
    ddp = _managed("concat")
    compiled = torch.compile(ddp)
    compiled(_inputs()).sum().backward()
    ddp.zero_grad()
    inductor_config.ddp_fusion = "coalesced"
    compiled(_inputs()).sum().backward()
    assert [report.mode for report in fusion_passes.reports()] == ["concat", "coalesced"]


@pytest.mark.slow
def test_two_modules_get_their_own_caps_in_one_graph() -> None:
    inductor_config.ddp_fusion = "concat"
    small = DistributedDataParallel(two_layers(), bucket_cap_mb=48 / 2**20)
    large = DistributedDataParallel(two_layers(), bucket_cap_mb=1)

    @torch.compile
    def step(x: Tensor) -> None:
        (small(x).sum() + large(x).sum()).backward()

    step(_inputs())
    sizes: dict[str, list[int]] = {}
    for bucket in _only_report().buckets:
        sizes.setdefault(bucket.module, []).append(len(bucket.parameters))
    # Gradients of 64 and 16 bytes: 48 bytes are passed by a weight alone.
    assert sorted(sizes.values()) == [[1, 2, 1], [4]]


def test_a_backward_that_reaches_no_managed_parameter_is_not_traced() -> None:
    ddp = _managed()
    compiled = torch.compile(ddp)
    compiled(_inputs()).sum().backward()
    before = _captures()
    other = two_layers()
    torch.compile(lambda x: other(x).sum().backward())(_inputs())
    other(_inputs()).sum().backward()
    torch.autograd.grad(ddp(_inputs()).sum(), ddp.module[0].weight)
    assert _captures() == before


def test_users_pass_runs_in_the_same_compile() -> None:
    seen: list[int] = []
    inductor_config.post_grad_custom_post_pass = lambda graph: seen.append(len(graph.nodes))
    ddp = _managed()
    torch.compile(ddp)(_inputs()).sum().backward()
    inductor_config.ddp_fusion = None
    inductor_config.post_grad_custom_post_pass = None
    assert len(seen) == 2, "once for the forward, once for the backward"
    assert _only_report().collectives_after == 1


def test_module_constructed_before_the_flag_is_warned_about_once(tmp_path: Path) -> None:
    dist.destroy_process_group()  # DDP's C++ reducer does not run on a fake group.
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    ddp = DistributedDataParallel(two_layers())
    inductor_config.ddp_fusion = "concat"
    compiled = torch.compile(ddp)
    said = _said(lambda: [compiled(_inputs()).sum().backward() for _ in range(2)])
    assert len(said) == 1
    assert "constructed before torch._inductor.config.ddp_fusion was set" in said[0]
    assert "Set ddp_fusion before you construct it" in said[0]


def test_module_of_the_stock_python_reducer_is_warned_about() -> None:
    with torch._dynamo.config.patch(optimize_ddp="python_reducer", compiled_autograd=True):
        ddp = DistributedDataParallel(two_layers())
        inductor_config._fuse_ddp_communication = False
        inductor_config.ddp_fusion = "concat"

        @torch.compile
        def step(x: Tensor) -> None:
            ddp(x).sum().backward()

        said = _said(lambda: step(_inputs()))
    assert len(said) == 1
    assert "belongs to no DistributedDataParallel module" in said[0]
    assert _only_report().buckets == ()


def test_flag_that_is_unset_before_the_backward_is_warned_about_once() -> None:
    ddp = _managed()
    inductor_config.ddp_fusion = None
    said = _said(lambda: [ddp(_inputs()).sum().backward() for _ in range(2)])
    assert len(said) == 1
    assert "reduced after their backward, with no compute beside them" in said[0]


def test_create_graph_is_warned_about() -> None:
    ddp = _managed()
    said = _said(lambda: ddp(_inputs()).sum().backward(create_graph=True))
    assert len(said) == 1
    assert "create_graph=True" in said[0]


def test_compile_without_fusion_is_warned_about() -> None:
    ddp = _managed()
    options: dict[str, Any] = {"ddp_fusion": None}
    compiled = torch.compile(ddp, options=options)
    said = _said(lambda: compiled(_inputs()).sum().backward())
    assert len(said) == 1
    assert "4 gradients of DDP 0 (Sequential)" in said[0]
    assert "this compile was given ddp_fusion=None" in said[0]


def test_another_backend_is_warned_about() -> None:
    ddp = _managed()
    compiled = torch.compile(ddp, backend="aot_eager")
    said = _said(lambda: compiled(_inputs()).sum().backward())
    assert len(said) == 1
    assert "not compiled by Inductor's default backend" in said[0]


def test_buckets_of_one_are_warned_about() -> None:
    ddp = _managed(bucket_cap_mb=1 / 2**20)
    compiled = torch.compile(ddp)
    said = _said(lambda: compiled(_inputs()).sum().backward())
    assert len(said) == 1
    assert "each one fills a bucket alone. Raise DistributedDataParallel's bucket_cap_mb" in said[0]


def test_graph_break_in_the_backward_is_warned_about() -> None:
    ddp = _managed()

    @torch._dynamo.disable
    def users_hook(parameter: nn.Parameter) -> None:
        pass

    for parameter in ddp.parameters():
        parameter.register_post_accumulate_grad_hook(users_hook)
    said = _said(lambda: torch.compile(ddp)(_inputs()).sum().backward())
    assert len(said) == 1
    assert "TORCH_LOGS=graph_breaks shows where" in said[0]


def test_conflicting_option_of_one_compile_is_refused() -> None:
    ddp = _managed()
    compiled = torch.compile(ddp, options={"bucket_all_reduces_fx": "all"})
    with pytest.raises(Exception, match="bucket_all_reduces_fx = 'all' cannot be combined"):
        compiled(_inputs()).sum().backward()


class _Arming:
    """A hook that raises when it is told to."""

    is_armed = False

    def __call__(self, gradient: Tensor) -> Tensor:
        if self.is_armed:
            self.is_armed = False
            raise ValueError("the user's own error")
        return 2 * gradient


def test_after_an_error_in_a_traced_hook_training_goes_on() -> None:
    """Dynamo runs what is traced as it is then, with DDP's hooks."""
    ddp, hook = _managed(), _Arming()
    ddp.module[0].weight.register_hook(hook)
    forward = torch.compile(ddp)
    forward(_inputs()).sum().backward()
    hook.is_armed = True
    with pytest.raises(ValueError, match="the user's own error"):
        forward(_inputs()).sum().backward()
    with pytest.warns(FusionWarning, match="are reduced after their backward"):
        forward(_inputs()).sum().backward()
    forward(_inputs()).sum().backward()
