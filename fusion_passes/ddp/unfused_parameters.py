"""The parameters that DDP's own reducer trains under the flag: a backward that reaches one must not
be traced."""

from __future__ import annotations

import weakref
from collections import Counter
from dataclasses import dataclass, field

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from fusion_passes.torch_private.ddp import parameters_of


@dataclass
class UnfusedParameters:
    """How many modules have each of them; by the parameter's id, which the modules keep alive."""

    _ids: Counter[int] = field(default_factory=Counter)

    def add(self, ddp: DistributedDataParallel) -> None:
        """Note those of a module, until it is freed."""
        ids = [id(parameter) for parameter in parameters_of(ddp)]
        self._ids.update(ids)
        weakref.finalize(ddp, self._remove, ids).atexit = False

    def _remove(self, ids: list[int]) -> None:
        self._ids -= Counter(ids)

    def __contains__(self, parameter: Tensor) -> bool:
        return id(parameter) in self._ids

    def __bool__(self) -> bool:
        return bool(self._ids)
