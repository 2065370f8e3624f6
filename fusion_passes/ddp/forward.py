"""The forward of a managed module: as DDP's, which Dynamo cannot trace, since it skips DDP's file.

A compiled module runs what stands around the wrapped module as it is, before and after its graph:
buffers are those of rank 0 before the graph begins, and no setting of DDP's is a guard of it, so
that ``no_sync`` compiles nothing anew. Only where a compiled function calls the module is all of it
traced.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from fusion_passes.ddp.buffers import BUFFERS_IN, broadcast_buffers, sends_buffers
from fusion_passes.ddp.expecting import note_forward
from fusion_passes.ddp.failed_rounds import refuse_unfinished
from fusion_passes.ddp.foreign import begin_forward, end_forward
from fusion_passes.ddp.joining import begin_step
from fusion_passes.ddp.unfinished import UNFINISHED
from fusion_passes.torch_private import begin_no_graph, disable_dynamo, tree_map_only
from fusion_passes.torch_private.ddp import is_joining

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
            _refuse(self)
        if is_joining(self):
            _begin_step(self)
        elif sends_buffers(self):
            broadcast_buffers(self)
        if not torch.compiler.is_dynamo_compiling():
            begin_forward(self)  # Buffers are DDP's own.
        if self.device_ids:
            device = torch.device(self.device_type, self.device_ids[0])
            return tree_map_only(Tensor, lambda tensor: tensor.to(device), (inputs, kwargs))
        return inputs, kwargs

    def _run_ddp_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        return self.module(*inputs, **kwargs)

    def _post_forward(self, output: Any) -> Any:
        if not torch.compiler.is_dynamo_compiling():
            end_forward(self)
        note_forward(self)
        if getattr(self, BUFFERS_IN):
            # DDP's rule: buffers are broadcast if the forward before was to be synchronised.
            is_synced = torch.is_grad_enabled() and self.require_backward_grad_sync
            self.require_forward_param_sync = is_synced
        return output


@disable_dynamo
def _untraced(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


_begin_step = disable_dynamo(begin_step)
_refuse = disable_dynamo(refuse_unfinished)
