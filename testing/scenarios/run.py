"""One training run on one rank: with eager DDP, or under the flag with ``torch.compile``."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import torch
import torch._dynamo
import torch.distributed as dist
from torch import Generator, Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import fusion_passes  # noqa: F401  Torch has the flag then.
from fusion_passes.sharded.modules import sharded
from testing import models
from testing.models import Batch

T = TypeVar("T")

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

Tensors = dict[str, Tensor | None]


class Launches(NamedTuple):
    """Collectives of DDP's groups between the previous backward and the end of this one.

    Attributes:
        number: number of collectives.
        synced: whether gradients were to be averaged.
    """

    number: int
    synced: bool


class Run:
    """The tools of a target for training and for recording the values that are compared.

    A target is called twice, first with eager DDP. It must do the same both times, and use this
    object for everything that differs: :meth:`ddp` and :meth:`compile`.

    Attributes:
        is_fused: whether it trains under the flag, and compiled.
        dtype: dtype of the gradients, or of autocast.
        device: device of this rank.
        backwards: gradients after each backward, by the parameter's name.
        end: further tensors to compare, by name.
        others: further values to compare that are not tensors, by name.
        launches: launches of each backward.
        unknown: with ``shard_optimizer``, gradients of other ranks' parameters that eager DDP would
            not have so: (number of the backward, name of the parameter).
    """

    def __init__(self, is_fused: bool, dtype: torch.dtype, device: torch.device) -> None:
        self.is_fused = is_fused
        self.dtype = dtype
        self.device = device
        self.backwards: list[Tensors] = []
        self.end: Tensors = {}
        self.others: dict[str, Any] = {}
        self.launches: list[Launches] = []
        self.unknown: set[tuple[int, str]] = set()
        self._groups: dict[int, Any] = {}
        self._launched = 0
        self._parameters: weakref.WeakKeyDictionary[nn.Module, dict[str, nn.Parameter]] = (
            weakref.WeakKeyDictionary()
        )

    def ddp(self, module: nn.Module, **options: Any) -> DistributedDataParallel:
        """``module`` on this rank's device, in DDP."""
        wrapped = DistributedDataParallel(module.to(self.device), **options)
        self.manage(wrapped)
        # With tensor parallelism, torch's forward hooks replace the parameters.
        self._parameters[wrapped] = dict(wrapped.named_parameters())
        return wrapped

    def manage(self, module: DistributedDataParallel) -> None:
        """Count the launches of a module that :meth:`ddp` did not construct."""
        self._groups[id(module.process_group)] = module.process_group
        self._count_launches()  # The collectives of the constructor belong to no backward.

    def compile(self, target: T, **options: Any) -> T:
        """``target`` under ``torch.compile``; ``target`` itself for eager DDP."""
        if not self.is_fused:
            return target
        return torch.compile(target, **options)  # type: ignore[call-overload]

    def compiled(self, module: nn.Module, **options: Any) -> tuple[DistributedDataParallel, Any]:
        """:meth:`ddp` of a module, and its compiled version."""
        ddp = self.ddp(module, **options)
        return ddp, self.compile(ddp)

    def mlp(self, depth: int = 3, outputs: int = models.OUTPUTS) -> nn.Sequential:
        """An exact model in the run's dtype. In 16 bits, at most two layers stay exact."""
        depth = depth if self.dtype.itemsize >= torch.float32.itemsize else min(depth, 2)
        return models.mlp(depth, outputs, self.dtype)

    def rows(self, step: int, micro: int = 0, *, seat: int | None = None, size: int = 4) -> Batch:
        """A batch of integers in the run's dtype for an exact model, a different one for each
        ``step`` and ``micro``. Ranks with the same ``seat`` get the same batch; by default, each
        rank gets its own.
        """
        draw = functools.partial(models.whole_rows, dtype=self.dtype)
        return self.drawn(draw, step, micro, seat=seat, size=size)

    def drawn(
        self, draw: Any, step: int, micro: int = 0, *, seat: int | None = None, size: int = 4
    ) -> Batch:
        """A batch from ``draw(generator, size)``; see :meth:`rows`."""
        seat = dist.get_rank() if seat is None else seat
        generator = Generator().manual_seed((step * 100 + micro) * 100 + seat)
        inputs, targets = draw(generator, size)
        return inputs.to(self.device), targets.to(self.device)

    def mesh(self, shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
        return init_device_mesh(self.device.type, shape, mesh_dim_names=names)

    def note_backward(self, model: nn.Module, *, synced: bool = True) -> None:
        """Record the gradients of all parameters; ``synced``: whether they were to be averaged."""
        number, parameters = self._count_launches(), self._parameters_of(model)
        gradients = {name: parameter.grad for name, parameter in parameters.items()}
        if self.is_fused and sharded():
            number = number if synced else 0  # Parameters are sent too.
            self._add_of_owners(gradients, parameters, synced=synced)
            self._count_launches()
        self.backwards.append(_detached(gradients))
        self.launches.append(Launches(number, synced))

    def _add_of_owners(
        self, gradients: Any, parameters: Mapping[str, nn.Parameter], *, synced: bool
    ) -> None:
        """With ``shard_optimizer``, add the averages that other ranks have."""
        owned = {
            id(reducer.parameters.all[n]): (reducer, n, n in communication.elsewhere)
            for reducer, communication in sharded()
            for n in reducer.parameters.numbers
        }
        for name, parameter in parameters.items():
            if id(parameter) not in owned:
                continue
            reducer, number, is_elsewhere = owned[id(parameter)]
            averages = [gradients[name]]
            if synced:
                root = reducer.parameters.kinds[number].owner
                dist.broadcast_object_list(averages, group=reducer.module.group, group_src=root)
            if is_elsewhere and synced and gradients[name] is None:
                gradients[name] = averages[0]
            elif is_elsewhere:
                self.unknown.add((len(self.backwards), plain_name(name)))

    def _count_launches(self) -> int:
        """Count collectives since the last call; none is missed, because each backend numbers
        them."""
        total = sum(group._get_sequence_number_for_group() for group in self._groups.values())
        launched, self._launched = total - self._launched, total
        return launched

    def _parameters_of(self, model: nn.Module) -> Mapping[str, nn.Parameter]:
        """Parameters by name: those that the DDP module was constructed with, if ``model`` is
        one."""
        return self._parameters.get(model) or dict(model.named_parameters())

    def note_end(self, model: nn.Module) -> None:
        """Record parameters and buffers."""
        model.state_dict()  # Waits for parameters that are on their way.
        self.end |= _detached(self._parameters_of(model))
        self.end |= _detached(dict(model.named_buffers()))

    def note_values(self, **values: Any) -> None:
        """Record numbers or tensors by name."""
        self.end |= {
            name: torch.as_tensor(value).detach().clone() for name, value in values.items()
        }

    def note(self, name: str, value: Any) -> None:
        """Record a value that must equal eager DDP's: the text of an error, a number."""
        self.others[name] = value


@contextlib.contextmanager
def synced_if(model: nn.Module, synced: bool) -> Iterator[None]:
    """``no_sync`` of the DDP modules in a model, unless ``synced``."""
    with contextlib.ExitStack() as stack:
        for module in () if synced else model.modules():
            if isinstance(module, DistributedDataParallel):
                stack.enter_context(module.no_sync())
        yield


def _detached(tensors: Mapping[str, Any]) -> Tensors:
    return {
        plain_name(name): None if tensor is None else _local(tensor.detach()).clone()
        for name, tensor in tensors.items()
    }


def _local(tensor: Any) -> Tensor:
    """This rank's part of a tensor, dense."""
    if hasattr(tensor, "to_local"):
        tensor = tensor.to_local()
    if getattr(tensor, "is_sparse", False):
        tensor = tensor.to_dense()
    assert isinstance(tensor, Tensor)
    return tensor


def plain_name(name: str) -> str:
    """A parameter's name without the prefixes that wrappers add."""
    return name.replace("module.", "").replace("_orig_mod.", "")
