"""What the reader knows of a value, and what the installed torch says of its attributes."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import re
import sys
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final


@dataclass(frozen=True)
class Thing:
    """An object of torch: a module, class or function, or what one of these holds.

    Attributes:
        name: dotted.
        object: itself.
    """

    name: str
    object: Any


@dataclass(frozen=True)
class Local:
    """A class of torch that is defined inside of a function: known from its source only."""

    module: types.ModuleType
    name: str


@dataclass(frozen=True)
class Instance:
    """An object of one of some classes of torch."""

    name: str
    classes: tuple[type | Local, ...]


FOREIGN: Final = object()
"""What is neither torch's nor the package's, such as a module of Python's library."""

MISSING: Final = Thing("", None)
"""What the installed torch does not have: nothing is asked of it any more."""

_MISSING: Final = object()


def find(name: str) -> Thing | None:
    """What a dotted name of torch stands for; ``None`` if there is none."""
    value = Thing("torch", importlib.import_module("torch"))
    for part in name.split(".")[1:]:
        found = _attribute_of_thing(value, part)
        if found is None:
            return None
        value = found
    return value


def instance_of(name: str) -> Instance | None:
    """An object of the class, or of any class in the module, of that name."""
    thing = find(name)
    if thing is None:
        path, _, last = name.rpartition(".")
        owner = find(path)
        is_local = owner is not None and isinstance(owner.object, types.ModuleType)
        if owner is None or not is_local or not _classes_in(owner.object, last):
            return None
        return Instance(name, (Local(owner.object, last),))
    if isinstance(thing.object, types.ModuleType):
        found = [item for item in vars(thing.object).values() if isinstance(item, type)]
        classes = [item for item in found if item.__module__ == thing.object.__name__]
        return Instance(name, tuple(classes))
    return Instance(name, (thing.object,)) if isinstance(thing.object, type) else None


def attribute(value: Thing | Instance, name: str) -> tuple[bool, Thing | Instance | None]:
    """Look an attribute up.

    Returns:
        Whether it is there, and what it is, if that is known.
    """
    if isinstance(value, Thing):
        found = _attribute_of_thing(value, name)
        return found is not None, found
    for kind in value.classes:
        if isinstance(kind, type) and hasattr(kind, name):
            return True, _in_class(kind, name)
    for kind in value.classes:
        annotation = _names_of_instances(kind).get(name, _MISSING)
        if annotation is not _MISSING:
            return True, annotation  # type: ignore[return-value]
    return False, None


def is_written_in(module: str, name: str) -> bool:
    """Whether the source of a module has the name anywhere."""
    thing = find(module)
    try:
        source = inspect.getsource(thing.object) if thing is not None else ""
    except (OSError, TypeError):
        return False
    return re.search(rf"\b{name}\b", source) is not None


def result(value: Thing) -> Instance | None:
    """What a call of it returns, if that is a class's object and known."""
    if isinstance(value.object, type):
        return Instance(class_name(value.object), (value.object,))
    try:
        hints = typing.get_type_hints(value.object)
    except (TypeError, NameError, AttributeError):
        return None
    return as_instance(hints.get("return"))


def takes(value: Thing, keyword: str) -> bool:
    """Whether it can be called with that keyword; also if nobody can say."""
    try:
        parameters = inspect.signature(value.object).parameters
    except (TypeError, ValueError):
        return True
    variable = any(item.kind is item.VAR_KEYWORD for item in parameters.values())
    return variable or keyword in parameters


def as_instance(annotation: Any) -> Instance | None:
    """An object as a type annotation of torch describes it; ``None`` for other types."""
    options = [item for item in typing.get_args(annotation) if item is not type(None)]
    if len(options) == 1 and typing.get_origin(annotation) in (typing.Union, types.UnionType):
        annotation = options[0]
    if isinstance(annotation, type) and annotation.__module__.split(".")[0] == "torch":
        return Instance(class_name(annotation), (annotation,))
    return None


def class_name(kind: type | Local) -> str:
    """A class's dotted name."""
    if isinstance(kind, Local):
        return f"{kind.module.__name__}.{kind.name}"
    return f"{kind.__module__}.{kind.__qualname__}"


def _attribute_of_thing(value: Thing, name: str) -> Thing | None:
    full = f"{value.name}.{name}"
    try:
        return Thing(full, getattr(value.object, name))
    except AttributeError:
        if not isinstance(value.object, types.ModuleType):
            return None
    try:
        return Thing(full, importlib.import_module(f"{value.object.__name__}.{name}"))
    except ImportError:
        return None


def _in_class(kind: type, name: str) -> Thing | Instance | None:
    found = inspect.getattr_static(kind, name)
    if isinstance(found, property):
        return result(Thing(name, found.fget))
    return Thing(f"{class_name(kind)}.{name}", getattr(kind, name)) if callable(found) else None


@functools.cache
def _names_of_instances(kind: type | Local) -> dict[str, Instance | None]:
    """What a class's methods assign to ``self``, and what the class declares."""
    if isinstance(kind, Local):
        methods = [
            node.name
            for definition in _classes_in(kind.module, kind.name)
            for node in definition.body
            if isinstance(node, ast.FunctionDef)
        ]
        return {**dict.fromkeys(methods), **_declared(kind.module, kind.name)}
    names: dict[str, Instance | None] = {}
    for base in kind.__mro__:
        module = sys.modules.get(base.__module__)
        if module is not None and module.__name__.split(".")[0] == "torch":
            names = {**_declared(module, base.__name__), **names}
    return names


def _declared(module: types.ModuleType, name: str) -> dict[str, Instance | None]:
    names: dict[str, Instance | None] = {}
    for definition in _classes_in(module, name):
        for node in ast.walk(definition):
            for target, value in _assigned(node, definition):
                known = _type_in(module, value) if value is not None else None
                names[target] = names.get(target) or known
    return names


def _assigned(node: ast.AST, definition: ast.ClassDef) -> Iterator[tuple[str, ast.expr | None]]:
    """Names that objects of a class get here, each with its annotation or the class called."""
    if not isinstance(node, ast.Assign | ast.AnnAssign):
        return
    if isinstance(node, ast.AnnAssign):
        targets, value = [node.target], node.annotation
    else:
        targets = node.targets  # type: ignore[assignment]
        value = node.value.func if isinstance(node.value, ast.Call) else None  # type: ignore[assignment]
    for target in targets:
        for item in target.elts if isinstance(target, ast.Tuple) else [target]:
            if isinstance(item, ast.Attribute) and ast.unparse(item.value) == "self":
                yield item.attr, value
            elif isinstance(item, ast.Name) and node in definition.body:
                yield item.id, value


def _type_in(module: types.ModuleType, node: ast.expr) -> Instance | None:
    """The torch class that an expression of a module's source names."""
    if isinstance(node, ast.BinOp):
        return _type_in(module, node.left) or _type_in(module, node.right)
    if isinstance(node, ast.Subscript) and ast.unparse(node.value) in (
        "Optional",
        "typing.Optional",
    ):
        return _type_in(module, node.slice)
    if not isinstance(node, ast.Name | ast.Attribute):
        return None
    value: Any = module
    for part in ast.unparse(node).split("."):
        value = getattr(value, part, None)
    return as_instance(value)


def _classes_in(module: types.ModuleType, name: str) -> list[ast.ClassDef]:
    return [node for node in _class_definitions(module) if node.name == name]


@functools.cache
def _class_definitions(module: types.ModuleType) -> list[ast.ClassDef]:
    try:
        tree = ast.parse(inspect.getsource(module))
    except (OSError, TypeError):
        return []
    return [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
