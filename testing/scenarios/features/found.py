"""Trainings that random ones have led to: each was an error, or wrong, where eager DDP is not."""

from __future__ import annotations

from torch import Tensor, nn

from testing.models import WIDTH
from testing.scenarios.features.backwards import must_raise
from testing.scenarios.run import Run


class _Recurrent(nn.Module):
    """A weight that is read in each of two time steps has a gradient from both."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.RNN(4, 4, batch_first=True)
        self.head = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        output, _ = self.inner(x.view(x.shape[0], 2, 4))
        result: Tensor = self.head(output.reshape(x.shape[0], 8))
        return result


def one_may_lack_gradients(run: Run) -> None:
    """Two modules are in one backward, whose graphs launch before others are done."""
    first = run.ddp(nn.Linear(WIDTH, 8))
    second = run.ddp(_Recurrent(), find_unused_parameters=True)
    calls = run.compile(first), run.compile(second)
    for step in range(2):
        for ddp in (first, second):
            ddp.zero_grad()
        calls[1](calls[0](run.rows(step)[0])).square().sum().backward()
        for ddp in (first, second):
            run.note_backward(ddp)


def kept_under_no_sync(run: Run) -> None:
    """What the forward has saved is needed a second time."""
    layers = nn.Linear(WIDTH, 8), nn.GELU(), nn.Linear(8, 8)
    ddp, forward = run.compiled(nn.Sequential(*layers))
    with ddp.no_sync():
        loss = forward(run.rows(0)[0]).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
    run.note_backward(ddp, synced=False)
    forward(run.rows(1)[0]).square().sum().backward()
    run.note_backward(ddp)


def changing_buffers(run: Run) -> None:
    """The first of two forwards has saved the buffers that the second one gets from another
    rank."""
    ddp = run.ddp(nn.Sequential(nn.Linear(WIDTH, 4, bias=False), nn.BatchNorm1d(4)))

    def backward(x: Tensor) -> None:
        (ddp(x) * ddp(x.square())).exp().sum().backward()

    step = run.compile(backward)
    for number in range(2):
        step(run.rows(number)[0])
        run.note_backward(ddp)
    run.note_end(ddp)


class _Heads(nn.Module):
    """Two outputs, whose layers are compiled one by one: a backward from one reaches no other."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.trunk, self.left, self.right = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        for layer in self.children():
            if run.is_fused:
                layer.compile()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.trunk(x)
        return self.left(x), self.right(x)


def incomplete_twice(run: Run) -> None:
    """A backward repeats an incomplete one, of the same output or of another: DDP refuses it at
    once, and not only in the next forward. What it leaves in gradients is not looked at."""
    for second in (0, 1):
        ddp = run.ddp(_Heads(run))
        x = run.rows(second)[0]
        outputs = ddp(x)
        outputs[0].square().sum().backward(retain_graph=True)
        words = "expected to mark a variable ready only once"
        must_raise(words, outputs[second].square().sum().backward)
        try:
            ddp(x)
        except RuntimeError:  # Eager DDP's is an assertion of its own.
            continue
        raise AssertionError("the next forward must be refused too")
