"""Arguments of a backward, gradients that exist before it, and backwards that reach parameters in
unusual ways."""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch._inductor.config
import torch.distributed as dist
from torch import Tensor, nn

from fusion_passes import FusionConfig
from testing.models import OUTPUTS, WIDTH, Branching, Exact, linear_loss
from testing.scenarios.features.comm_hooks import HOOKS
from testing.scenarios.features.models import MODELS
from testing.scenarios.loop import Style, backwards, train
from testing.scenarios.run import Run


def twice(run: Run) -> None:
    """Two backwards through one forward, with ``retain_graph=True``."""
    ddp, forward = run.compiled(run.mlp())
    for step in range(3):
        ddp.zero_grad()
        inputs, factors = run.rows(step)
        outputs = forward(inputs)
        (outputs[:2] * factors[:2]).sum().backward(retain_graph=True)
        run.note_backward(ddp)
        (outputs[2:] * factors[2:]).sum().backward()
        run.note_backward(ddp)


def kept_under_no_sync(run: Run) -> None:
    """Two backwards through one forward under ``no_sync``, which needs the saved tensors twice."""
    layers = nn.Linear(WIDTH, 8), nn.GELU(), nn.Linear(8, 8)
    ddp, forward = run.compiled(nn.Sequential(*layers))
    with ddp.no_sync():
        loss = forward(run.rows(0)[0]).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
    run.note_backward(ddp, synced=False)
    forward(run.rows(1)[0]).square().sum().backward()
    run.note_backward(ddp)


def gradient_penalty(run: Run) -> None:
    """A gradient penalty, of a model that is not compiled: torch has no second derivative of a
    compiled one."""
    torch.manual_seed(0)
    layers = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU(), nn.Linear(WIDTH, OUTPUTS)
    ddp = run.ddp(nn.Sequential(*layers))
    for step in range(3):
        ddp.zero_grad()
        inputs, factors = run.rows(step)
        outputs = ddp(inputs.requires_grad_())
        (slope,) = torch.autograd.grad(outputs.sum(), inputs, create_graph=True)
        ((outputs * factors).mean() + slope.square().mean()).backward()
        run.note_backward(ddp)


def no_sync(run: Run) -> None:
    """``no_sync`` around two backwards only, and around a forward only: the forward decides. A
    second backward through it is not averaged."""
    ddp, forward = run.compiled(run.mlp())
    for step in range(2):
        ddp.zero_grad()
        with ddp.no_sync():
            local = linear_loss(forward, run.rows(step, 0))
        local.backward()
        run.note_backward(ddp, synced=False)
        averaged = linear_loss(forward, run.rows(step, 1, size=3))
        with ddp.no_sync():
            averaged.backward(retain_graph=True)
        run.note_backward(ddp)
        averaged.backward()
        run.note_backward(ddp)


def local_gradients(run: Run) -> None:
    """Backwards under ``no_sync`` and ``autograd.grad``: the compiled graph could reduce, but not
    in these."""
    ddp, forward = run.compiled(run.mlp(2))
    backwards(run, ddp, forward)
    ddp.zero_grad()
    backwards(run, ddp, forward, 2, zero="never", synced=False)
    ddp.zero_grad()
    note_grad(run, ddp, linear_loss(forward, run.rows(5)))
    backwards(run, ddp, forward)


def note_grad(run: Run, model: nn.Module, loss: Tensor, label: str = "") -> None:
    """Compare the result of ``torch.autograd.grad``, except its layout: a backward that reduces
    gradients returns them in the layout of the parameters, which no eager kernel knows."""
    gradients = [g.contiguous() for g in torch.autograd.grad(loss, list(model.parameters()))]
    run.note_values(**{f"{label}grad {n}": g for n, g in enumerate(gradients)})


def some_inputs(run: Run) -> None:
    """``backward(inputs=...)``, for one parameter and for the others."""
    ddp, forward = run.compiled(run.mlp(2))
    backwards(run, ddp, forward, 1)
    ddp.zero_grad()
    loss = linear_loss(forward, run.rows(1))
    weight = ddp.module[0].weight
    loss.backward(inputs=[weight], retain_graph=True)
    loss.backward(inputs=[p for p in ddp.parameters() if p is not weight])
    run.note_backward(ddp)


def inputs_alone(run: Run) -> None:
    """A backward for the inputs only, and one that fails before its first gradient, of a module
    with unused parameters: nothing was averaged, and the next step continues."""
    ddp, forward = run.compiled(Branching(outputs=OUTPUTS), find_unused_parameters=True)
    for step in range(3):
        rows, _ = run.rows(step)
        rows.requires_grad_()
        forward(rows, "a").sum().backward(inputs=[rows])
        run.note_values(**{f"inputs {step}": rows.grad})
        failing = forward(rows, "a")
        failing.register_hook(fail)
        must_raise("a hook fails", failing.sum().backward)
        backwards(run, ddp, forward, 1, "a", first=step)


def grad_of_inputs(run: Run) -> None:
    """The gradient of the inputs from ``autograd.grad`` with ``retain_graph=True``, before the
    backward through the same forward and between two steps."""
    ddp, forward = run.compiled(run.mlp())
    for step in range(3):
        ddp.zero_grad()
        rows, factors = run.rows(step)
        rows.requires_grad_()
        loss = (forward(rows) * factors).sum()
        (gradient,) = torch.autograd.grad(loss, rows, retain_graph=True)
        run.note_values(**{f"inputs {step}": gradient})
        loss.backward()
        run.note_backward(ddp)


def loss_that_reads_a_parameter(run: Run) -> None:
    """A part of the loss that is not compiled reads a parameter."""
    ddp, forward = run.compiled(run.mlp(2))
    backwards(run, ddp, forward, 1)
    ddp.zero_grad()
    (linear_loss(forward, run.rows(1)) + ddp.module[0].weight.square().sum()).backward()
    run.note_backward(ddp)


def flag_unset(run: Run) -> None:
    """A module that was constructed and compiled under the flag continues without it, with an
    evaluation in between; also with unused parameters that differ between ranks."""
    ddp, forward = run.compiled(run.mlp(2))
    branching, branches = run.compiled(Branching(outputs=OUTPUTS), find_unused_parameters=True)
    take = "ab"[dist.get_rank() % 2]
    backwards(run, ddp, forward, 1)
    backwards(run, branching, branches, 1, take)
    with torch._inductor.config.patch(ddp_fusion=None):
        backwards(run, ddp, forward, 2, first=1)
        backwards(run, branching, branches, 2, take, first=1)
        with torch.no_grad():
            run.note_values(evaluated=forward(run.rows(0)[0]))
    backwards(run, ddp, forward, 1, first=3)
    backwards(run, branching, branches, 1, take, first=3)


def flag_unset_with_a_hook(run: Run) -> None:
    """:func:`flag_unset` with a communication hook of the user's."""
    ddp, forward = run.compiled(run.mlp(2))
    HOOKS["summing"](run, ddp)
    backwards(run, ddp, forward, 2)
    with torch._inductor.config.patch(ddp_fusion=None):
        backwards(run, ddp, forward, 1, first=2)


def flag_around_construction(run: Run, *, style: Style = "outside", thread: bool = False) -> None:
    """The flag is unset before anything is compiled or trained; a thread that has never seen the
    flag may train."""
    ddp = run.ddp(run.mlp(2))
    with torch._inductor.config.patch(ddp_fusion=None), ThreadPoolExecutor(1) as pool:
        if thread:
            pool.submit(train, run, ddp, style=style).result()
        else:
            train(run, ddp, style=style)


def flags_of_their_own(run: Run) -> None:
    """Each module keeps the flag that it was constructed under, and one has none. Each has a
    backward of its own, and then one backward reaches two of them."""
    flags = (
        FusionConfig(mode="coalesced"),
        FusionConfig(scaling="bucket", bucket_cap_mb=1),
        FusionConfig(mode="coalesced", backward_graph="compiled_autograd"),
        FusionConfig(backward_graph="compiled_autograd"),
        None,
    )
    trained = []
    for flag in flags if run.is_fused else (None,) * len(flags):
        with torch._inductor.config.patch(ddp_fusion=flag):
            # Each module has its own group, because a traced backward has one module per group.
            trained.append(run.compiled(run.mlp(2), process_group=dist.new_group()))
    with torch._inductor.config.patch(ddp_fusion=None):
        for number, (ddp, forward) in enumerate(trained):
            backwards(run, ddp, forward, first=number)
        for first, second in ((0, 1), (2, 3), (3, 4)):
            pair = trained[first], trained[second]
            for step in range(2):
                for ddp, _ in pair:
                    ddp.zero_grad()
                losses = [linear_loss(forward, run.rows(step)) for _, forward in pair]
                sum(losses[1:], losses[0]).backward()
                for ddp, _ in pair:
                    run.note_backward(ddp)


def another_flag(run: Run) -> None:
    """The flag changes during training: the module keeps the one that it was constructed under."""
    ddp, forward = run.compiled(run.mlp(2))
    backwards(run, ddp, forward, 1)
    other = FusionConfig(mode="coalesced", bucket_cap_mb=3) if run.is_fused else None
    with torch._inductor.config.patch(ddp_fusion=other):
        backwards(run, ddp, forward, 1, first=1)
    backwards(run, ddp, forward, 1, first=2)


# --- Gradients that there are --------------------------------------------------------------------


def assert_kept(model: nn.Module, before: list[Tensor | None]) -> None:
    """Assert that gradients are still the same tensors, as with eager DDP."""
    kept = zip(model.parameters(), before, strict=True)
    assert all(old is None or old is parameter.grad for parameter, old in kept)


def gradients_of(model: nn.Module) -> list[Tensor | None]:
    """The gradients themselves, not copies."""
    return [parameter.grad for parameter in model.parameters()]


def kept_gradients(run: Run) -> None:
    """Existing gradients are accumulated and averaged in the tensors that ``.grad`` was:
    accumulated ones, ones in another layout, ones that only some ranks and parameters have, and
    zeros."""
    ddp, forward = run.compiled(run.mlp(2), bucket_cap_mb=2e-4)
    parameters: list[Any] = list(ddp.parameters())
    for step in range(6):
        if step == 1:
            parameters[0].grad = parameters[0].grad.t().contiguous().t()
        if step == 4:
            ddp.zero_grad(set_to_none=False)
        if step == 5 and dist.get_rank() == 0:
            parameters[1].grad = None
        before, synced = gradients_of(ddp), step not in (0, 2)
        backwards(run, ddp, forward, 1, first=step, zero="never", synced=synced)
        assert_kept(ddp, before)


def kept_unused(run: Run) -> None:
    """The used-parameter map lies in a bucket too, and nothing is accumulated into it."""
    ddp, forward = run.compiled(run.mlp(2), bucket_cap_mb=2e-4, find_unused_parameters=True)
    for step in range(4):
        backwards(run, ddp, forward, 1, first=step, zero="never", synced=step % 2 == 1)
    backwards(run, ddp, forward, 1, first=4, zero="kept")


def kept_in_a_graph(run: Run) -> None:
    """On one rank, an existing gradient belongs to an autograd graph."""
    ddp, forward = run.compiled(run.mlp(2))
    backwards(run, ddp, forward, 1)
    for step in range(2):
        weight = ddp.module[0].weight
        if dist.get_rank() == step:
            weight.grad = torch.ones_like(weight, requires_grad=True) * 2
        backwards(run, ddp, forward, 1, first=step, zero="never")


# --- Several outputs -----------------------------------------------------------------------------


class _Heads(nn.Module):
    """Exact. Two outputs, each of its own layers, which may be compiled separately."""

    def __init__(self, run: Run, depth: int = 1, *, are_compiled: bool = False) -> None:
        super().__init__()
        self.heads = nn.ModuleList(run.mlp(depth) for _ in range(2))
        self.calls = [run.compile(head) if are_compiled else head for head in self.heads]

    def forward(self, x: Tensor) -> list[Tensor]:
        return [call(x) for call in self.calls]


def several_outputs(run: Run, *, are_compiled: bool = False) -> None:
    """A backward from each output, of one graph or of one graph each."""
    ddp = run.ddp(_Heads(run, are_compiled=are_compiled))
    forward = ddp if are_compiled else run.compile(ddp)
    for step in range(3):
        ddp.zero_grad()
        inputs, factors = run.rows(step)
        left, right = forward(inputs)
        (left * factors).sum().backward(retain_graph=True)
        (right * factors).square().sum().backward()
        run.note_backward(ddp)


def backwards_of_one_iteration(run: Run) -> None:
    """Only the backwards are compiled. Each reaches a part of the parameters, on one rank with
    another plan than on the other. Nothing is left in the group's store."""
    ddp = run.ddp(_Heads(run, 2))
    store: Any = ddp.process_group.get_group_store()
    for step in range(4):
        ddp.zero_grad()
        size = 1 if dist.get_rank() == 1 and step % 3 == 0 else 4
        inputs, factors = run.rows(step, size=size)
        before = store.num_keys()
        for output in ddp(inputs):
            (output * factors).sum().backward()
        run.note_backward(ddp)
        assert store.num_keys() == before


class _Detached(Exact, body=WIDTH, head=OUTPUTS):
    """Exact. The head gets the detached output of the body, and both are outputs."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        features = self.body(x)
        detached = features.detach().requires_grad_()
        return self.head(detached), features, detached


def head_then_body(run: Run, *, finds_unused: bool) -> None:
    """A backward of the head, and another one of the body with the gradient from the first. With
    ``find_unused_parameters=True``, eager DDP raises an error: the body counts as unused in the
    first backward."""
    ddp, forward = run.compiled(_Detached(), find_unused_parameters=finds_unused)
    for step in range(1 if finds_unused else 3):
        ddp.zero_grad()
        inputs, factors = run.rows(step)
        output, features, detached = forward(inputs)
        (output * factors).sum().backward()
        if finds_unused:
            must_raise("backward", functools.partial(features.backward, detached.grad))
            return
        features.backward(detached.grad)
        run.note_backward(ddp)


def cleared_between(run: Run) -> None:
    """Each part has its own backward and clears its gradients right before it, as with an optimizer
    per part: gradients of the second part exist when the first backward begins. Or all gradients
    are zeroed between the two."""
    ddp = run.ddp(_Heads(run, are_compiled=True))
    for step in range(6):
        inputs, factors = run.rows(step)
        for number, output in enumerate(ddp(inputs)):
            if step < 3:
                ddp.module.heads[number].zero_grad()
            else:
                ddp.zero_grad(set_to_none=number == 0)
            (output * factors).sum().backward()
        run.note_backward(ddp)


def set_meanwhile(run: Run) -> None:
    """A hook sets or clears gradients during the backward, before they are accumulated."""
    ddp, forward = run.compiled(run.mlp(2))

    def set_all(value: float | None) -> None:
        for parameter in ddp.parameters():
            parameter.grad = None if value is None else torch.full_like(parameter, value)

    for step, value in enumerate((1.0, None, 2.0, None)):
        inputs, factors = run.rows(step)
        output = forward(inputs)
        output.register_hook(lambda _, value=value: set_all(value))
        (output * factors).sum().backward()
        run.note_backward(ddp)


# --- Backwards that fail -------------------------------------------------------------------------


def must_raise(words: str, call: Callable[[], object]) -> None:
    """Call a function that must raise an error with these words."""
    text = "no error"
    try:
        call()
    except RuntimeError as error:
        text = str(error)
    assert words in text.lower(), text


def fail(_: Tensor) -> None:
    """A hook that raises."""
    raise RuntimeError("a hook fails")


def failing(run: Run, model: str) -> None:
    """Errors before and after the graphs that average: existing gradients stay the same tensors.
    Eager DDP cannot continue."""
    ddp, forward = run.compiled(MODELS[model](run))
    backwards(run, ddp, forward, 1)
    before = gradients_of(ddp)
    for fails_behind in (False, True):
        x = run.rows(1)[0].requires_grad_()
        y = forward(2 * x) if fails_behind else forward(x)
        (x if fails_behind else y).register_hook(fail)
        must_raise("a hook fails", y.sum().backward)
        assert_kept(ddp, before)


def failing_late(run: Run) -> None:
    """On rank 1, an error is raised at the end of the first backward, after all gradients are
    averaged: the next steps continue."""
    ddp, forward = run.compiled(run.mlp(2))
    inputs, factors = run.rows(0)
    inputs.requires_grad_()

    def fail_at_end(_: Tensor) -> None:
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(lambda: fail(inputs))

    if dist.get_rank() == 1:
        inputs.register_hook(fail_at_end)  # It is the last gradient of the backward.
    loss = (forward(2 * inputs) * factors).sum()
    if dist.get_rank() == 1:
        must_raise("a hook fails", loss.backward)
    else:
        loss.backward()
    backwards(run, ddp, forward, 3, first=1)


def under_anomaly_mode(run: Run) -> None:
    """``torch.autograd.detect_anomaly`` in some steps."""
    ddp, forward = run.compiled(run.mlp(2))
    backwards(run, ddp, forward, 2)
    with torch.autograd.detect_anomaly():
        backwards(run, ddp, forward, 2, first=2)
    backwards(run, ddp, forward, 1, first=4)


def queued_callbacks(run: Run) -> None:
    """A tensor's hook queues a callback for the end of the backward."""
    model, ran = run.mlp(), list[int]()

    def hook(gradient: Tensor) -> Tensor:
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(lambda: ran.append(len(ran)))
        return gradient

    model[2].register_forward_hook(lambda _, __, output: output.register_hook(hook) and None)
    ddp = run.ddp(model)
    backwards(run, ddp, run.compile(ddp))
    run.note("calls", ran)
