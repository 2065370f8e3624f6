"""Uses of a DDP module besides training: options, groups, copies, files."""

from __future__ import annotations

import copy
import gc
import io
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.utils import counters
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.utils.checkpoint import checkpoint

from testing import models
from testing.models import OUTPUTS, WIDTH, Exact, linear_loss
from testing.scenarios.features.backwards import must_raise
from testing.scenarios.features.comm_hooks import alone, summing_over
from testing.scenarios.features.instances import PAIRS
from testing.scenarios.features.models import Counting
from testing.scenarios.loop import backwards, train
from testing.scenarios.run import Run


def static_graph(run: Run) -> None:
    """``static_graph=True``, with gradients that are accumulated once the graph is known. All
    parameters have gradients, so the promise about the graph adds nothing."""
    ddp, forward = run.compiled(run.mlp(2), static_graph=True)
    backwards(run, ddp, forward)
    with ddp.no_sync():
        linear_loss(forward, run.rows(4)).backward()
    backwards(run, ddp, forward, 1, first=5, zero="never")


class _UsedTwice(Exact, layer=WIDTH, last=OUTPUTS):
    """Exact. A layer that is compiled separately, and is also used in reentrant checkpointing,
    before or after that."""

    def __init__(self, run: Run, *, is_first: bool) -> None:
        super().__init__()
        self.calls = [run.compile(layer) for layer in (self.layer, self.last)]
        self.is_first = is_first

    def forward(self, x: Tensor) -> Tensor:
        if self.is_first:
            x = self.calls[0](checkpoint(self.layer, x, use_reentrant=True))
        else:
            x = checkpoint(self.layer, self.calls[0](x), use_reentrant=True)
        result: Tensor = self.calls[1](x)
        return result


def static_graph_of_a_checkpoint(run: Run) -> None:
    """``static_graph=True`` although the autograd graph does not show every accumulation."""
    for is_first in (False, True):
        ddp = run.ddp(_UsedTwice(run, is_first=is_first), static_graph=True)
        backwards(run, ddp, lambda inputs, ddp=ddp: ddp(inputs.requires_grad_()))


def another_group(run: Run) -> None:
    """``_update_process_group`` on four ranks: pairs, other pairs (nothing is recompiled), all
    ranks, and each rank alone."""
    rank = dist.get_rank()
    pairs = [dist.new_group(list(pair)) for pair in PAIRS[0]]
    everybody = dist.new_group([0, 1, 2, 3])
    others = [dist.new_group(list(pair)) for pair in PAIRS[1]]
    ddp = run.ddp(run.mlp(), process_group=pairs[rank // 2])
    train(run, ddp, steps=2)
    before = _compiled()
    ddp._update_process_group(others[rank % 2])
    train(run, ddp, steps=2)
    run.note("compiled anew", [now - then for now, then in zip(_compiled(), before, strict=True)])
    for group in (everybody, alone()):
        ddp._update_process_group(group)
        train(run, ddp, steps=2)


def another_group_for_all(run: Run) -> None:
    """``_update_process_group`` of a module with buffers and a communication hook; the last forward
    before it had no backward, and the first one after it is not averaged."""
    rank = dist.get_rank()
    groups = [[dist.new_group(list(pair)) for pair in pairs] for pairs in PAIRS]
    state = [groups[0][rank // 2]]
    ddp, forward = run.compiled(Counting(run.mlp()), process_group=state[0])
    ddp.register_comm_hook(state, summing_over)
    backwards(run, ddp, forward, 3)
    forward(run.rows(3)[0])
    state[0] = groups[1][rank % 2]
    ddp._update_process_group(state[0])
    backwards(run, ddp, forward, 1, first=4, synced=False)
    backwards(run, ddp, forward, 3, first=5)
    run.note_end(ddp)


def _compiled() -> list[int]:
    captures = counters["compiled_autograd"]["captures"]
    return [captures, counters["stats"]["unique_graphs"]]


def after_an_error(run: Run) -> None:
    """Rank 1 skips a backward, and rank 0 gets an error. Both continue over a new group."""
    group = dist.new_group()
    ddp, forward = run.compiled(run.mlp(), process_group=group)
    backwards(run, ddp, forward, 2)
    loss = linear_loss(forward, run.rows(0))
    # From here on, because nothing is compiled any more.
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=3), group)
    if dist.get_rank() == 0:
        must_raise("timed out", loss.backward)
    ddp._update_process_group(dist.new_group())
    backwards(run, ddp, forward, 2)


def state_dict(run: Run) -> None:
    """A state dict that is saved after a few steps, loaded into another module, and trained
    further."""
    first = run.ddp(run.mlp())
    train(run, first, steps=2)
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second = run.ddp(models.fill_whole(run.mlp(), seed=3))
    second.load_state_dict(torch.load(file, map_location=run.device))
    run.note_end(second)
    run.note_values(**{f"saved {name}": value for name, value in first.state_dict().items()})
    train(run, second, steps=2)


def saved_module(run: Run) -> None:
    """The DDP module itself is saved and loaded, with buffers and a communication hook."""
    first = run.ddp(Counting(run.mlp()))
    first.register_comm_hook(None, default_hooks.fp16_compress_hook)
    train(run, first, steps=2)
    file = io.BytesIO()
    torch.save(first, file)
    del first
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    run.manage(loaded)
    loaded.register_comm_hook(None, default_hooks.fp16_compress_hook)  # A copy has no hook.
    train(run, loaded, steps=2)


def deepcopy(run: Run) -> None:
    """A deep copy of the DDP module is trained, then the original."""
    original = run.ddp(run.mlp())
    train(run, original, steps=1)
    duplicate = copy.deepcopy(original)
    run.manage(duplicate)
    train(run, duplicate, steps=2)
    train(run, original, steps=2)


def deepcopy_on_one_rank(run: Run) -> None:
    """Rank 0 keeps a copy of the DDP module, as for an evaluation; then another one is
    constructed."""
    original = run.ddp(run.mlp())
    train(run, original, steps=1)
    kept = copy.deepcopy(original) if dist.get_rank() == 0 else None
    train(run, original, steps=1)
    train(run, run.ddp(run.mlp(2)), steps=2)
    del kept


def second_ddp(run: Run) -> None:
    """The same model is wrapped again, and the first wrapper is freed."""
    model = run.mlp()
    first = run.ddp(model)
    train(run, first, steps=1)
    del first
    gc.collect()
    hooks = sum(len(p._post_accumulate_grad_hooks or {}) for p in model.parameters())
    run.note("hooks that are left", hooks)
    train(run, run.ddp(model), steps=2)
