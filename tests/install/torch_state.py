"""Compares two snapshots of all of torch that is imported, so that no test has to foresee a
change."""

from __future__ import annotations

import atexit
import gc
import importlib
import pkgutil
import re
import sys
import types
import warnings
from collections.abc import Collection
from typing import Any

import torch
import torch.utils._config_module
from torch.nn.parallel import DistributedDataParallel

from tests.support.launch import ROOT

Values = dict[str, Any]
"""Values by dotted name: of modules, classes and config modules."""

IMPORTED_FIRST = (
    "torch._dynamo.compiled_autograd",
    "torch._functorch.config",
    "torch._inductor.compile_fx",
    "torch._inductor.lowering",
    "torch.distributed.algorithms.ddp_comm_hooks.default_hooks",
    "torch.distributed.tensor.parallel.ddp",
)
"""Torch's modules that the package imports: their import alone changes other modules."""

PAGE = ROOT / "docs" / "patches.md"


def listed(heading: str) -> set[str]:
    """The names in the first column of the tables under a heading of docs/patches.md."""
    text = PAGE.read_text()
    _, found, after = text.partition(f"\n## {heading}\n")
    assert found, f"{PAGE.name} has no heading {heading!r}"
    rows = re.findall(r"^\| (`.*?) \|", after.partition("\n## ")[0], re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`([\w.]+)`", row)}


def value_of(what: str) -> Any:
    """The value of a dotted name of torch; a copy if it is a set."""
    value = pkgutil.resolve_name(what)
    return set(value) if isinstance(value, set) else value


def contents() -> Values:
    """The value of each global name, class attribute and setting of torch. A container, or an
    object of a class of torch's, is represented by its content."""
    gc.collect()  # So that torch's weak tables contain no garbage.
    values: Values = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # Some names are deprecated.
        for name, module in list(sys.modules.items()):
            if name.split(".")[0] == "torch" and isinstance(module, types.ModuleType):
                values |= _of_module(name, module)
    return values


def _of_module(name: str, module: Any) -> Values:
    values = {f"{name}.{key}": value for key, value in vars(module).items()}
    for value in list(values.values()):
        if isinstance(value, type) and str(value.__module__).split(".")[0] == "torch":
            path = f"{value.__module__}.{value.__qualname__}"
            values |= {f"{path}.{key}": held for key, held in vars(value).items()}
    if isinstance(module, torch.utils._config_module.ConfigModule):
        values |= {f"{name}.{key}": getattr(module, key) for key in module._config}
    return {name: (id(value), _held(value, 1)) for name, value in values.items()}


def _held(value: Any, depth: int) -> Any:
    if isinstance(value, (types.ModuleType, type)):
        return id(value)
    if isinstance(value, dict):
        return {str(key): _held(item, depth - 1) if depth else None for key, item in value.items()}
    if isinstance(value, (set, frozenset)):
        return {str(item) for item in value}
    if isinstance(value, list):
        return [id(item) for item in value]
    kind = type(value)
    is_torchs = kind.__module__.split(".")[0] == "torch" and not isinstance(value, torch.Tensor)
    if is_torchs and depth and kind.__module__ != "torch.utils._config_module":
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict):
            return {name: _held(item, depth - 1) for name, item in list(attributes.items())}
    return id(value)


def changed(before: Values, after: Values, known: Collection[str] = ()) -> set[str]:
    """Names whose value or content changed. If several names have one value, for example in each
    module that imports it, the known names are returned, or one name if none is known."""
    names: dict[int, set[str]] = {}
    for name, (key, held) in before.items():
        if held != after.get(name, (0, None))[1]:
            names.setdefault(key, set()).add(name)
    return {name for each in names.values() for name in each.intersection(known) or [min(each)]}


def different(theirs: DistributedDataParallel, ours: DistributedDataParallel) -> set[str]:
    """Attributes that only one of the two has, or whose type or value differs."""
    one, other = vars(theirs), vars(ours)
    names = one.keys() ^ other.keys()
    for name in one.keys() & other.keys():
        plain = isinstance(one[name], (int, str, float, type(None)))
        plain |= isinstance(one[name], list) and all(isinstance(i, (int, str)) for i in one[name])
        if type(one[name]) is not type(other[name]) or (plain and one[name] != other[name]):
            names.add(name)
    if hook_modules(theirs) != hook_modules(ours):
        names.add("_accum_grad_hooks")
    if type(theirs) is not type(ours):
        names.add("__class__")
    return names


def hook_modules(ddp: DistributedDataParallel) -> set[str]:
    """Modules that define the functions that a module has registered on its parameters."""
    ids = {handle.id for handle in ddp._accum_grad_hooks}
    hooks = [p._post_accumulate_grad_hooks or {} for p in ddp.module.parameters()]
    functions = [hook for table in hooks for key, hook in table.items() if key in ids]
    return {getattr(function, "func", function).__module__ for function in functions}


def changed_for_good() -> list[str]:
    """The changes left in a process that imported the package, constructed a module, registered the
    operators with Inductor, and unset the flag again; a job for a process that has not imported the
    package."""
    for name in IMPORTED_FIRST:
        importlib.import_module(name)
    before, callbacks = contents(), atexit._ncallbacks()

    from fusion_passes.stored import store_pass
    from fusion_passes.torch_private.registered_memory import RegisteredMemory
    from fusion_passes.traced import fuse_pass
    from tests.support.registrations import Backend, Group, on_the_host

    backend = Backend()
    torch._inductor.config.ddp_fusion = "concat"
    DistributedDataParallel(torch.nn.Linear(2, 2))
    store_pass._register_lowerings()
    fuse_pass._register_lowerings()
    with on_the_host(backend):
        memory = RegisteredMemory(Group(backend), torch.device("cpu"), 8)  # type: ignore[arg-type]
        memory.register()
    torch._inductor.config.ddp_fusion = None
    names = changed(before, contents(), listed("Until the process ends"))
    return [*sorted(names), *["atexit.register"] * (atexit._ncallbacks() > callbacks)]
