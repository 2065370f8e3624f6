"""The files of the package, the imports of a file, and the names of torch in its code, at any
place."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import fusion_passes

PACKAGE: Final = Path(fusion_passes.__file__).parent
FILES: Final = sorted(PACKAGE.rglob("*.py"))

_DOTTED: Final = re.compile(r"\w+(\.\w+)+")


def imported_names(path: Path) -> Iterator[str]:
    """Full names of everything that a file imports: modules, and names in modules."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute here"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def names_of_torch(path: Path) -> set[str]:
    """Dotted names of torch that a file imports or writes, under any alias: each with its prefixes,
    except ``torch`` itself."""
    aliases = _torch_aliases(path)
    found = {name for name in imported_names(path) if name.startswith("torch.")}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute):
            # A call ends the name before its arguments.
            head, _, rest = ast.unparse(node).partition(".")
            if head in aliases and _DOTTED.fullmatch(f"{head}.{rest}"):
                found.add(f"{aliases[head]}.{rest}")
    return found


def _torch_aliases(path: Path) -> dict[str, str]:
    """Torch's modules by the names that a file gives them: ``dist``, ``nn``."""
    aliases = {}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.split(".")[0]
                aliases[alias.asname or first] = alias.name if alias.asname else first
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                aliases[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return {name: full for name, full in aliases.items() if full.split(".")[0] == "torch"}


def is_private(name: str) -> bool:
    """Whether a dotted name of torch has a part with a leading underscore. Operators are excluded:
    they are no part of torch's Python, and their names are stable."""
    if name.startswith(("torch.ops.", "torch._foreach_")):
        return False
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))
