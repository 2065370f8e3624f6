"""The installed torch has every name of it that the package needs.

The names are read from the code, so a new one is asked for without being listed. What is asked of
objects that are made while a model trains, mypy and the other tests with ``each_torch`` show.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import pkgutil
import re
from pathlib import Path
from typing import Any, Final

import pytest
import torch
import torch._dynamo.compiled_autograd
import torch._inductor.config
import torch.distributed as dist
from torch import fx
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

import fusion_passes
from testing import fake_world
from testing.fake_world import two_layers
from tests.support.imports import names_of_torch, private_attributes

pytestmark = pytest.mark.each_torch

PACKAGE: Final = Path(fusion_passes.__file__).parent
FILES: Final = sorted(PACKAGE.rglob("*.py"))
PRIVATE: Final = sorted((PACKAGE / "torch_private").glob("*.py"))

OLDER: Final = "older_torch.py"
"""What it names, torch has before 2.13 only."""

SOURCES: Final = {
    "_accum_grad_hooks": "torch.nn.parallel.distributed",
    "_ddp_params_and_buffers_to_ignore": "torch.nn.parallel.distributed",
    "_divide_by_initial_world_size": "torch.nn.parallel.distributed",
    "_dynamo_dynamic_indices": "torch._dynamo.decorators",
    "_dynamo_weak_dynamic_indices": "torch._dynamo.decorators",
    "_forward_cls": "torch.autograd.function",
    "_in_backward_optimizers": "torch.distributed.optim.apply_optimizer_in_backward",
    "_split_size": "torch._inductor.ir",
    "_st_info": "torch.distributed.tensor.parallel.ddp",
    "_use_python_reducer": "torch.nn.parallel.distributed",
    "maybe_subclass_metadata": "torch._functorch._aot_autograd.runtime_wrappers",
    "original_output_strides": "torch._inductor.compile_fx",
}
"""Names that the package looks up as texts, most with a default, so that nothing fails where they
are gone; and the module of torch whose source has them."""


def _missing(names: set[str]) -> list[str]:
    """Dotted names that torch does not have."""
    missing = []
    for name in sorted(names):
        try:
            pkgutil.resolve_name(name)
        except (AttributeError, ImportError):
            missing.append(name)
    return missing


def _texts(path: Path) -> set[str]:
    nodes = ast.walk(ast.parse(path.read_text()))
    constants = {node.value for node in nodes if isinstance(node, ast.Constant)}
    return {value for value in constants if isinstance(value, str)}


# -------------------------------------------------------------------------------------------------


def test_every_module_can_be_imported() -> None:
    for module in pkgutil.walk_packages([str(PACKAGE)], "fusion_passes."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)


def test_names_that_are_written_out_are_there() -> None:
    for path in FILES:
        names = names_of_torch(path)
        if path in PRIVATE:
            names |= {text for text in _texts(path) if re.fullmatch(r"torch(\.\w+)+", text)}
        if path.name != OLDER or torch.__version__ < "2.13":
            assert _missing(names) == [], path.relative_to(PACKAGE)


def test_a_name_that_is_gone_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "example.py"
    path.write_text(
        "import torch, torch._never\nfrom torch import nn\n"
        "def f(x):\n    from torch._ops import OpOverload, Never\n"
        "    return nn.Module._never, torch._C._current_graph_task_id(), x.y._never, x.__dict__\n"
    )
    monkeypatch.delattr("torch._C._current_graph_task_id")
    assert _missing(names_of_torch(path)) == [
        "torch._C._current_graph_task_id",
        "torch._never",
        "torch._ops.Never",
        "torch.nn.Module._never",
    ]
    assert private_attributes(path) == {"_never"}


def test_private_attributes_of_objects_are_there() -> None:
    with fake_world.one_rank():
        group = dist.group.WORLD
        assert group is not None
        ddp = DistributedDataParallel(two_layers())
        parameter = next(ddp.parameters())
        backend: Any = group._get_backend(torch.device("cpu"))
        objects = [
            *(ddp, ddp.reducer, ddp.logger, parameter, ddp(torch.ones(1, 4)).grad_fn),
            *(group, backend.options, DeviceMesh),
            *(fx.Graph(), torch.ops.aten, torch.ops.aten.add.Tensor),
            *(torch._inductor.config, torch._dynamo.compiled_autograd),
        ]
        asked = {name for path in PRIVATE for name in private_attributes(path)}
        assert [name for name in sorted(asked) if not any(hasattr(o, name) for o in objects)] == []


def test_names_that_are_looked_up_as_texts_are_in_torchs_source() -> None:
    for name, module in SOURCES.items():
        found = importlib.util.find_spec(module)
        assert found is not None
        assert found.origin is not None
        assert re.search(rf"\b{name}\b", Path(found.origin).read_text()), f"{module} has no {name}"


def test_each_private_name_that_is_looked_up_as_text_is_listed() -> None:
    texts = {text for path in PRIVATE for text in _texts(path)}
    assert {text for text in texts if re.fullmatch(r"_[a-z]\w+", text)} <= SOURCES.keys() <= texts
