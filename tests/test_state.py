"""The package declares all state that it keeps, and drops each entry at the end of its lifetime."""

from __future__ import annotations

import ast
import contextlib
import copy
import dataclasses
import enum
import functools
import gc
import importlib
import inspect
import logging
import pkgutil
import re
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._inductor.config as inductor_config
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import fusion_passes
from fusion_passes.torch_private.registered_memory import RegisteredMemory
from testing.state import GLOBALS, Lifetime, of_lifetimes, value_of
from tests.support.fake_world import fake_world, two_layers
from tests.support.registrations import Backend, Group, on_the_host

MODULES = [
    importlib.import_module(found.name)
    for found in pkgutil.walk_packages(fusion_passes.__path__, "fusion_passes.")
]

# --- All of it is declared -----------------------------------------------------------------------

CONSTANTS = (
    type(None),
    bool,
    int,
    float,
    str,
    type,
    enum.Enum,
    types.FunctionType,
    property,
    classmethod,
    staticmethod,
    functools.cached_property,
    types.GenericAlias,
    types.MemberDescriptorType,
    logging.Logger,
    re.Pattern,
    torch.distributed.BuiltinCommHookType,
    torch.dtype,
    torch.Tag,
    torch.library.Library,
    torch._ops.OpOverload,
    torch._ops.OpOverloadPacket,
    torch._ops._OpNamespace,
)
"""Types of globals that do not change; tuples, frozen sets, read-only mappings and frozen
dataclasses of these are constants too."""


def _is_constant(value: object) -> bool:
    if isinstance(value, tuple | frozenset):
        return all(map(_is_constant, value))
    if isinstance(value, types.MappingProxyType):
        return all(map(_is_constant, (*value.keys(), *value.values())))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        is_frozen = type(value).__dataclass_params__.frozen  # type: ignore[attr-defined]
        return is_frozen and all(map(_is_constant, vars(value).values()))
    is_type = type(value).__module__ in ("typing", "types")
    return is_type or inspect.isbuiltin(value) or isinstance(value, CONSTANTS)


def _bound_in(source: str) -> Iterator[str]:
    """The names that a module binds itself, instead of importing them."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (target.id for target in targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name


def undeclared(module: types.ModuleType) -> set[str]:
    """The names of mutable values of a module, and of its classes, that are not declared."""
    ids = {id(value_of(name)) for name in GLOBALS}
    names = _bound_in(inspect.getsource(module))
    found = {name: vars(module)[name] for name in names if name != "__all__"}
    for name, kind in list(found.items()):
        is_own = isinstance(kind, type) and kind.__module__ == module.__name__
        if is_own and not issubclass(kind, enum.Enum):
            for attribute, value in vars(kind).items():
                if not (attribute.startswith("__") or attribute == "_abc_impl"):
                    found[f"{name}.{attribute}"] = value
    return {
        name for name, value in found.items() if id(value) not in ids and not _is_constant(value)
    }


def test_no_module_keeps_what_is_not_declared() -> None:
    for module in MODULES:
        assert undeclared(module) == set(), module.__name__


# --- Nothing is kept for longer than it says -----------------------------------------------------


def sizes() -> dict[str, int]:
    """Number of entries of each global, in all of its tables."""
    values = {name: value_of(name) for name in GLOBALS}
    ids = set(map(id, values.values()))  # A global may hold another, which counts separately.
    return {name: _entries(value, ids - {id(value)}) for name, value in values.items()}


def _entries(value: Any, seen: set[int]) -> int:
    if id(value) in seen or isinstance(value, type):
        return 0
    seen.add(id(value))
    if hasattr(value, "cache_info"):
        return int(value.cache_info().currsize)
    kind = type(value)
    if kind.__module__.split(".")[0] == "fusion_passes":
        return sum(_entries(item, seen) for item in getattr(value, "__dict__", {}).values())
    if not hasattr(value, "__len__") or not hasattr(value, "clear"):
        return 0
    items = value.values() if hasattr(value, "values") else list(value)
    return len(value) + sum(_entries(item, seen) for item in items)


def _step(ddp: DistributedDataParallel, run: Callable[..., Any] | None = None) -> None:
    forward = ddp if run is None else run
    forward(torch.ones(2, 4)).sum().backward()


class _Logged(DistributedDataParallel):
    """A user's class with a method of DDP's."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        return super().forward(*inputs, **kwargs)


def _managed() -> Any:
    ddp = DistributedDataParallel(two_layers())
    _step(ddp)
    return ddp


def _copied() -> Any:
    ddp = _Logged(two_layers())
    other = copy.deepcopy(ddp)
    _step(other)
    return ddp, other


def _moved() -> Any:
    ddp, group = _managed(), dist.new_group()
    ddp._update_process_group(group)
    _step(ddp)
    dist.destroy_process_group(group)
    return ddp


def _hooked() -> Any:
    ddp = _managed()
    ddp.register_comm_hook(None, lambda state, bucket: None)
    return ddp


def _handed_over() -> Any:
    ddp = _managed()
    ddp._register_buffer_comm_hook(None, lambda state, buffers: None)
    return ddp


def _joining() -> Any:
    ddp = DistributedDataParallel(two_layers())
    with ddp.join(divide_by_initial_world_size=False):
        ddp(torch.ones(2, 4))  # A fake group counts no ranks, so there is no backward.
    return ddp


def _late() -> Any:
    with inductor_config.patch(ddp_fusion=None):
        ddp = DistributedDataParallel(two_layers())
    ddp(torch.ones(2, 4))  # DDP's own reducer does not run over a fake group.
    return ddp


def _of_another_backend() -> Any:
    ddp = DistributedDataParallel(two_layers())
    _step(ddp, torch.compile(ddp, backend="aot_eager"))
    return ddp


def _failing() -> Any:
    ddp = _managed()
    output = ddp(torch.ones(2, 4))
    output.register_hook(lambda _: 1 / 0)
    with contextlib.suppress(ZeroDivisionError):
        output.sum().backward()
    return ddp


def _tensor_parallel() -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = parallelize_module(two_layers(), mesh["tp"], {"0": ColwiseParallel()})
    return DistributedDataParallel(model, device_mesh=mesh["dp"])


def _compiled() -> Any:
    made = [kind(two_layers()) for kind in (DistributedDataParallel, _Logged)]
    for ddp in made:
        _step(ddp, torch.compile(ddp))
    return made


def _traced() -> Any:
    flag = fusion_passes.FusionConfig(backward_graph="compiled_autograd")
    with inductor_config.patch(ddp_fusion=flag):
        ddp = DistributedDataParallel(two_layers())
        run = torch.compile(ddp)
        for _ in range(2):  # The first backward is not traced.
            _step(ddp, run)
    return ddp


def _on_the_way() -> Any:
    flag = fusion_passes.FusionConfig(shard_optimizer="overlap")
    with inductor_config.patch(ddp_fusion=flag):
        ddp = DistributedDataParallel(two_layers())
    _step(ddp)
    torch.optim.SGD(ddp.parameters()).step()
    return ddp


def _registered() -> Any:
    backend = Backend()
    with on_the_host(backend):
        made = RegisteredMemory(Group(backend), torch.device("cpu"), 8)  # type: ignore[arg-type]
        made.register()
        return made


KINDS = (
    _managed,
    _registered,
    _compiled,
    _traced,
    _copied,
    _moved,
    _hooked,
    _handed_over,
    _joining,
    _late,
    _of_another_backend,
    _failing,
    _tensor_parallel,
    _on_the_way,
)


@pytest.fixture
def _world() -> Iterator[None]:
    gc.collect()
    with fake_world(4), inductor_config.patch(ddp_fusion="concat"), warnings.catch_warnings():
        warnings.simplefilter("ignore", fusion_passes.FusionWarning)
        yield


def _forget() -> None:
    torch._dynamo.reset()  # Compiled code may keep objects that it was traced with.
    gc.collect()


@pytest.mark.slow
@pytest.mark.usefixtures("_world")
def test_what_is_about_a_module_goes_with_it() -> None:
    # Torch keeps groups and objects that it compiles with: all of them exist from here on.
    made = [make() for make in KINDS]
    del made
    _forget()
    before = sizes()
    grown = set()
    for make in KINDS:
        for _ in range(2):
            made = make()
            grown |= {what for what, size in sizes().items() if size > before[what]}
            del made
        _forget()
        after = sizes()
        kept = {what: (before[what], after[what]) for what in after if after[what] != before[what]}
        allowed = of_lifetimes(Lifetime.GROUP, Lifetime.PROCESS)
        assert not kept.keys() - allowed, f"{make.__name__}: {kept}"
    assert grown >= of_lifetimes(Lifetime.MODULE), "each of them has had something to forget"


@pytest.mark.usefixtures("fused_rank")
def test_what_is_about_a_group_goes_with_it() -> None:
    def entries() -> int:
        gc.collect()
        return sum(size for what, size in sizes().items() if what in of_lifetimes(Lifetime.GROUP))

    before = entries()
    group = dist.new_group()
    ddp = DistributedDataParallel(two_layers(), process_group=group)
    _step(ddp)
    assert entries() > before
    dist.destroy_process_group(group)
    del ddp, group
    _forget()
    assert entries() == before
