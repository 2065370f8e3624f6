"""The forward of a managed DDP module: the steps that DDP adds around the wrapped module's forward,
in a form that Dynamo can trace, and the broadcast of buffers before it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from fusion_passes.ddp.own_reducer import refuse_if_sharded
from fusion_passes.graph.collectives import broadcast
from fusion_passes.reducer.averaged_module import STATE, State
from fusion_passes.reducer.communication import AllReduce
from fusion_passes.reducer.reducer import reducer_of
from fusion_passes.torch_private import tree_leaves, tree_map_only
from fusion_passes.torch_private.ddp import (
    common_rank,
    divides_by_initial_size,
    is_joining,
    tell_joined,
)
from fusion_passes.torch_private.dynamo import begin_no_graph, skips_method
from fusion_passes.torch_private.profiling import range_in_profile

BUFFERS_IN: Final = "_ddp_fusion_buffers_in"
"""Attribute of a managed module: the name of its process group if DDP is to broadcast buffers of
it, else ``None``."""

BEGINS_GRAPH: Final = "_ddp_fusion_begins_graph"
"""Attribute of a managed module: whether Dynamo skips the forward of the wrapped module, so that
its graph must begin in a function that calls it."""

RANGE: Final = "DistributedDataParallel.forward"
"""Name of the profiler range in which eager DDP runs its forward."""


class ManagedForward(DistributedDataParallel):
    """The methods of a managed module that replace DDP's forward and the steps around it."""

    @begin_no_graph
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the wrapped module between DDP's pre-forward and post-forward steps."""
        if torch.compiler.is_dynamo_compiling():  # Dynamo would warn about the range, and skip it.
            inputs, kwargs = self._pre_forward(*inputs, **kwargs)
            return self._post_forward(self._run_ddp_forward(*inputs, **kwargs))
        entered, inputs, kwargs = _enter(self._pre_forward, inputs, kwargs)
        try:
            output = self._run_ddp_forward(*inputs, **kwargs)
        except BaseException:
            _leave(entered)
            raise
        return _leave(entered, self._post_forward, output)

    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Broadcast buffers, and move inputs to the module's device."""
        if torch.is_grad_enabled() and not torch.compiler.is_dynamo_compiling():
            check_finished(self)
        if is_joining(self):
            _begin_step(self)
        elif sends_buffers(self):
            broadcast_buffers(self)
        if self.device_ids and not torch.compiler.is_dynamo_compiling():
            moved, moved_kwargs = self.to_kwargs(inputs, kwargs, self.device_ids[0])
            return moved[0], moved_kwargs[0]
        if self.device_ids:  # Dynamo cannot trace DDP's ``to_kwargs``.
            device = torch.device(self.device_type, self.device_ids[0])
            return tree_map_only(Tensor, lambda tensor: tensor.to(device), (inputs, kwargs))
        return inputs, kwargs

    @begin_no_graph
    def _run_ddp_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the wrapped module, with Dynamo's graphs beginning where they begin without DDP. A
        graph that begins here would be traced in vain if the module breaks it."""
        if getattr(self, BEGINS_GRAPH):
            return _begin_graph(self.module, *inputs, **kwargs)
        return self.module(*inputs, **kwargs)

    def _post_forward(self, output: Any) -> Any:
        """Note that the next gradients are averaged: ``no_sync`` takes effect here."""
        if torch.is_grad_enabled() and self.require_backward_grad_sync:
            setattr(self, STATE, State.EXPECTED)
            if self.find_unused_parameters and not torch.compiler.is_dynamo_compiling():
                _note_outputs(self, output)
        if getattr(self, BUFFERS_IN):
            # DDP's rule: a forward broadcasts buffers if the previous forward ran with gradients
            # enabled and outside ``no_sync``.
            is_synced = torch.is_grad_enabled() and self.require_backward_grad_sync
            self.require_forward_param_sync = is_synced
        return output


def check_finished(ddp: DistributedDataParallel) -> None:
    """Raise the error that an unfinished backward has left, if any, unless this runs under
    ``no_sync``. Where Dynamo traces the forward, the next backward raises it instead."""
    reducer = reducer_of(ddp)
    if reducer.module.state is State.UNFINISHED and ddp.require_backward_grad_sync:
        reducer.refuse_unfinished()


@torch.compiler.disable
def _note_outputs(ddp: DistributedDataParallel, output: Any) -> None:
    """Tell the reducer the autograd nodes of one forward's outputs, unless the graph is static."""
    reducer = reducer_of(ddp)
    if reducer.used.is_found:
        tensors = (leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor))
        reducer.outputs.note(t.grad_fn for t in tensors if t.grad_fn is not None)


@torch.compiler.disable
def _begin_step(ddp: DistributedDataParallel) -> None:
    """With ``join``: tell ranks without inputs that this rank has some, broadcast buffers, and tell
    those ranks whether gradients of this step are averaged."""
    refuse_if_sharded(
        ddp,
        "join, since ranks without inputs would take no optimizer step",
        "Give all ranks equally many batches",
    )
    work: Any = Join.notify_join_context(ddp)
    _count_ranks(ddp, work)
    if sends_buffers(ddp):
        broadcast_buffers(ddp, common_rank(ddp, is_candidate=True))
    tell_joined(ddp)


def _count_ranks(ddp: DistributedDataParallel, work: Any) -> None:
    """Set the divisor of gradients that ``join(divide_by_initial_world_size=...)`` asks for: the
    number of all ranks, or of the ranks with inputs for this step. A communication hook divides by
    what it likes."""
    communication = reducer_of(ddp).queue.communication
    if not isinstance(communication, AllReduce):
        return
    if divides_by_initial_size(ddp) or work is None:
        communication.count_ranks = None
        return

    def count() -> float:
        (number,) = work.get_future().wait()
        return float(number.item())

    communication.count_ranks = count


def _begin_graph(module: nn.Module, *inputs: Any, **kwargs: Any) -> Any:
    """Run a module in a frame in which Dynamo begins a graph."""
    return module(*inputs, **kwargs)


@torch.compiler.disable
def _enter(
    pre_forward: Callable[..., Any], inputs: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Enter the profiler range, and run DDP's pre-forward steps. A call of a function that Dynamo
    does not trace takes ten microseconds, so there is one before the forward and one after it."""
    entered = range_in_profile(RANGE, prefix="")
    entered.__enter__()
    try:
        inputs, kwargs = pre_forward(*inputs, **kwargs)
    except BaseException:
        entered.__exit__(None, None, None)
        raise
    return entered, inputs, kwargs


@torch.compiler.disable
def _leave(
    entered: Any, post_forward: Callable[[Any], Any] = lambda _: None, output: Any = None
) -> Any:
    """Run DDP's post-forward steps, unless the forward has raised an error, and leave the range."""
    try:
        return post_forward(output)
    finally:
        entered.__exit__(None, None, None)


def prepare_forward(ddp: DistributedDataParallel) -> None:
    """Decide where Dynamo begins graphs of a managed module, as ``torch.compile`` does without DDP,
    and have its forwards broadcast the buffers that DDP does not ignore."""
    setattr(ddp, BEGINS_GRAPH, skips_method(ddp.module.forward))
    names = {name for name, _ in ddp.module.named_buffers()}.difference(ddp.parameters_to_ignore)
    setattr(ddp, BUFFERS_IN, ddp.process_group.group_name if names else None)


# --- Buffers --------------------------------------------------------------------------------------


def sends_buffers(ddp: DistributedDataParallel) -> bool:
    """Whether buffers are broadcast before the next forward."""
    is_synced: bool = ddp.require_forward_param_sync and ddp.broadcast_buffers
    return is_synced and getattr(ddp, BUFFERS_IN) is not None


def broadcast_buffers(ddp: DistributedDataParallel, source: int = 0) -> None:
    """Broadcast the buffers of rank ``source``, with one collective for each dtype and device."""
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
            flat = torch.cat([buffer.reshape(-1) for buffer in buffers])
            if is_traced and waited is not None:
                # This broadcast reads the result of the previous one, so it stays behind that one.
                # Inductor may reorder independent broadcasts, differently on ranks with different
                # graphs: with mode="lite", or in an evaluation (torch 2.11 to 2.14).
                flat = torch.cat([flat, (waited[:1] != 0).to(flat)])[: flat.numel()]
            waited = broadcast(flat, source, group_name)
            # An earlier forward may have saved a buffer for its backward. A write through .data
            # does not bump the version that autograd checks, as with DDP's own broadcast.
            targets = [buffer.data for buffer in buffers]
            parts = waited.split([target.numel() for target in targets])
            pieces = [part.view_as(target) for part, target in zip(parts, targets, strict=True)]
            if is_traced:  # Inductor has no kernel for lists of complex tensors.
                for target, piece in zip(targets, pieces, strict=True):
                    target.copy_(piece)
            else:
                torch._foreach_copy_(targets, pieces)
