"""Prints the shape of the package: its rooms and their imports, the lengths of files and functions,
and how many of torch's private names are used where. Or draws the rooms, as docs/structure.svg.

The figures change with every commit, so no page keeps them; compare two commits instead.
tests/test_imports.py holds the budgets, and that imports point one way.

    python tools/structure.py
    python tools/structure.py --commit HEAD~20      # as it was then
    python tools/structure.py --draw docs/structure.svg
"""

from __future__ import annotations

import ast
import io
import statistics
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from command_line import parser_of

ROOT: Final = Path(__file__).parent.parent
NAME: Final = "fusion_passes"
PAGE: Final = "docs/architecture.md"
"""Says what the rooms do, and where a gradient goes."""
DOOR: Final = "torch_private"
"""The room for torch's private names."""


@dataclass(frozen=True)
class Room:
    """A folder of the package, or a file beside the folders.

    Attributes:
        files: how many.
        lines: of all its files.
        imports: the other rooms that it imports.
    """

    name: str
    files: int
    lines: int
    imports: tuple[str, ...]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables, or write the drawing."""
    parser = parser_of(__doc__)
    parser.add_argument("--commit", help="of a commit instead of the files in the checkout")
    parser.add_argument(
        "--draw", type=Path, metavar="FILE", help="write the rooms as SVG instead of the tables"
    )
    options = parser.parse_args(arguments)
    if options.commit is None:
        show(ROOT, options.draw)
        return 0
    command = ["git", "archive", options.commit]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, check=False)
    if done.returncode:
        print(done.stderr.decode(), end="", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
            archive.extractall(folder)
        show(Path(folder), options.draw)
    return 0


def show(checkout: Path, drawing: Path | None) -> None:
    """Print the tables of a checkout's package, or write its drawing into a file."""
    if drawing is None:
        print(as_markdown(checkout / NAME), end="")
    else:
        drawing.write_text(as_svg(checkout))


def as_svg(checkout: Path) -> str:
    """The drawing of a checkout's package."""
    from structure_drawing import draw

    page = checkout / PAGE
    return draw(rooms_of(checkout / NAME), page.read_text() if page.exists() else "")


def as_markdown(package: Path) -> str:
    """The tables of a package.

    Args:
        package: its folder.
    """
    rooms = rooms_of(package)
    files = [len(path.read_text().splitlines()) for path in package.rglob("*.py")]
    functions = [length for path in package.rglob("*.py") for _, length in functions_of(path)]
    return "\n".join(
        [
            "| room | files | lines | imports |",
            "| --- | ---: | ---: | --- |",
            *(f"| {r.name} | {r.files} | {r.lines} | {', '.join(r.imports)} |" for r in rooms),
            f"| all | {sum(r.files for r in rooms)} | {sum(r.lines for r in rooms)} | |",
            "",
            "| lines | number | median | 90 % have at most | longest |",
            "| --- | ---: | ---: | ---: | ---: |",
            _spread("of a file", files),
            _spread("of a function, without its docstring", functions),
            "",
            _private_names_as_text(package),
            "",
        ]
    )


def _private_names_as_text(package: Path) -> str:
    inside, outside = private_names(package)
    files = [path for path in package.rglob("*.py") if room_of(path, package) != DOOR]
    named = {name for path in files for name in named_private_names(path)}
    return (
        f"Private names of torch: {len(inside)} in {DOOR}; elsewhere {len(named)} imported or "
        f"written out, and {len(outside - inside - named)} more as attributes of torch's objects, "
        "as arguments, or in the registry of patches."
    )


def _spread(what: str, lengths: list[int]) -> str:
    tenths = statistics.quantiles(lengths, n=10, method="inclusive")
    middle = statistics.median(lengths)
    return f"| {what} | {len(lengths)} | {middle:.0f} | {tenths[-1]:.0f} | {max(lengths)} |"


def rooms_of(package: Path) -> list[Room]:
    """The rooms of a package, each after those that it imports."""
    files: dict[str, list[Path]] = {}
    for path in sorted(package.rglob("*.py")):
        files.setdefault(room_of(path, package), []).append(path)
    arrows = {
        name: {other for path in paths for other in imported_rooms(path)} & files.keys() - {name}
        for name, paths in files.items()
    }
    return [
        Room(
            name,
            len(files[name]),
            sum(len(path.read_text().splitlines()) for path in files[name]),
            tuple(sorted(arrows[name])),
        )
        for name in _in_order(arrows)
    ]


def room_of(path: Path, package: Path) -> str:
    """The room that a file is in."""
    return path.relative_to(package).parts[0].removesuffix(".py")


def imported_rooms(path: Path) -> set[str]:
    """Rooms of the package that a file imports, its own among them."""
    names = [name.split(".") for name in imported_names(path)]
    return {parts[1] for parts in names if parts[0] == NAME and len(parts) > 1}


def imported_names(path: Path) -> Iterator[str]:
    """Full names of all that a file imports, wherever in the file: a module, or a name in one."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute here"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _in_order(arrows: Mapping[str, set[str]]) -> list[str]:
    """What imports the least first; rooms that import each other in the order of their names."""
    order: list[str] = []
    while len(order) < len(arrows):
        left = sorted(arrows.keys() - set(order))
        order.append(min(left, key=lambda name: len(arrows[name] - set(order))))
    return order


def functions_of(path: Path) -> Iterator[tuple[str, int]]:
    """Each function and method in a file, with its lines without the docstring."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = _lines(node)
            if ast.get_docstring(node) is not None:
                lines -= _lines(node.body[0])
            yield node.name, lines


def _lines(node: ast.stmt) -> int:
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1


def named_private_names(path: Path) -> set[str]:
    """Private names of torch that a file imports or writes out: what only :data:`DOOR` may do."""
    tree = ast.parse(path.read_text())
    found = {
        name for name in imported_names(path) if name.startswith("torch") and _is_private(name)
    }
    aliases = _torch_aliases(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            head, _, rest = ast.unparse(node).partition(".")
            full = f"{aliases.get(head, '')}.{rest}"
            if head in aliases and _is_private(full):
                found.add(full)
    return {name for name in found if not any(name != o and name.startswith(o) for o in found)}


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


def private_names(package: Path) -> tuple[set[str], set[str]]:
    """Private names of torch that are used in :data:`DOOR`, and elsewhere. Attributes of torch's
    objects count, by whatever variable they are reached."""
    from check_torch import is_private

    from torch_names.package import read_package
    from torch_names.reading import read

    inside: set[str] = set()
    outside: set[str] = set()
    for name, (_, places) in read(read_package(package)).names.items():
        if is_private(name):
            for place in places:
                (inside if place.startswith((f"{DOOR}/", f"{DOOR}.py")) else outside).add(name)
    return inside, outside


if __name__ == "__main__":
    sys.exit(main())
