"""The forward of a managed DDP module: what DDP does around it, in a form that Dynamo can trace,
and the broadcast of buffers before it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from fusion_passes.graph.collectives import broadcast
from fusion_passes.reducer.communication import AllReduce
from fusion_passes.reducer.reducer import EXPECTED, LOCAL, UNFINISHED, reducer_of
from fusion_passes.torch_private import tree_leaves, tree_map_only
from fusion_passes.torch_private.autograd import flattened, unflattened
from fusion_passes.torch_private.ddp import (
    common_rank,
    divides_by_initial_size,
    is_joining,
    raise_as_ddp,
    tell_joined,
)
from fusion_passes.torch_private.dynamo import begin_no_graph

BUFFERS_IN: Final = "_ddp_fusion_buffers_in"
"""Attribute of a managed module: the name of its group, if it has buffers; else ``None``."""

RANGE: Final = "DistributedDataParallel.forward"
"""Eager DDP's name for its forward in a profile."""


class ManagedForward(DistributedDataParallel):
    """What a managed module has in place of DDP's forward and of its parts."""

    @begin_no_graph
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the wrapped module between the two parts that DDP adds."""
        if torch.compiler.is_dynamo_compiling():  # Dynamo would warn of the range, and omit it.
            inputs, kwargs = self._pre_forward(*inputs, **kwargs)
            return self._post_forward(self._run_ddp_forward(*inputs, **kwargs))
        with _untraced(torch.autograd.profiler.record_function, RANGE):
            inputs, kwargs = _untraced(self._pre_forward, *inputs, **kwargs)
            output = self._run_ddp_forward(*inputs, **kwargs)
            return _untraced(self._post_forward, output)

    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Broadcast buffers, and move inputs to the module's device."""
        if torch.is_grad_enabled() and getattr(self, UNFINISHED) is not None:
            refuse_unfinished(self)
        if is_joining(self):
            _begin_step(self)
        elif sends_buffers(self):
            broadcast_buffers(self)
        if self.device_ids and not torch.compiler.is_dynamo_compiling():
            moved, moved_kwargs = self.to_kwargs(inputs, kwargs, self.device_ids[0])
            return moved[0], moved_kwargs[0]
        if self.device_ids:  # Dynamo cannot trace DDP's own.
            device = torch.device(self.device_type, self.device_ids[0])
            return tree_map_only(Tensor, lambda tensor: tensor.to(device), (inputs, kwargs))
        return inputs, kwargs

    def _run_ddp_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        return self.module(*inputs, **kwargs)

    def _post_forward(self, output: Any) -> Any:
        """Note whether the next gradients are averaged: ``no_sync`` is decided here."""
        if torch.is_grad_enabled():
            setattr(self, LOCAL, not self.require_backward_grad_sync)
            if self.require_backward_grad_sync:
                setattr(self, EXPECTED, True)
                if self.find_unused_parameters and not torch.compiler.is_dynamo_compiling():
                    _note_outputs(self, output)
        if getattr(self, BUFFERS_IN):
            # DDP's rule: buffers are broadcast if the forward before was to be synchronised.
            is_synced = torch.is_grad_enabled() and self.require_backward_grad_sync
            self.require_forward_param_sync = is_synced
        return output


@torch.compiler.disable
def refuse_unfinished(ddp: DistributedDataParallel) -> None:
    """Raise the error of a backward before, if the next forward is to be averaged too."""
    error = getattr(ddp, UNFINISHED)
    if ddp.require_backward_grad_sync:
        reducer_of(ddp).leave_note_of_missing()
        raise_as_ddp(ddp, RuntimeError, error)


@torch.compiler.disable
def _note_outputs(ddp: DistributedDataParallel, output: Any) -> None:
    """Have the reducer know which outputs one forward has given."""
    reducer = reducer_of(ddp)
    if not reducer.is_static:
        tensors = (leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor))
        reducer.note_outputs(t.grad_fn for t in tensors if t.grad_fn is not None)


@torch.compiler.disable
def _begin_step(ddp: DistributedDataParallel) -> None:
    """With ``join``: tell ranks without inputs that this one has some, and what comes."""
    work: Any = Join.notify_join_context(ddp)
    _count_ranks(ddp, work)
    if sends_buffers(ddp):
        broadcast_buffers(ddp, common_rank(ddp, is_candidate=True))
    tell_joined(ddp)


def _count_ranks(ddp: DistributedDataParallel, work: Any) -> None:
    """Divide gradients as ``join`` was asked to: by the number of all ranks, or of those that have
    inputs for the step. A communication hook divides as it likes."""
    communication = reducer_of(ddp).communication
    if not isinstance(communication, AllReduce):
        return
    if divides_by_initial_size(ddp) or work is None:
        communication.count_ranks = None
        return

    def count() -> float:
        (number,) = work.get_future().wait()
        return float(number.item())

    communication.count_ranks = count


@torch.compiler.disable
def _untraced(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


# --- Buffers --------------------------------------------------------------------------------------


def prepare_buffers(ddp: DistributedDataParallel) -> None:
    """Let the forwards of a managed module broadcast its buffers, if it has some."""
    names = {name for name, _ in ddp.module.named_buffers()}.difference(ddp.parameters_to_ignore)
    setattr(ddp, BUFFERS_IN, ddp.process_group.group_name if names else None)


def sends_buffers(ddp: DistributedDataParallel) -> bool:
    """Whether the ranks get buffers before the next forward."""
    is_synced: bool = ddp.require_forward_param_sync and ddp.broadcast_buffers
    return is_synced and getattr(ddp, BUFFERS_IN) is not None


def broadcast_buffers(ddp: DistributedDataParallel, source: int = 0) -> None:
    """Give every rank the buffers of one, with one collective for each dtype and device."""
    is_traced = torch.compiler.is_dynamo_compiling()
    if not is_traced and ddp.process_group.size() == 1:
        return
    group_name = getattr(ddp, BUFFERS_IN)
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for name, buffer in ddp.module.named_buffers():
        if name not in ddp.parameters_to_ignore:
            kinds.setdefault((buffer.dtype, buffer.device), []).append(buffer)
    waited: Tensor | None = None
    with torch.no_grad():
        for buffers in kinds.values():
            flat = flattened(buffers)
            if is_traced and waited is not None:
                # It reads what was broadcast before, and so comes after it. Inductor can launch
                # independent ones in another order, and so ranks with other graphs: with
                # mode="lite", or in an evaluation (torch 2.11 to 2.14).
                flat = torch.cat([flat, (waited[:1] != 0).to(flat)])[: flat.numel()]
            waited = broadcast(flat, source, group_name)
            # A forward may have saved one for its backward: autograd sees no change of it, as with
            # DDP's own broadcast.
            targets, pieces = [buffer.data for buffer in buffers], unflattened(waited, buffers)
            if is_traced:  # Inductor has no kernel for lists of complex tensors.
                for target, piece in zip(targets, pieces, strict=True):
                    target.copy_(piece)
            else:
                torch._foreach_copy_(targets, pieces)
