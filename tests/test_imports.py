"""The structure of the package: the direction of imports, and where private names may be used."""

from __future__ import annotations

import ast
import itertools
import re
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Final

from tests.support.imports import FILES, PACKAGE, imported_names, is_private, names_of_torch

TABLE: Final = (PACKAGE.parent / "docs" / "architecture.md").read_text()
ROOMS: Final = [*re.findall(r"^\| `fusion_passes/(\w+)", TABLE, re.MULTILINE), "__init__"]
"""Each room imports only from rooms before it."""

CORE: Final = ("graph", "layout", "reducer", "stored", "ddp")
SLICES: Final = ("traced", "tuning", "reporting", "sharded")

NEVER: Final = {
    **dict.fromkeys(itertools.product(CORE, SLICES), "the core does without its slices"),
    ("ddp", "stored"): "DDP's side rewrites no graphs",
    ("reporting", "stored"): "what was done is reported from what reducers know",
    ("reporting", "traced"): "likewise, and from records that traced graphs make",
    ("reporting", "tuning"): "likewise",
    ("traced", "tuning"): "buckets are those of the layout, however that was chosen",
    ("tuning", "reporting"): "a reducer has the decision, and what is expected of it",
    ("tuning", "traced"): "buckets are planned for reducers",
}

C10D_NAMESPACES: Final = {"_c10d_functional", "_c10d_functional_autograd", "c10d", "symm_mem"}


def _module(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


def _label(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


def _room_of(path: Path) -> str:
    """The folder of the package that a file is in, or the file itself if it is in none."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def _imported_rooms(path: Path) -> set[str]:
    names = [name.split(".") for name in imported_names(path)]
    return {parts[1] for parts in names if parts[0] == PACKAGE.name and len(parts) > 1}


def test_every_room_has_its_place() -> None:
    assert {_room_of(path) for path in FILES} == set(ROOMS)


def test_imports_point_one_way() -> None:
    for path in FILES:
        room = _room_of(path)
        for other in _imported_rooms(path):
            is_above = ROOMS.index(other) <= ROOMS.index(room)
            assert is_above, f"{_label(path)} imports {other}"
            assert (room, other) not in NEVER, f"{_label(path)}: {NEVER[room, other]}"


def test_passes_never_import_each_other() -> None:
    bases = ("(GraphPass)", "(FuseBuckets)")
    passes = {path for path in FILES if any(base in path.read_text() for base in bases)}
    passes -= {PACKAGE / "traced" / "rewrite.py"}  # The base of two passes.
    assert len(passes) > 3
    modules = {_module(path) for path in passes}
    for path in passes:
        imported = {name.rpartition(".")[0] for name in imported_names(path)}
        assert not imported & modules, path.stem


def test_no_file_comes_to_import_itself() -> None:
    modules = {_module(path): path for path in FILES}
    edges = {
        module: {
            name if name in modules else name.rpartition(".")[0]
            for name in imported_names(path)
            if name.startswith("fusion_passes.")
        }
        & modules.keys()
        for module, path in modules.items()
    }
    TopologicalSorter(edges).prepare()  # Raises an error that names the cycle, if there is one.


# --- torch's private names ---------------------------------------------------------------------


def test_private_names_of_torch_are_in_one_place() -> None:
    named = {path: names_of_torch(path) for path in FILES if _room_of(path) != "torch_private"}
    assert [
        f"{_label(path)}: {name}"
        for path, names in named.items()
        for name in sorted(names)
        if is_private(name)
    ] == []


def test_c10d_operators_are_named_in_one_place() -> None:
    for path in FILES:
        if path.name == "collectives.py":
            continue
        nodes = list(ast.walk(ast.parse(path.read_text())))
        words = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
        words |= {str(node.value) for node in nodes if isinstance(node, ast.Constant)}
        assert not C10D_NAMESPACES & words, _label(path)
        if _room_of(path) != "torch_private":
            names = [name.split(".")[-1] for name in imported_names(path)]
            assert "functional_collectives" not in names, _label(path)
