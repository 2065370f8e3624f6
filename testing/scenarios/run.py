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
from testing import models
from testing.models import Batch

T = TypeVar("T")

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

Tensors = dict[str, Tensor | None]


class Launches(NamedTuple):
    """Collectives of DDP's groups up to a backward, since the one before.

    Attributes:
        number: of them.
        synced: whether gradients were to be averaged.
    """

    number: int
    synced: bool


class Run:
    """What a target trains with, and where it notes what is to be compared.

    A target is called twice, with eager DDP first. It must do the same each time, and leave to this
    object what differs: :meth:`ddp` and :meth:`compile`.

    Attributes:
        is_fused: whether it trains under the flag, and compiled.
        dtype: of its gradients, or of autocast.
        device: of this rank.
        backwards: gradients after each backward, by the parameter's name.
        end: what is compared beside them, by name.
        others: the same, of what is no tensor.
        launches: of each backward.
    """

    def __init__(self, is_fused: bool, dtype: torch.dtype, device: torch.device) -> None:
        self.is_fused = is_fused
        self.dtype = dtype
        self.device = device
        self.backwards: list[Tensors] = []
        self.end: Tensors = {}
        self.others: dict[str, Any] = {}
        self.launches: list[Launches] = []
        self._groups: dict[int, Any] = {}
        self._launched = 0
        self._parameters: weakref.WeakKeyDictionary[nn.Module, dict[str, nn.Parameter]] = (
            weakref.WeakKeyDictionary()
        )

    def ddp(self, module: nn.Module, **options: Any) -> DistributedDataParallel:
        """``module`` on this rank's device, in DDP."""
        wrapped = DistributedDataParallel(module.to(self.device), **options)
        self.manage(wrapped)
        # With tensor parallelism, torch's forward hooks put others in their places.
        self._parameters[wrapped] = dict(wrapped.named_parameters())
        return wrapped

    def manage(self, module: DistributedDataParallel) -> None:
        """Count the launches of a module that :meth:`ddp` did not make."""
        self._groups[id(module.process_group)] = module.process_group
        self._count_launches()  # What the constructor does is no backward's.

    def compile(self, target: T, **options: Any) -> T:
        """``torch.compile``, but for eager DDP."""
        if not self.is_fused:
            return target
        return torch.compile(target, **options)  # type: ignore[call-overload]

    def compiled(self, module: nn.Module, **options: Any) -> tuple[DistributedDataParallel, Any]:
        """:meth:`ddp` of a module, and what :meth:`compile` makes of that."""
        ddp = self.ddp(module, **options)
        return ddp, self.compile(ddp)

    def mlp(self, depth: int = 3, outputs: int = models.OUTPUTS) -> nn.Sequential:
        """An exact model in the run's dtype. In 16 bits, two layers stay exact, and no more."""
        depth = depth if self.dtype.itemsize >= torch.float32.itemsize else min(depth, 2)
        return models.mlp(depth, outputs, self.dtype)

    def rows(self, step: int, micro: int = 0, *, seat: int | None = None, size: int = 4) -> Batch:
        """A batch of whole numbers in the run's dtype for an exact model, another one in each
        ``step`` and ``micro``. Ranks of the same ``seat`` get the same; by default, each its own.
        """
        draw = functools.partial(models.whole_rows, dtype=self.dtype)
        return self.drawn(draw, step, micro, seat=seat, size=size)

    def drawn(
        self, draw: Any, step: int, micro: int = 0, *, seat: int | None = None, size: int = 4
    ) -> Batch:
        """A batch that ``draw(generator, size)`` makes; see :meth:`rows`."""
        seat = dist.get_rank() if seat is None else seat
        generator = Generator().manual_seed((step * 100 + micro) * 100 + seat)
        inputs, targets = draw(generator, size)
        return inputs.to(self.device), targets.to(self.device)

    def mesh(self, shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
        return init_device_mesh(self.device.type, shape, mesh_dim_names=names)

    def note_backward(self, model: nn.Module, *, synced: bool = True) -> None:
        """Note the gradients of all parameters; ``synced`` if they were to be averaged."""
        gradients = {name: parameter.grad for name, parameter in self._parameters_of(model).items()}
        self.backwards.append(_detached(gradients))
        self.launches.append(Launches(self._count_launches(), synced))

    def _count_launches(self) -> int:
        """Collectives since the last call; none can hide, for each backend numbers them."""
        total = sum(group._get_sequence_number_for_group() for group in self._groups.values())
        launched, self._launched = total - self._launched, total
        return launched

    def _parameters_of(self, model: nn.Module) -> Mapping[str, nn.Parameter]:
        """By name: those that a DDP module was made with, where ``model`` is one."""
        return self._parameters.get(model) or dict(model.named_parameters())

    def note_end(self, model: nn.Module) -> None:
        """Note parameters and buffers."""
        self.end |= _detached(self._parameters_of(model))
        self.end |= _detached(dict(model.named_buffers()))

    def note_values(self, **values: Any) -> None:
        """Note numbers or tensors, by name."""
        self.end |= {
            name: torch.as_tensor(value).detach().clone() for name, value in values.items()
        }

    def note(self, name: str, value: Any) -> None:
        """Note a value that must equal eager DDP's: words of an error, a number."""
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
    """This rank's part, dense."""
    if hasattr(tensor, "to_local"):
        tensor = tensor.to_local()
    if getattr(tensor, "is_sparse", False):
        tensor = tensor.to_dense()
    assert isinstance(tensor, Tensor)
    return tensor


def plain_name(name: str) -> str:
    """A parameter's name without the levels that wrappers add."""
    return name.replace("module.", "").replace("_orig_mod.", "")
