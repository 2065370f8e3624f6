"""The package's own code as syntax trees: nothing of it is imported, so that it can be read where
torch has not what it needs."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

NAME: Final = "fusion_passes"


@dataclass(frozen=True)
class Text:
    """A string that the code gives a name."""

    text: str


@dataclass(frozen=True)
class Many:
    """A container, by what it gives: to a loop, and to ``[...]``."""

    item: Any
    value: Any


@dataclass(frozen=True)
class Row:
    """A tuple of values, known one by one."""

    values: tuple[Any, ...]


@dataclass(frozen=True)
class Returns:
    """What gives a value when it is called, such as a weak reference."""

    result: Any


@dataclass(eq=False)
class Function:
    """A function or method of the package.

    Attributes:
        parameters: what is known of them from calls, where they are annotated ``Any``.
        result: what it returns.
    """

    file: File
    node: ast.FunctionDef
    owner: Class | None = None
    parameters: dict[str, Any] = field(default_factory=dict)
    result: Any = None

    @property
    def is_generic(self) -> bool:
        """Whether what it returns is of the type of an argument, and so another in each call."""
        returned = self.node.returns
        return isinstance(returned, ast.Name) and any(
            isinstance(node, ast.Assign)
            and isinstance(node.value, ast.Call)
            and ast.unparse(node.value.func) == "TypeVar"
            and ast.unparse(node.targets[0]) == returned.id
            for node in self.file.tree.body
        )


@dataclass(eq=False)
class Class:
    """A class of the package, and at the same time an object of it.

    Attributes:
        own: names of the attributes that it assigns or declares.
        bases: those that are classes of torch or of the package.
        attributes: what is assigned to attributes of ``self``.
    """

    file: File
    node: ast.ClassDef
    bases: list[Any] = field(default_factory=list)
    methods: dict[str, Function] = field(default_factory=dict)
    own: set[str] = field(default_factory=set)
    attributes: dict[str, Any] = field(default_factory=dict)

    @property
    def result(self) -> Class:
        return self


@dataclass(eq=False)
class File:
    """A file of the package.

    Attributes:
        names: what its global names stand for.
    """

    path: Path
    label: str
    tree: ast.Module
    names: dict[str, Any] = field(default_factory=dict)

    @property
    def room(self) -> str:
        return self.label.split("/")[0]

    @property
    def module(self) -> str:
        parts = Path(self.label).with_suffix("").parts
        return ".".join((NAME, *parts)).removesuffix(".__init__")


def read_package(root: Path) -> dict[str, File]:
    """The files of the package by module name."""
    files = [
        File(path, path.relative_to(root).as_posix(), ast.parse(path.read_text()))
        for path in sorted(root.rglob("*.py"))
    ]
    for file in files:
        for node in file.tree.body:
            if isinstance(node, ast.FunctionDef):
                file.names[node.name] = Function(file, node)
            elif isinstance(node, ast.ClassDef):
                file.names[node.name] = _class(file, node)
    return {file.module: file for file in files}


def _class(file: File, node: ast.ClassDef) -> Class:
    found = Class(file, node, own=set(_defined(node)))
    for item in node.body:
        if isinstance(item, ast.FunctionDef):
            found.methods[item.name] = Function(file, item, found)
    return found


def own_names(files: dict[str, File]) -> set[str]:
    """Names that the package itself gives to functions, classes and attributes."""
    return {name for file in files.values() for name in _defined(file.tree)}


def _defined(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if ast.unparse(node.value) == "self":
                yield node.attr
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id
