"""One training run on one rank: with eager DDP, under the flag with ``torch.compile``, or compiled
without DDP, with gradients that are averaged by hand."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple, TypeVar, cast

import torch
import torch._dynamo
import torch.distributed as dist
from torch import Generator, Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from fusion_passes.reducer.reducer import REDUCER, Reducer, reducer_of
from testing import models
from testing.models import Batch

Way = Literal["eager", "fused", "by hand"]
T = TypeVar("T")

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

Tensors = dict[str, Tensor | None]


class Launches(NamedTuple):
    """Collectives of DDP's groups up to a backward, since the one before.

    Attributes:
        number: without those with which buckets are rebuilt.
        synced: whether gradients were to be averaged.
        is_first: whether buckets were rebuilt at its end: it had others than those that follow.
    """

    number: int
    synced: bool
    is_first: bool


class Run:
    """What a target trains with, and where it notes what is to be compared.

    A target is called once for each way, with ``"eager"`` first. It must do the same each time, and
    leave to this object what differs: :meth:`ddp` and :meth:`compile`.

    Attributes:
        way: which.
        dtype: of its gradients, or of autocast.
        device: of this rank.
        backwards: gradients after each backward, by the parameter's name.
        end: what is compared beside them, by name.
        others: the same, of what is no tensor.
        launches: of each backward.
    """

    def __init__(self, way: Way, dtype: torch.dtype, device: torch.device) -> None:
        self.way = way
        self.dtype = dtype
        self.device = device
        self.backwards: list[Tensors] = []
        self.end: Tensors = {}
        self.others: dict[str, Any] = {}
        self.launches: list[Launches] = []
        self._groups: dict[int, Any] = {}
        self._launched = 0
        self._averaged_by_hand: list[nn.Module] = []
        self._wrapped: list[weakref.ref[DistributedDataParallel]] = []
        self._rebuilt: weakref.WeakSet[Reducer] = weakref.WeakSet()
        self._parameters: weakref.WeakKeyDictionary[nn.Module, dict[str, nn.Parameter]] = (
            weakref.WeakKeyDictionary()
        )

    @property
    def is_fused(self) -> bool:
        return self.way == "fused"

    def ddp(self, module: nn.Module, **options: Any) -> DistributedDataParallel:
        """``module`` on this rank's device, in DDP; as it is, where gradients are averaged by
        hand."""
        module = module.to(self.device)
        if self.way == "by hand":
            self._averaged_by_hand.append(module)
            return cast("DistributedDataParallel", module)
        wrapped = DistributedDataParallel(module, **options)
        self.manage(wrapped)
        # With tensor parallelism, torch's forward hooks put others in their places.
        self._parameters[wrapped] = dict(wrapped.named_parameters())
        return wrapped

    def manage(self, module: DistributedDataParallel) -> None:
        """Count the launches of a module that :meth:`ddp` did not make."""
        self._wrapped.append(weakref.ref(module))
        self._groups[id(module.process_group)] = module.process_group
        self._count_launches()  # What the constructor does is no backward's.
        self._count_rebuilt()

    def compile(self, target: T, **options: Any) -> T:
        """``torch.compile``, but for eager DDP."""
        if self.way == "eager":
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
        """A batch of whole numbers in the run's dtype, for an exact model.

        Args:
            step: of the optimizer.
            micro: backward of that step.
            seat: ranks with the same number get the same batch; by default, each its own.
            size: rows.
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

    def prepare_forward(self) -> None:
        """Do what a forward of DDP does first, where there is none."""
        for module in self._averaged_by_hand:
            for buffer in module.buffers():
                dist.broadcast(buffer, 0)

    def note_backward(self, model: nn.Module, *, synced: bool = True) -> None:
        """Note the gradients of all parameters.

        Args:
            model: what was trained.
            synced: whether gradients of DDP modules were to be averaged.
        """
        for module in self._averaged_by_hand if synced else ():
            average_by_hand(module)
        gradients = {name: parameter.grad for name, parameter in self._parameters_of(model).items()}
        self.backwards.append(_detached(gradients))
        launched, rebuilt = self._count_launches(), self._count_rebuilt()
        self.launches.append(Launches(launched - rebuilt, synced, rebuilt > 0))

    def _count_launches(self) -> int:
        """Collectives since the last call; none can hide, for each backend numbers them."""
        total = sum(group._get_sequence_number_for_group() for group in self._groups.values())
        launched, self._launched = total - self._launched, total
        return launched

    def _count_rebuilt(self) -> int:
        """Reducers that have rebuilt their buckets since the last call: with a collective each."""
        modules = filter(None, (reference() for reference in self._wrapped))
        reducers = {reducer_of(module) for module in modules if REDUCER in module.__dict__}
        new = {r for r in reducers if r.has_rebuilt_buckets} - set(self._rebuilt)
        self._rebuilt.update(new)
        return len(new)

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


def average_by_hand(module: nn.Module) -> None:
    """Average the gradients of a module over all ranks, one by one."""
    for parameter in module.parameters():
        if parameter.grad is not None:
            average = parameter.grad / dist.get_world_size()
            dist.all_reduce(average)
            parameter.grad.copy_(average)


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
