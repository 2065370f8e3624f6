"""Does by hand what a collective of a compiled graph does: packs gradients in the order in which
all ranks send them, scales, launches, waits, and gives the gradients their new values."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from fusion_passes.agreement.launches import Collective
from fusion_passes.agreement.participant import Participant
from fusion_passes.config import FusionConfig
from fusion_passes.ddp.comm_hooks import sent_as
from fusion_passes.ddp.managed_module import ManagedModule
from fusion_passes.ddp.unused import flags_like
from fusion_passes.graph.collectives import ALL_REDUCE, ALL_REDUCE_COALESCED, WAIT
from fusion_passes.graph.scaling import NO_SCALING, Scaling, scaled
from fusion_passes.plan.layout import as_it_lies, lay_out
from fusion_passes.plan.scaling import REDUCE_DTYPE_OF, BucketScaling, scaling_as_agreed
from fusion_passes.reductions.find import ReductionKey
from fusion_passes.torch_private.ddp import parameters_of


@dataclass(frozen=True)
class Job:
    """A DDP module with gradients that are still to be reduced.

    Attributes:
        has_inputs: whether this rank has had a backward. One that has run out of inputs sends
            zeros, and keeps the gradients that it has.
    """

    ddp: DistributedDataParallel
    module: ManagedModule
    participant: Participant
    has_inputs: bool = True

    def count_unused(self) -> None:
        """Count as zero, in a static graph, what other ranks have used and this one has not. One
        without inputs sends zeros for all, and keeps what it has."""
        for number in sorted(self.participant.unused) if self.has_inputs else ():
            parameter = parameters_of(self.ddp)[number]
            if parameter.grad is None and number not in self.module.sparse:
                parameter.grad = torch.zeros_like(parameter)
            self.participant.received.add(number)  # It has not come.
            self.participant.late[number] = False

    @property
    def own_use(self) -> frozenset[int]:
        """The parameters whose gradients this rank has, and must get the average of."""
        usage, received = self.participant.usage, self.participant.received
        if not self.has_inputs:
            return frozenset()
        return usage.own_use(received) if usage is not None else frozenset(received)

    @property
    def numbers(self) -> frozenset[int]:
        """What is still to be sent."""
        usage, kind = self.participant.usage, self.participant.kind
        left = frozenset(self.participant.late)
        if usage is None:
            return left
        sent = self.participant.sent_now | self.module.sparse
        left = (left | usage.sent_in(kind)) - sent - {usage.flags}
        return left | {usage.flags} if left or not self.participant.position else left

    def like(self, number: int) -> Tensor:
        """A tensor as what is sent under a number."""
        if self.participant.usage is not None and number == self.participant.usage.flags:
            return flags_like(self.ddp, self.module)
        return parameters_of(self.ddp)[number]

    def key_of(self, number: int, config: FusionConfig) -> ReductionKey:
        """What is sent under a number has in common with what may share its bucket."""
        like = self.like(number)
        dtype, calls_hook = like.dtype, self.module.owner(number).calls_hook
        reduce_dtype = sent_as(self.ddp) or REDUCE_DTYPE_OF[config.reduce_dtype] or dtype
        if calls_hook or not dtype.is_floating_point or dtype.itemsize <= reduce_dtype.itemsize:
            reduce_dtype = dtype
        return ReductionKey(
            "all_reduce",
            self.module.group_name,
            "sum",
            dtype,
            reduce_dtype,
            like.device,
            # A communication hook makes the average itself.
            NO_SCALING if calls_hook else Scaling("div", self.module.world_size),
            calls_hook,
        )

    def launch(self, item: Collective, mode: str) -> Launched:
        """Pack gradients and launch their collective, in a mode of :class:`LaunchList`."""
        gradients = [self._gradient(number) for number in item.parameters]
        scaling = self._scaling_of(item)
        sent = [
            self._to_send(gradient, number, item, scaling.before)
            for gradient, number in zip(gradients, item.parameters, strict=True)
        ]
        pieces, offsets = _launch(sent, scaling, mode, self.module.group_name)
        return Launched(self, item, scaling.after, gradients, pieces, offsets)

    def _scaling_of(self, item: Collective) -> BucketScaling:
        key = self.key_of(item.parameters[0], FusionConfig())
        return scaling_as_agreed(key, item.divided, "auto", folds=False)

    def _gradient(self, number: int) -> Tensor:
        like, usage = self.like(number), self.participant.usage
        if usage is not None and number == usage.flags:
            return like.copy_(torch.tensor(usage.flags_of(self.own_use)))
        if like.grad is None or not self.has_inputs:
            assert usage is not None or not self.has_inputs, "its hook has run"
            return torch.zeros_like(like)
        if like.grad.layout is not torch.strided:
            raise RuntimeError(
                f"{self.module.parameters[number]} of {self.module.label} has a gradient of layout "
                f"{like.grad.layout}, which DDP reduces for nn.Embedding(sparse=True) and "
                "nn.EmbeddingBag(sparse=True) only, as they were when it was constructed."
            )
        detached: Tensor = like.grad.detach()
        return detached

    def _to_send(self, gradient: Tensor, number: int, item: Collective, scaling: Scaling) -> Tensor:
        """The gradient's elements in the order in which all ranks send them, in a dtype and scale
        that the collective expects."""
        is_divided = self.participant.late.get(number, False)
        average = self.key_of(number, FusionConfig()).scaling
        left = scaling.without(average if is_divided else NO_SCALING)
        gradient = scaled(gradient, left.kind, left.value)
        flat = as_it_lies(gradient, self.module.strides_of(number))
        dtype: torch.dtype = getattr(torch, item.dtype)
        real: Tensor = torch.view_as_real(flat) if flat.is_complex() else flat
        cast: Tensor = real.to(dtype.to_real())
        return cast


@dataclass(frozen=True)
class Launched:
    """A collective that was launched and not waited for.

    Attributes:
        scaling: what the results are scaled by.
        pieces: what it gives: the bucket, or the tensors one by one.
        offsets: where each gradient lies in the bucket, if there is one.
    """

    job: Job
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
            if usage is not None and number == usage.flags:
                usage.note_flags(average)
            elif usage is not None and number not in self.job.own_use:
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
