"""The identities of the passes in the keys of torch's caches: different graphs have different keys,
and graphs that can be shared have the same."""

from __future__ import annotations

import ast
import itertools
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch._functorch.config
import torch._inductor.config as inductor_config
from torch.nn.parallel import DistributedDataParallel

from fusion_passes import FusionConfig
from fusion_passes.graph import identity as identities_of_passes
from fusion_passes.reducer.reducer import reducer_of
from fusion_passes.stored.lowering import register_store_lowerings
from fusion_passes.stored.store import StoreGradients
from fusion_passes.stored.store_pass import StorePass, stores_of_forward
from fusion_passes.traced.backwards import traced_modules
from fusion_passes.traced.fuse_pass import FusePass
from fusion_passes.traced.pack import register_lowerings
from fusion_passes.traced.pipeline import run_pipeline
from testing.fresh import forget
from tests.support.fake_world import one_rank, two_layers
from tests.support.imports import FILES, PACKAGE, imported_names


def _identity(
    order: list[tuple[int, int]], flag: Any = "concat", *, steps: int = 0, **options: Any
) -> str:
    """The identity of the backward of a forward whose inputs are these parameters of these modules.

    Args:
        order: module number and parameter number of each input.
        flag: value of ``ddp_fusion``.
        steps: number of backwards that both modules have had.
        options: options of DDP.
    """
    with one_rank(), inductor_config.patch(ddp_fusion=flag):
        modules = [DistributedDataParallel(two_layers(), **options) for _ in range(2)]
        for ddp in modules * steps:
            ddp(torch.ones(2, 4)).sum().backward()
        inputs = [list(modules[module].parameters())[number] for module, number in order]
        graph = torch.fx.Graph()
        for number in range(len(inputs)):
            graph.placeholder(f"input_{number}")
        stores = stores_of_forward(graph, inputs)
        assert stores is not None
        return StorePass(stores).uuid()


FIRST = [(0, number) for number in range(4)]
SECOND = [(1, number) for number in range(4)]


def test_order_caps_and_layout_are_in_it() -> None:
    def identities() -> list[str]:
        return [
            _identity(FIRST),
            _identity(FIRST + SECOND),
            _identity(FIRST[:2]),
            _identity(FIRST, bucket_cap_mb=2),
            _identity(FIRST, FusionConfig(bucket_cap_mb=3)),
            _identity(FIRST, steps=1),
            _identity([*FIRST[2:], *FIRST[:2]], steps=1),
        ]

    found = identities()
    assert found == identities(), "in each process the same"
    assert all(one != other for one, other in itertools.combinations(found, 2))


def test_instances_and_modes_share_graphs() -> None:
    assert _identity(FIRST) == _identity(SECOND) == _identity(FIRST, "coalesced")
    assert _identity(FIRST + SECOND) == _identity(SECOND + FIRST)


def _identity_of_traced(
    flag: FusionConfig = FusionConfig(),  # noqa: B008
    *,
    is_transposed: bool = False,
    **options: Any,
) -> str:
    """The identity of a traced backward of a module that has had its first backward.

    Args:
        flag: value of ``ddp_fusion``.
        is_transposed: whether its weights were transposed when DDP was constructed.
        options: options of DDP.
    """
    forget()  # Otherwise the identity would contain earlier modules.
    with one_rank(), inductor_config.patch(ddp_fusion=flag):
        model = two_layers()
        if is_transposed:
            weight = model.get_parameter("0.weight")
            weight.data = weight.data.t().contiguous().t()
        ddp = DistributedDataParallel(model, **options)
        ddp(torch.ones(2, 4)).sum().backward()
        reducer = reducer_of(ddp)
        traced_modules.note(reducer.module.name_in_graphs, reducer)
        return FusePass(flag).uuid()


@pytest.mark.parametrize("identity", [lambda: _identity(FIRST), _identity_of_traced])
def test_donated_buffers_and_the_code_are_in_it(identity: Callable[[], str]) -> None:
    """The key of torch's cache does not contain ``donated_buffer``. In a process that found a graph
    compiled with it on, a second backward of a forward was silently wrong by 0.9 of the largest
    element."""
    before = identity()
    with torch._functorch.config.patch(donated_buffer=False):
        assert identity() != before
    with mock.patch.object(identities_of_passes, "source_hash", return_value="another"):
        assert identity() != before


def test_layouts_are_in_that_of_a_traced_backward() -> None:
    assert _identity_of_traced() == _identity_of_traced()
    assert _identity_of_traced() != _identity_of_traced(bucket_cap_mb=1e-5)
    assert _identity_of_traced() != _identity_of_traced(is_transposed=True)
    for flag in (FusionConfig(reduce_dtype="bf16"), FusionConfig(scaling="bucket")):
        assert _identity_of_traced() != _identity_of_traced(flag)


# The code


@pytest.mark.parametrize(
    ("name", "old", "new", "is_same"),
    [
        ("stored/lowering.py", "def ", "def _", False),
        ("config.py", "__version__ = ", "__version__ = 1.0  # ", False),
        ("reducer/reducer.py", "def ", "def _", True),
        ("stored/lowering.py", '"""', '"""Also: ', True),
        ("stored/lowering.py", "\n\n\n", "\n\n\n# A comment.\n", True),
        ("stored/lowering.py", "    return", "return", False),
    ],
)
def test_code_that_shapes_graphs_is_in_the_hash(
    tmp_path: Path, name: str, old: str, new: str, is_same: bool
) -> None:
    """No docstring, no comment, and nothing of a reducer makes a cache cold."""
    package = shutil.copytree(PACKAGE, tmp_path / PACKAGE.name)
    file = package / name
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))
    assert (
        identities_of_passes.hash_of_code(package) == identities_of_passes.source_hash()
    ) == is_same


def _hashed() -> set[Path]:
    return {file for pattern in identities_of_passes.SHAPING for file in PACKAGE.glob(pattern)}


def test_all_that_passes_and_lowerings_import_is_hashed() -> None:
    files = {
        ".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts): file for file in FILES
    }
    shaping = (StoreGradients, register_store_lowerings, run_pipeline, register_lowerings)
    found: set[str] = set()
    queue = [made.__module__ for made in shaping]
    while queue:
        module = queue.pop()
        if module in found:
            continue
        found.add(module)
        # What these operators do when a graph calls them is in no graph.
        if module != "fusion_passes.stored.operators":
            names = set(imported_names(files[module]))
            names |= {name.rpartition(".")[0] for name in names}
            queue += {f"{name}.__init__" for name in names if f"{name}.__init__" in files}
            queue += names & files.keys()
    assert {files[module] for module in found} - _hashed() == set()
    assert all(any(PACKAGE.glob(pattern)) for pattern in identities_of_passes.SHAPING)


def test_only_docstrings_and_comments_are_left_out() -> None:
    def code(text: bytes) -> str:
        tree = ast.parse(text)
        node: Any
        for node in ast.walk(tree):
            if isinstance(body := getattr(node, "body", None), list):
                node.body = [line for line in body if not _is_constant(line)]
        return ast.dump(tree)

    def left_out(found: re.Match[bytes]) -> bytes:
        indent, quotes, _ = found[0].partition(b'"""')
        return indent + b"0" if quotes else b""  # A function may have nothing but its docstring.

    for file in _hashed():
        text = file.read_bytes()
        assert code(text) == code(identities_of_passes.UNREAD.sub(left_out, text)), file.name


def _is_constant(line: ast.stmt) -> bool:
    return isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant)
