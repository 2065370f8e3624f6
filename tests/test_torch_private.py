"""The installed torch has every private name that the package needs.

The names are read from the code, so a new one is checked without being listed. Attributes of
objects that are made while a model trains are covered by mypy and the other tests with
``each_torch``.
"""

from __future__ import annotations

import ast
import importlib.util
import pkgutil
import re
from pathlib import Path
from typing import Final

import pytest
import torch
import torch._dynamo.compiled_autograd
import torch._inductor.config

from tests.support.imports import FILES, PACKAGE, names_of_torch

pytestmark = pytest.mark.each_torch

PRIVATE: Final = sorted((PACKAGE / "torch_private").glob("*.py"))

OLDER: Final = "older_torch.py"
"""The file whose names exist only in torch before 2.13."""

SOURCES: Final = {
    "_ddp_params_and_buffers_to_ignore": "torch.nn.parallel.distributed",
    "_divide_by_initial_world_size": "torch.nn.parallel.distributed",
    "_dynamo_dynamic_indices": "torch._dynamo.decorators",
    "_dynamo_weak_dynamic_indices": "torch._dynamo.decorators",
    "_forward_cls": "torch.autograd.function",
    "_fuse_ddp_communication": "torch._inductor.config",
    "_in_backward_optimizers": "torch.distributed.optim.apply_optimizer_in_backward",
    "_split_size": "torch._inductor.ir",
    "_st_info": "torch.distributed.tensor.parallel.ddp",
    "_use_python_reducer": "torch.nn.parallel.distributed",
    "maybe_subclass_metadata": "torch._functorch._aot_autograd.runtime_wrappers",
    "original_output_strides": "torch._inductor.compile_fx",
}
"""Names that the package looks up as strings, most with a default, so that nothing fails if they
are gone; and the module of torch whose source has them."""


def _missing(names: set[str]) -> list[str]:
    """Dotted names that do not exist in torch."""
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


def test_names_that_are_written_out_are_there() -> None:
    for path in FILES:
        names = names_of_torch(path)
        if path in PRIVATE:
            names |= {text for text in _texts(path) if re.fullmatch(r"torch(\.\w+)+", text)}
        if path.name != OLDER or torch.__version__ < "2.13":
            assert _missing(names) == [], path.relative_to(PACKAGE)


def test_names_that_are_looked_up_as_texts_are_in_torchs_source() -> None:
    for name, module in SOURCES.items():
        found = importlib.util.find_spec(module)
        assert found is not None
        assert found.origin is not None
        assert re.search(rf"\b{name}\b", Path(found.origin).read_text()), f"{module} has no {name}"


def test_each_private_name_that_is_looked_up_as_text_is_listed() -> None:
    texts = {text for path in PRIVATE for text in _texts(path)}
    assert {text for text in texts if re.fullmatch(r"_[a-z]\w+", text)} <= SOURCES.keys() <= texts
