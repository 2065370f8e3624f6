"""What a forward leaves for the backwards that follow: whether DDP expects gradients of them."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from fusion_passes.reducer.reducer import EXPECTED, LOCAL

__all__ = ["EXPECTED", "LOCAL"]


def note_forward(ddp: Any) -> None:
    """Note after a forward whether gradients are to be averaged now. Stores constants and reads
    none of them, so that a traced forward needs no guard on them."""
    if torch.is_grad_enabled():
        if ddp.require_backward_grad_sync:
            setattr(ddp, EXPECTED, True)
            setattr(ddp, LOCAL, False)
        else:
            setattr(ddp, LOCAL, True)


class ReducerOfManaged:
    """Stands for the C++ reducer of a managed module, which does nothing.

    ``torch.distributed.pipelining`` runs all forwards under ``no_sync``, and calls
    ``prepare_for_backward`` before the backward that is to be averaged. ``join`` lets ranks without
    inputs rebuild its buckets, which is a collective that the others do not come to.
    """

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._ddp = weakref.ref(ddp)
        self._reducer: Any = ddp.reducer

    def prepare_for_backward(self, _: Any) -> None:
        # Not the C++ reducer's, whose hooks would then average the gradients once more.
        setattr(self._ddp(), EXPECTED, True)

    def _rebuild_buckets(self) -> bool:
        return False

    def _push_all_rebuilt_params(self) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)
