"""The owners of parameters, the calls of a process group for a bucket, and what is left in
``.grad``."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, Final

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import fusion_passes
from fusion_passes.layout.caps import BucketCaps
from fusion_passes.layout.layout import Layout, decode, encode, lay_out, plan_layout
from fusion_passes.reducer.communication import AllReduce
from fusion_passes.reducer.parameters import Parameters
from fusion_passes.reducer.reducer import reducer_of
from fusion_passes.sharded import norms, sends
from fusion_passes.sharded.modules import with_owners
from fusion_passes.sharded.reduction import ReduceToOwners
from fusion_passes.sharded.sends import begin_broadcasts, broadcast
from tests.layout.test_layout import kinds
from tests.sharded.trainings import SHARDED, wrapped
from tests.support.fake_world import fake_world, two_layers

CAPS: Final = BucketCaps(2**20, 2**20)


# --- Owners --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("numels", "ranks", "owners"),
    [
        pytest.param((10, 100, 60, 50, 10), 2, [0, 0, 1, 1, 0], id="balanced by bytes"),
        pytest.param((8, 8, 8, 8, 8), 3, [0, 1, 2, 0, 1], id="equal parameters go round"),
        pytest.param((8, 8), 4, [0, 1], id="a rank may own nothing"),
    ],
)
def test_owners(numels: tuple[int, ...], ranks: int, owners: list[int]) -> None:
    found = with_owners(kinds(*numels), ranks)
    assert [kind.owner for kind in found.values()] == owners


# --- Layouts -------------------------------------------------------------------------------------


def laid_out(*numels: int, ranks: int = 2, pieces: Any = None) -> tuple[Layout, Any]:
    known = with_owners(kinds(*numels), ranks)
    return plan_layout(pieces or [tuple(known)], known, CAPS), known


def test_gradients_of_one_owner_lie_together_and_begin_aligned() -> None:
    layout, known = laid_out(32, 33, 5, 7)
    (bucket,) = layout.buckets
    owners = [known[number].owner for number in bucket.numbers]
    assert owners == sorted(owners)
    start = bucket.offsets[owners.index(1)]
    assert start % 16 == 0
    assert start >= sum(known[n].numel for n in bucket.numbers if known[n].owner == 0)


def test_pieces_of_several_owners_share_a_bucket() -> None:
    layout, known = laid_out(16, 16, 16, 16, pieces=[(3, 2), (1, 0)])
    (bucket,) = layout.buckets
    assert [known[number].owner for number in bucket.numbers] == [0, 0, 1, 1]


def test_a_broadcast_layout_is_the_same() -> None:
    layout, known = laid_out(32, 33, 5, 7)
    members = decode(encode(bucket.numbers for bucket in layout.buckets))
    assert lay_out([[numbers] for numbers in members], known) == layout


# --- Calls of a process group --------------------------------------------------------------------


class Group:
    """A process group of NCCL's interface that records its calls."""

    def __init__(self, size: int, rank: int) -> None:
        self.size, self.rank = lambda: size, lambda: rank
        self.calls: list[tuple[Any, ...]] = []

    def reduce(self, tensors: list[Tensor], options: Any) -> Any:
        self.calls.append(("reduce", options.rootRank, tensors[0].tolist(), options.reduceOp))

    def _reduce_scatter_base(self, output: Tensor, memory: Tensor, options: Any) -> Any:
        self.calls.append(("reduce_scatter", output.tolist(), len(memory), options.reduceOp))
        return SimpleNamespace(wait=lambda: None)

    def broadcast(self, tensors: list[Tensor], options: Any) -> Any:
        self.calls.append(("broadcast", options.rootRank, len(tensors[0])))

    def _start_coalescing(self, _: torch.device) -> None:
        self.calls.append(("start",))

    def _end_coalescing(self, _: torch.device) -> Any:
        self.calls.append(("end",))
        return SimpleNamespace(wait=lambda: self.calls.append(("wait",)))


def reduced(
    group: Group, numels: tuple[int, ...], *, dtype: torch.dtype | None = None
) -> tuple[list[tuple[Any, ...]], Tensor]:
    """The calls for a bucket of ones over NCCL, and the bucket behind the wait."""
    layout, known = laid_out(*numels, ranks=group.size())
    parameters = Parameters([nn.Parameter(torch.zeros(n)) for n in numels], [], [], known)
    sends = ReduceToOwners(AllReduce(group, "nccl", dtype=dtype), parameters)
    memory = torch.ones(layout.buckets[0].numel)
    sends.launch(layout.buckets[0], memory)()
    return group.calls, memory


def test_equal_shares_are_one_reduce_scatter() -> None:
    calls, _ = reduced(Group(2, 1), (16, 16))
    assert calls == [("reduce_scatter", [1.0] * 16, 32, dist.ReduceOp.AVG)]


def test_other_shares_are_reduced_in_one_group() -> None:
    calls, _ = reduced(Group(3, 0), (16, 8))
    average = dist.ReduceOp.AVG
    assert calls[:-1] == [
        ("start",),
        ("reduce", 0, [1.0] * 16, average),
        ("reduce", 1, [1.0] * 8, average),
        ("end",),
    ]
    assert calls[-1] == ("wait",), "a rank that owns nothing is no root"


def test_the_space_between_owners_is_sent_as_zeros() -> None:
    calls, _ = reduced(Group(2, 0), (8, 20))
    sent = [call[2] for call in calls if call[0] == "reduce"]
    assert sent == [[1.0] * 20 + [0.0] * 12, [1.0] * 8]


@pytest.mark.parametrize(("dtype", "sent"), [(torch.bfloat16, 1.0), (torch.float16, 0.5)])
def test_smaller_dtypes_are_summed(dtype: torch.dtype, sent: float) -> None:
    """bf16 is divided in the wider dtype, and fp16 before it is sent."""
    calls, memory = reduced(Group(2, 0), (16, 16), dtype=dtype)
    assert calls == [("reduce_scatter", [sent] * 16, 32, dist.ReduceOp.SUM)]
    assert memory[:16].tolist() == [0.5] * 16


def test_parameters_are_broadcast_in_one_group() -> None:
    group = Group(2, 0)
    broadcast(group, [(0, torch.ones(3)), (1, torch.ones(4))], "nccl")
    assert group.calls == [
        ("start",),
        ("broadcast", 0, 3),
        ("broadcast", 1, 4),
        ("end",),
        ("wait",),
        ("wait",),
    ]


def test_broadcasts_of_many_bytes_are_several_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next forward can begin when the first group has arrived."""
    monkeypatch.setattr(sends, "_GROUP_BYTES", 28)
    group = Group(2, 0)
    waits = begin_broadcasts(
        group, [(0, torch.ones(3)), (1, torch.ones(4)), (0, torch.ones(2))], "nccl"
    )
    kinds = [call[0] for call in group.calls]
    assert kinds == ["start", "broadcast", "broadcast", "end", "start", "broadcast", "end"]
    assert waits[0] is waits[1]
    assert waits[1] is not waits[2]


# --- Gradients -----------------------------------------------------------------------------------


@pytest.fixture
def world() -> Iterator[None]:
    with fake_world(2, has_kernels=True):
        yield


def managed() -> DistributedDataParallel:
    return wrapped(SHARDED, two_layers())


def test_gradients_are_left_on_owners_alone_and_are_stored(world: None) -> None:
    torch._dynamo.reset()
    ddp = managed()
    compiled = torch.compile(ddp)
    reducer = reducer_of(ddp)
    for number in range(2):
        ddp.zero_grad()
        compiled(torch.ones(2, 4)).sum().backward()
        assert reducer.record.num_stored == 4 * number
    owners = [kind.owner for kind in reducer.parameters.kinds.values()]
    assert set(owners) == {0, 1}
    assert [p.grad is not None for p in ddp.parameters()] == [owner == 0 for owner in owners]
    (module,) = fusion_passes.report().modules
    assert module.shard_optimizer
    assert "each gradient to the owner of its parameter" in fusion_passes.format_report(
        fusion_passes.report()
    )


def test_a_step_keeps_no_state_of_others(world: None) -> None:
    """Adagrad makes the state of all parameters when it is constructed."""
    ddp = managed()
    optimizer = torch.optim.Adagrad(ddp.parameters())
    assert len(optimizer.state) == 4
    ddp(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    owned = [p for p in ddp.parameters() if p.grad is not None]
    assert set(optimizer.state) == set(owned)


def test_a_step_counts_as_one_on_all_ranks_for_autograd(world: None) -> None:
    """Also for parameters that are large enough to be received where they lie."""
    ddp = wrapped(SHARDED, two_layers(128))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    ddp(torch.ones(2, 128)).sum().backward()
    before = [p._version for p in ddp.parameters()]
    optimizer.step()
    assert all(p._version > v for p, v in zip(ddp.parameters(), before, strict=True))


def test_a_state_cannot_be_gathered_once_the_module_is_gone(world: None) -> None:
    ddp = managed()
    optimizer = torch.optim.Adam(ddp.parameters())
    ddp(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    del ddp
    with pytest.raises(ValueError, match="module that was freed"):
        fusion_passes.full_optimizer_state_dict(optimizer)


class Detached(nn.Module):
    """A head behind a body, whose output is not differentiated with the body's."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = two_layers()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.body(x)
        return hidden, self.head(hidden.detach())


def test_averages_of_others_are_dropped_between_backwards_of_an_iteration(world: None) -> None:
    ddp = wrapped(SHARDED, Detached(), bucket_cap_mb=16 / 2**20)
    hidden, out = ddp(torch.ones(2, 4))
    out.sum().backward()
    elsewhere = [kind.owner == 1 for kind in reducer_of(ddp).parameters.kinds.values()]
    assert elsewhere == [False, False, True, True]
    assert [parameter.grad for parameter in ddp.module.head.parameters()] == [None, None]
    hidden.sum().backward()
    assert reducer_of(ddp).steps == 1
    assert [parameter.grad is None for parameter in ddp.parameters()] == elsewhere


def test_another_optimizer_sends_nothing(world: None, monkeypatch: pytest.MonkeyPatch) -> None:
    ddp, other = managed(), nn.Linear(4, 4)
    sent: list[Any] = []
    monkeypatch.setattr(sends.on_the_way, "begin", lambda *each: sent.append(each[-1]))
    monkeypatch.setattr(norms, "all_gather", lambda *arguments: sent.append(arguments))
    for model in (other, ddp):
        model(torch.ones(2, 4)).sum().backward()
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    optimizer.step()
    nn.utils.clip_grad_norm_(other.parameters(), 1.0)
    assert sent == []
    torch.optim.SGD(ddp.module[1].parameters(), lr=0.1).step()
    assert sent == [[2, 3]]
