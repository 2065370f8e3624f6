"""Looks names up: attributes of torch's objects in the installed torch, and annotations."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field
from typing import Any, Final

from torch_names import values
from torch_names.declared import ATTRIBUTES, VALUES_OF_ROOM, WRITTEN_IN
from torch_names.package import Class, File, Function, Many, Returns, Row, Text
from torch_names.values import Instance, Thing

OWN_MARK: Final = "ddp_fusion"
"""In each attribute that the package gives to torch's objects."""

_DOTTED: Final = re.compile(r"torch(\.\w+)+")
_CONTAINERS: Final = {
    "list", "tuple", "set", "frozenset", "type", "Sequence", "Iterable", "Iterator", "Collection",
    "WeakSet",
}  # fmt: skip
_MAPPINGS: Final = {"dict", "Mapping", "OrderedDict", "WeakKeyDictionary"}


@dataclass
class Found:
    """What was found in the code.

    Attributes:
        names: each name of torch that is used: whether it is there, and who needs it.
        unknown: private attributes of which it is not known what has them, and where.
        declared: the rows of :mod:`torch_names.declared` that were needed.
    """

    names: dict[str, tuple[bool, list[str]]] = field(default_factory=dict)
    unknown: dict[str, list[str]] = field(default_factory=dict)
    declared: set[str] = field(default_factory=set)

    def note(self, name: str, is_there: bool, where: str) -> None:
        places = self.names.setdefault(name, (is_there, []))[1]
        if where not in places:
            places.append(where)


class Lookups:
    """What is known where some code of the package runs.

    Args:
        files: the package, by module name.
        file: the one that is read.
        own: names of the package's own attributes.
        found: takes what is found.
        names: what local and global names stand for.
        where: for people.
    """

    def __init__(
        self,
        files: dict[str, File],
        file: File,
        own: set[str],
        found: Found,
        names: dict[str, Any],
        where: str,
    ) -> None:
        self.files = files
        self.file = file
        self.own = own
        self.found = found
        self.names = names
        self.where = where

    def value(self, node: ast.expr | None) -> Any:
        """What an expression stands for; ``None`` if that is not known."""
        raise NotImplementedError

    def dotted(self, text: str) -> None:
        """A string that is a dotted name of torch is one that somebody will look up."""
        is_name = _DOTTED.fullmatch(text) and not text.startswith("torch.ops.")
        if is_name and OWN_MARK not in text:
            self.found.note(text, self._there(text), self.where)

    @staticmethod
    def _there(name: str) -> bool:
        path, _, last = name.rpartition(".")
        owner = values.find(path)
        # A class that a function makes is found by its source alone.
        is_class = owner is None or isinstance(owner.object, type)
        value = values.instance_of(path) if is_class else owner
        return value is not None and values.attribute(value, last)[0]

    def attribute(self, value: Any, name: str) -> Any:
        """What ``value.name`` stands for."""
        if name in ATTRIBUTES or name in WRITTEN_IN:
            return self.declared(name)
        if isinstance(value, Class):
            return self._own_attribute(value, name)
        if isinstance(value, Many | Row | Text | Function | Returns) or name.startswith("__"):
            return Method(value, name) if isinstance(value, Many) else None
        if isinstance(value, Thing | Instance):
            return self._torchs(value, name)
        is_private = name.startswith("_") and name not in self.own and OWN_MARK not in name
        if is_private and value is not values.FOREIGN:
            return self.declared(name)
        return None

    def _torchs(self, value: Thing | Instance, name: str) -> Any:
        if value.name.startswith("torch.ops") or value is values.MISSING:
            return value  # Operators are no names of torch's Python.
        if OWN_MARK in name:
            return None
        is_there, found = values.attribute(value, name)
        if not is_there and isinstance(value, Instance):
            value = self._any_in_room(value) or value
            is_there, found = values.attribute(value, name)
        self.found.note(f"{value.name}.{name}", is_there, self.where)
        if is_room_value(value):
            return value
        return found if is_there else values.MISSING

    def _any_in_room(self, value: Instance) -> Instance | None:
        """Where a room's values are those of one module, what torch's annotations say of them is
        often a base class only."""
        module = VALUES_OF_ROOM.get(self.file.room, "")
        is_such = module and any(values.class_name(c).startswith(module) for c in value.classes)
        return values.instance_of(module) if is_such else None

    def declared(self, name: str) -> Any:
        if name in WRITTEN_IN:
            module = WRITTEN_IN[name]
            self.found.declared.add(name)
            full = f"{module}: {name}"
            self.found.note(full, values.is_written_in(module, name), self.where)
            return None
        row = ATTRIBUTES.get(name)
        if row is None:
            self.found.unknown.setdefault(name, []).append(self.where)
            return None
        self.found.declared.add(name)
        owner, holds = row
        self.found.note(f"{owner}.{name}", self._there(f"{owner}.{name}"), self.where)
        return values.instance_of(holds) if holds else None

    def _own_attribute(self, owner: Class, name: str) -> Any:
        method = owner.methods.get(name)
        if method is not None:
            is_property = any("property" in ast.unparse(d) for d in method.node.decorator_list)
            return method.result if is_property else method
        if name in owner.attributes or name in owner.own:
            return owner.attributes.get(name)
        for base in owner.bases:
            found = self.attribute(base, name)
            if found is not None:
                return found
        return None

    def annotated(self, node: ast.expr | None) -> Any:
        """What is annotated so."""
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            node = ast.parse(node.value, mode="eval").body
        if isinstance(node, ast.BinOp):
            return first_of(self.annotated(node.left), self.annotated(node.right))
        if isinstance(node, ast.Subscript):
            return self._generic(node)
        if isinstance(node, ast.Name) and node.id == "Any":
            module = VALUES_OF_ROOM.get(self.file.room)
            self.found.declared.update({self.file.room} if module else ())
            return values.instance_of(module) if module else None
        value = self.value(node) if isinstance(node, ast.Name | ast.Attribute) else None
        if isinstance(value, Thing) and isinstance(value.object, type):
            return Instance(value.name, (value.object,))
        return value if isinstance(value, Class | Instance | Many | Returns) else None

    def _generic(self, node: ast.Subscript) -> Any:
        head = ast.unparse(node.value).rpartition(".")[2]
        inner = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        if head == "Annotated" and isinstance(inner[1], ast.Constant):
            name = str(inner[1].value)
            self.found.note(name, values.instance_of(name) is not None, self.where)
            return values.instance_of(name)
        if head in _CONTAINERS:
            item = self.annotated(inner[0])
            return Many(item, item)
        if head in _MAPPINGS:
            return Many(self.annotated(inner[0]), self.annotated(inner[1]))
        if head in ("ref", "Callable"):
            return Returns(self.annotated(inner[-1]))
        return self.annotated(inner[0]) if head in ("Final", "ClassVar") else None


def is_room_value(value: Any) -> bool:
    """Whether it is one of a room's own values, of which all parts are such, too."""
    return isinstance(value, Instance) and value.name in VALUES_OF_ROOM.values()


@dataclass(frozen=True)
class Method:
    """A method of a container that gives what is in it."""

    owner: Many
    name: str

    @property
    def result(self) -> Any:
        if self.name == "items":
            return Many(Row((self.owner.item, self.owner.value)), None)
        if self.name == "values":
            return Many(self.owner.value, None)
        is_one = self.name in ("get", "pop", "setdefault")
        return self.owner.value if is_one else self.owner if self.name in ("keys", "copy") else None


def first_of(*found: Any) -> Any:
    """The first that is known."""
    return next((item for item in found if item is not None), None)
