"""The shape of the package: which way imports point, who may name what, and how long things are."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

PACKAGE: Final = Path(__file__).parent.parent / "fusion_passes"
FILES: Final = sorted(PACKAGE.rglob("*.py"))

ROOMS: Final = (
    # Types, settings and torch's private names.
    "version",
    "config",
    "torch_private",
    "flag",
    # What a graph is made of.
    "agreement",
    "operators",
    "collectives",
    "graph_text",
    "dependencies",
    "graph_edit",
    "kernels",
    # Decisions and laws.
    "hook_form",
    "reductions",
    "sources",
    "layout",
    "scaling",
    "caps",
    "planning",
    "verify",
    "rewrite",
    # What is done to a graph.
    "passes",
    "pipeline",
    "lowering",
    # Beside it: what is told, and DDP.
    "report",
    "ddp",
    # What is installed.
    "inductor_pass",
    "install",
    "__init__",
)
"""Each room imports from the rooms above it in this list."""

STRANGERS: Final = {
    ("passes", "passes"): "a pass can be tried alone",
    ("report", "passes"): "a report tells about plans",
    ("report", "pipeline"): "a report tells about plans",
    ("ddp", "passes"): "DDP's side knows nothing of graphs",
    ("ddp", "pipeline"): "DDP's side knows nothing of graphs",
}

MAX_FILE_LINES: Final = 300
MAX_FUNCTION_LINES: Final = 40
"""Without the docstring."""

C10D_NAMESPACES: Final = {"_c10d_functional", "_c10d_functional_autograd", "c10d", "symm_mem"}


def _room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def _module(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


def _imported(path: Path) -> Iterator[str]:
    """Full names of all that a file imports, wherever in the file: a module, or a name in one."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: imports are absolute here"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _own_imports(path: Path) -> set[str]:
    """Rooms of the package that a file imports."""
    names = [name.split(".") for name in _imported(path)]
    return {parts[1] for parts in names if parts[0] == "fusion_passes" and len(parts) > 1}


def _label(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


each_file = pytest.mark.parametrize("path", FILES, ids=_label)


def test_every_room_has_its_place() -> None:
    assert {_room(path) for path in FILES} <= set(ROOMS)


@each_file
def test_imports_point_one_way(path: Path) -> None:
    room = _room(path)
    for other in _own_imports(path):
        own_room = other == room and (room, other) not in STRANGERS
        assert own_room or ROOMS.index(other) < ROOMS.index(room), f"{room} imports {other}"
        assert (room, other) not in STRANGERS, STRANGERS.get((room, other))


def test_no_file_comes_to_import_itself() -> None:
    modules = {_module(path): path for path in FILES}
    edges = {
        module: {
            name if name in modules else name.rpartition(".")[0]
            for name in _imported(path)
            if name.startswith("fusion_passes.")
        }
        & modules.keys()
        for module, path in modules.items()
    }
    done: set[str] = set()
    while ready := [module for module in edges if module not in done and edges[module] <= done]:
        done.update(ready)
    assert done == edges.keys(), f"a circle among {sorted(edges.keys() - done)}"


# --- torch's private names ---------------------------------------------------------------------


def _is_private(name: str) -> bool:
    """Whether a name of torch has a part with a leading underscore. Operators are no part of
    torch's Python, and their names are stable."""
    if name.startswith(("torch.ops.", "torch._foreach_")):
        return False
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def _torch_aliases(tree: ast.Module) -> dict[str, str]:
    """What the names that a file gives to torch's modules stand for: ``dist``, ``nn``."""
    aliases = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                aliases[alias.asname or alias.name.split(".")[0]] = (
                    alias.name if alias.asname else alias.name.split(".")[0]
                )
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                aliases[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return {name: full for name, full in aliases.items() if full.split(".")[0] == "torch"}


def _private_torch_names(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    found = {name for name in _imported(path) if name.startswith("torch") and _is_private(name)}
    aliases = _torch_aliases(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            head, _, rest = ast.unparse(node).partition(".")
            full = f"{aliases.get(head, '')}.{rest}"
            if head in aliases and _is_private(full):
                found.add(full)
    return {name for name in found if not any(name != o and name.startswith(o) for o in found)}


@each_file
def test_private_names_of_torch_are_in_one_place(path: Path) -> None:
    if _room(path) != "torch_private":
        assert _private_torch_names(path) == set()


def test_a_private_name_is_found(tmp_path: Path) -> None:
    path = tmp_path / "example.py"
    path.write_text(
        "import torch\nimport torch.distributed as dist\nfrom torch.utils import _pytree\n"
        "from torch import nn\n"
        "def f():\n    import torch._dynamo\n"
        "torch._C._dynamo.clear(), dist._DEFAULT, torch.ops.aten._conj, torch._foreach_div\n"
        "nn.Module._version, torch.__version__, other._private\n"
    )
    assert _private_torch_names(path) == {
        "torch.utils._pytree",
        "torch._dynamo",
        "torch._C",
        "torch.distributed._DEFAULT",
        "torch.nn.Module._version",
    }


@each_file
def test_c10d_operators_are_named_in_one_place(path: Path) -> None:
    if path.name == "collectives.py":
        return
    tree = ast.parse(path.read_text())
    attributes = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    texts = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    assert not C10D_NAMESPACES & (attributes | {text for text in texts if isinstance(text, str)})
    if _room(path) != "torch_private":
        assert not [name for name in _imported(path) if name.endswith("functional_collectives")]


# --- Length ------------------------------------------------------------------------------------


@each_file
def test_files_are_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= MAX_FILE_LINES


@each_file
def test_functions_are_short(path: Path) -> None:
    lengths = {
        node.name: _length(node)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert {name: lines for name, lines in lengths.items() if lines > MAX_FUNCTION_LINES} == {}


def _length(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function without its docstring."""
    assert node.end_lineno is not None
    lines = node.end_lineno - node.lineno + 1
    if ast.get_docstring(node) is None:
        return lines
    docstring = node.body[0]
    assert docstring.end_lineno is not None
    return lines - (docstring.end_lineno - docstring.lineno + 1)
