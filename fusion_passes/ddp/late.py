"""Reduces gradients after the backward, by hand: those that no graph of this rank has reduced.

They are those of hooks that ran eagerly, and of graphs that would have launched something else than
what the ranks have agreed on (see :mod:`fusion_passes.agreement.protocol`).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from fusion_passes.agreement.launches import LATE, Collective, LaunchList
from fusion_passes.agreement.participant import Participant
from fusion_passes.config import FusionConfig
from fusion_passes.ddp.comm_hooks import sent_as
from fusion_passes.ddp.managed_module import ManagedModule
from fusion_passes.ddp.modules import registry
from fusion_passes.ddp.unused import flags_like, write_averages
from fusion_passes.flag import active_config
from fusion_passes.graph.collectives import ALL_REDUCE, ALL_REDUCE_COALESCED, WAIT
from fusion_passes.graph.scaling import NO_SCALING, Scaling, scaled
from fusion_passes.plan.caps import bucket_caps
from fusion_passes.plan.layout import as_it_lies, lay_out
from fusion_passes.plan.scaling import (
    REDUCE_DTYPE_OF,
    BucketScaling,
    choose_scaling,
    scaling_as_agreed,
)
from fusion_passes.reductions.find import ReductionKey, dtype_name
from fusion_passes.torch_private.ddp import parameters_of


@dataclass(frozen=True)
class _Job:
    """A DDP module with gradients that are still to be reduced."""

    ddp: DistributedDataParallel
    module: ManagedModule
    participant: Participant

    def count_unused(self) -> None:
        """Count as zero, in a static graph, what other ranks have used and this one has not."""
        for number in sorted(self.participant.unused):
            parameter = parameters_of(self.ddp)[number]
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            self.participant.received.add(number)  # It has not come.
            self.participant.late[number] = False

    @property
    def own_use(self) -> frozenset[int]:
        """The parameters whose gradients this rank has, and must get the average of."""
        usage, received = self.participant.usage, self.participant.received
        return usage.own_use(received) if usage is not None else frozenset(received)

    @property
    def numbers(self) -> frozenset[int]:
        """What is still to be sent."""
        usage, kind = self.participant.usage, self.participant.kind
        left = frozenset(self.participant.late)
        return left if usage is None else left | usage.sent.get(kind, frozenset()) | {usage.flags}

    def like(self, number: int) -> Tensor:
        """A tensor as what is sent under a number."""
        if self.participant.usage is not None and number == self.participant.usage.flags:
            return flags_like(self.ddp, self.module)
        return parameters_of(self.ddp)[number]

    def launch(self, item: Collective, mode: str) -> _Launched:
        gradients = [self._gradient(number) for number in item.parameters]
        scaling = self._scaling_of(item)
        sent = [
            self._to_send(gradient, number, item, scaling.before)
            for gradient, number in zip(gradients, item.parameters, strict=True)
        ]
        pieces, offsets = _launch(sent, scaling, mode, self.module.group_name)
        return _Launched(self, item, scaling.after, gradients, pieces, offsets)

    def _scaling_of(self, item: Collective) -> BucketScaling:
        key = _key_of(self, self.like(item.parameters[0]), FusionConfig())
        return scaling_as_agreed(key, item.divided, "auto", folds=False)

    def _gradient(self, number: int) -> Tensor:
        like, usage = self.like(number), self.participant.usage
        if usage is not None and number == usage.flags:
            return like.copy_(torch.tensor(usage.flags_of(self.own_use)))
        if like.grad is None:
            assert usage is not None, "its hook has run"
            return torch.zeros_like(like)
        detached: Tensor = like.grad.detach()
        return detached

    def _to_send(self, gradient: Tensor, number: int, item: Collective, scaling: Scaling) -> Tensor:
        """The gradient's elements in the order in which all ranks send them, in a dtype and scale
        that the collective expects."""
        is_divided = self.participant.late.get(number, False)
        left = scaling.without(_average(self) if is_divided else NO_SCALING)
        gradient = scaled(gradient, left.kind, left.value)
        flat = as_it_lies(gradient, self.module.strides_of(number))
        dtype: torch.dtype = getattr(torch, item.dtype)
        real: Tensor = torch.view_as_real(flat) if flat.is_complex() else flat
        cast: Tensor = real.to(dtype.to_real())
        return cast


@dataclass(frozen=True)
class _Launched:
    """A collective that was launched and not waited for.

    Attributes:
        scaling: what the results are scaled by.
        pieces: what it gives: the bucket, or the tensors one by one.
        offsets: where each gradient lies in the bucket, if there is one.
    """

    job: _Job
    item: Collective
    scaling: Scaling
    gradients: list[Tensor]
    pieces: list[Tensor]
    offsets: list[int] | None

    def finish(self) -> None:
        """Wait, and give the gradients their new values."""
        results = [WAIT(piece) for piece in self.pieces]
        for index, gradient in enumerate(self.gradients):
            number = self.item.parameters[index]
            if self.offsets is None:
                result = results[index].reshape(-1)
            else:
                count = gradient.numel() * (2 if gradient.is_complex() else 1)
                offset = self.offsets[index]
                result = results[0][offset : offset + count] if count else results[0][:0]
            average = self._average(gradient, result, self.job.module.strides_of(number))
            usage = self.job.participant.usage
            if usage is not None and number not in self.job.own_use:
                usage.averages[number] = average.clone()
            else:
                gradient.copy_(average)
            self.job.participant.late.pop(number, None)

    def _average(self, gradient: Tensor, result: Tensor, strides: tuple[int, ...]) -> Tensor:
        result = result.to(gradient.dtype.to_real())
        result = scaled(result, self.scaling.kind, self.scaling.value)
        if gradient.is_complex():
            result = torch.view_as_complex(result.reshape(-1, 2))
        return result.as_strided(gradient.shape, strides, result.storage_offset())


def reduce_late(participants: Iterable[Participant]) -> None:
    """Reduce what is left of the gradients of these modules, in the order of the other ranks.

    Raises:
        RanksDisagreeError: these reduce other gradients, or as
            :meth:`fusion_passes.agreement.participant.Participant.announce`.
    """
    jobs = []
    for participant in participants:
        ddp = registry.ddp_of(participant.module)
        if participant.is_local:
            registry.rejoin(participant.module)
            participant.is_local = False  # The round's next backward settles anew.
        if ddp is not None:
            jobs.append(_Job(ddp, registry.module_of(ddp), participant))
    with torch.no_grad():
        left = [job for job in jobs if _is_left(job) or _lacks_use(job)]
        while left:
            _run(_next_lists(left))
            left = [job for job in left if _is_left(job)]
        for job in jobs:
            _reduce_new(job)


def _is_left(job: _Job) -> bool:
    if job.participant.usage is not None:
        return job.participant.has_sent_nothing
    return bool(job.participant.late)


def _lacks_use(job: _Job) -> bool:
    return bool(job.participant.unused) or job.participant.is_sharing


def _reduce_new(job: _Job) -> None:
    """Reduce what some rank has used and none has sent, which all ranks read in the flags; give
    the parameters that this rank has not used what the others have."""
    participant, usage = job.participant, job.participant.usage
    if usage is None or not usage.must_read(participant.kind, job.own_use):
        return
    usage.read(usage.averages.pop(usage.flags))
    new = (usage.used or frozenset()) - usage.sent[participant.kind]
    if new:
        _run([(job, _planned(job, new))])
        usage.sent[participant.kind] |= new
        usage.is_new = participant.needs_replanning = True
    write_averages(participant, usage.averages)


def _next_lists(jobs: Sequence[_Job]) -> list[tuple[_Job, LaunchList]]:
    """What to run next: all that is known, else one list for which the ranks must meet. Others may
    reach that meeting only once what is known has been run."""
    known = [job for job in jobs if job.participant.position < len(job.participant.agreed)] or jobs[
        :1
    ]
    return [(job, job.participant.next_late(functools.partial(_plan_left, job))) for job in known]


def _run(lists: Sequence[tuple[_Job, LaunchList]]) -> None:
    ordered = [(job, item, mine.mode) for job, mine in lists for item in mine.collectives]
    ordered.sort(key=lambda entry: entry[1].place)
    for launched in [job.launch(item, mode) for job, item, mode in ordered]:
        launched.finish()


def _plan_left(job: _Job) -> LaunchList:
    job.count_unused()
    return _planned(job, job.numbers)


def _planned(job: _Job, numbers: Iterable[int]) -> LaunchList:
    """Gradients in buckets that only depend on what ranks cannot differ in: last parameters first,
    as DDP does before it has seen a backward."""
    config = active_config() or FusionConfig()
    cap_bytes = bucket_caps(config, job.module.caps).cap_bytes
    buckets: list[tuple[Collective, int]] = []
    open_at: dict[tuple[object, ...], int] = {}
    for number in sorted(numbers, reverse=True):
        parameter = job.like(number)
        key = _key_of(job, parameter, config)
        kind = (key.dtype, key.reduce_dtype, key.device)
        index = open_at.get(kind)
        if index is None:
            owner = registry.owner_of(job.module.name_for(number))
            assert owner is not None, "it is managed"
            scaling = choose_scaling(key, owner, config.scaling, folds=False)
            name = dtype_name(key.reduce_dtype)
            item, size = Collective(scaling.divided, name, (), len(buckets)), 0
            index = open_at[kind] = len(buckets)
            buckets.append((item, size))
        item, size = buckets[index]
        numbers = (*item.parameters, number)
        size += parameter.nbytes
        buckets[index] = Collective(item.divided, item.dtype, numbers, item.place), size
        if size >= cap_bytes:
            del open_at[kind]
    return LaunchList(LATE, tuple(item for item, _ in buckets))


def _key_of(job: _Job, parameter: Tensor, config: FusionConfig) -> ReductionKey:
    dtype = parameter.dtype
    reduce_dtype = sent_as(job.ddp) or REDUCE_DTYPE_OF[config.reduce_dtype] or dtype
    if (
        job.module.calls_hook
        or not dtype.is_floating_point
        or dtype.itemsize <= reduce_dtype.itemsize
    ):
        reduce_dtype = dtype
    return ReductionKey(
        "all_reduce",
        job.module.group_name,
        "sum",
        dtype,
        reduce_dtype,
        parameter.device,
        _average(job),
    )


def _average(job: _Job) -> Scaling:
    """What makes the average of a sum over all ranks; a communication hook does that itself."""
    return NO_SCALING if job.module.calls_hook else Scaling("div", job.module.world_size)


def _launch(
    sent: list[Tensor], scaling: BucketScaling, mode: str, group_name: str
) -> tuple[list[Tensor], list[int] | None]:
    operation, in_order = scaling.reduce_op, scaling.method == "hook"
    if mode == "coalesced":
        return ALL_REDUCE_COALESCED(sent, operation, group_name), None
    if not any(tensor.numel() for tensor in sent):
        return [ALL_REDUCE(tensor, operation, group_name) for tensor in sent], None
    filled = [index for index, tensor in enumerate(sent) if tensor.numel()]
    numels = [sent[index].numel() for index in filled]
    places = lay_out(numels, [(1,)] * len(filled), sent[0].element_size(), in_order)
    bucket = torch.empty(sum(numels), dtype=sent[0].dtype, device=sent[0].device)
    offsets = [0] * len(sent)
    for index, place in zip(filled, places, strict=True):
        offsets[index] = place.offset
        bucket[place.offset : place.offset + sent[index].numel()] = sent[index].reshape(-1)
    return [ALL_REDUCE(bucket, operation, group_name)], offsets
