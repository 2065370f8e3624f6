"""Reads the package's code, and asks the installed torch for each of its names that is used.

What an expression stands for is followed as far as that is plain: imports, attributes, calls,
annotations, assignments, loops, and what functions of the package are given and return. A private
attribute of which it is not known what has it is an error: it is to be annotated, or declared.
"""

from __future__ import annotations

import ast
from typing import Any, Final

from torch_names import values
from torch_names.declared import STANDS_FOR
from torch_names.expressions import Expressions, items_of
from torch_names.lookups import OWN_MARK, Found
from torch_names.package import NAME, Class, File, Function, own_names
from torch_names.values import Instance, Thing

PASSES: Final = 4
"""How often all is read: what one function returns or stores, others use."""


def read(files: dict[str, File]) -> Found:
    """Find the names of torch that the package uses, and ask for them.

    Args:
        files: the package, by module name.
    """
    own = own_names(files)
    for _ in range(PASSES):
        found = Found()
        for file in files.values():
            _Reader(files, file, own, found, file.names, file.label).read_file()
    return found


class _Reader(Expressions):
    """Reads statements."""

    def read_file(self) -> None:
        self._run(self.file.tree.body)

    def _run(self, body: list[ast.stmt]) -> None:
        for statement in body:
            self._statement(statement)

    def _statement(self, node: ast.stmt) -> None:
        method = getattr(self, f"_{type(node).__name__.lower()}", None)
        if method is not None:
            method(node)
            return
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                self.value(child)
        for name in ("body", "orelse", "finalbody"):
            self._run(getattr(node, name, []))
        for part in (*getattr(node, "handlers", []), *getattr(node, "cases", [])):
            self._run(part.body)

    # --- Imports ---------------------------------------------------------------------------------

    def _import(self, node: ast.Import) -> None:
        for alias in node.names:
            first = alias.name.split(".")[0]
            if first == "torch":
                self._note_import(alias.name)
                name = alias.name if alias.asname else first
                self.names[alias.asname or first] = values.find(name) or values.MISSING
            else:
                self.names[alias.asname or first] = values.FOREIGN

    def _importfrom(self, node: ast.ImportFrom) -> None:
        module = node.module or ""
        for alias in node.names:
            full, name = f"{module}.{alias.name}", alias.asname or alias.name
            if module.split(".")[0] == "torch":
                self._note_import(full)
                self.names[name] = values.find(full) or values.MISSING
            elif module.split(".")[0] == NAME:
                file = self.files.get(module)
                own = file.names.get(alias.name) if file is not None else None
                self.names[name] = own if own is not None else self.names.get(name)
            else:
                self.names[name] = values.FOREIGN

    def _note_import(self, name: str) -> None:
        self.found.note(name, values.find(name) is not None, self.where)

    # --- Assignments -----------------------------------------------------------------------------

    def _assign(self, node: ast.Assign) -> None:
        found = self.value(node.value)
        for target in node.targets:
            self.bind(target, found)

    def _annassign(self, node: ast.AnnAssign) -> None:
        is_alias = ast.unparse(node.annotation) == "TypeAlias"
        given = self.annotated(node.value) if is_alias else self.value(node.value)
        annotated = self.annotated(node.annotation)
        self.bind(node.target, annotated if annotated is not None else given)

    def _for(self, node: ast.For) -> None:
        self.bind(node.target, items_of(self.value(node.iter)))
        self._run([*node.body, *node.orelse])

    def _with(self, node: ast.With) -> None:
        for item in node.items:
            found = self.value(item.context_expr)
            if item.optional_vars is not None:
                self.bind(item.optional_vars, found)
        self._run(node.body)

    def _return(self, node: ast.Return) -> None:
        found = self.value(node.value)
        function = self.names.get("return")
        if isinstance(function, Function) and function.result is None and not function.is_generic:
            function.result = found

    # --- Definitions -----------------------------------------------------------------------------

    def _functiondef(self, node: ast.FunctionDef) -> None:
        known = self.names.get(node.name)
        if not isinstance(known, Function) or known.node is not node:
            known = Function(self.file, node)
        self._function(known, None)

    def _function(self, function: Function, owner: Class | None) -> None:
        node = function.node
        names = {**self.names, "return": function}
        where = f"{self.file.label}:{node.lineno} {node.name}"
        inner = _Reader(self.files, self.file, self.own, self.found, names, where)
        for decorator in node.decorator_list:
            inner.value(decorator)
        annotated = inner.annotated(node.returns)
        if annotated is not None:
            function.result = annotated
        arguments = node.args
        for default in (*arguments.defaults, *arguments.kw_defaults):
            inner.value(default)
        for item in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
            names[item.arg] = inner._parameter(function, item)
        if owner is not None and arguments.args:
            names[arguments.args[0].arg] = owner
            names["super()"] = next(iter(owner.bases), None)
        inner._run(node.body)

    def _parameter(self, function: Function, item: ast.arg) -> Any:
        annotated = self.annotated(item.annotation)
        return annotated if annotated is not None else function.parameters.get(item.arg)

    def _classdef(self, node: ast.ClassDef) -> None:
        known = self.names.get(node.name)
        found = known if isinstance(known, Class) and known.node is node else Class(self.file, node)
        self.names[node.name] = found
        found.bases = [base for base in map(self._base, node.bases) if base is not None]
        if node.name in STANDS_FOR:
            self.found.declared.add(node.name)
            base = values.instance_of(STANDS_FOR[node.name])
            self.found.note(STANDS_FOR[node.name], base is not None, self.where)
            found.bases = [base] if base is not None else []
        for item in node.body:
            if isinstance(item, ast.FunctionDef):
                method = found.methods.setdefault(item.name, Function(self.file, item, found))
                self._overrides(found, item.name)
                self._function(method, None if _is_static(item) else found)
            elif isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                self.value(item.value)
                annotated = self.annotated(item.annotation)
                if annotated is not None:
                    found.attributes[item.target.id] = annotated
            else:
                self._statement(item)

    def _base(self, node: ast.expr) -> Any:
        found = self.value(node)
        if isinstance(found, Thing) and isinstance(found.object, type):
            return Instance(found.name, (found.object,))
        return found if isinstance(found, Class) else None

    def _overrides(self, owner: Class, name: str) -> None:
        """A method that torch is to call must have its name: others are called by the class."""
        used = {
            node.attr
            for node in ast.walk(owner.node)
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self"
        }
        if not name.startswith("__") and name not in used and OWN_MARK not in name:
            for base in owner.bases:
                if isinstance(base, Instance):
                    self.attribute(base, name)


def _is_static(node: ast.FunctionDef) -> bool:
    return any("staticmethod" in ast.unparse(item) for item in node.decorator_list)
