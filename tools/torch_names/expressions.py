"""What an expression of the package's code stands for."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from typing import Any, Final

from torch_names import values
from torch_names.declared import WRITTEN_IN
from torch_names.lookups import Lookups, Method, first_of, is_room_value
from torch_names.package import Class, Function, Many, Returns, Row, Text
from torch_names.values import Instance, Thing


class Expressions(Lookups):
    """Follows values through one function, or one file's global code."""

    def value(self, node: ast.expr | None) -> Any:
        """What an expression stands for; ``None`` if that is not known. Everything that torch is
        asked for on the way is noted."""
        if node is None:
            return None
        known = self.names.get(ast.unparse(node)) if isinstance(node, ast.Attribute) else None
        if known is not None:
            return known
        method = getattr(self, f"_{type(node).__name__.lower()}", None)
        if method is not None:
            return method(node)
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                self.value(child)
            elif isinstance(child, ast.keyword):
                self.value(child.value)
        return None

    # --- Kinds of expressions --------------------------------------------------------------------

    def _name(self, node: ast.Name) -> Any:
        return self.names.get(node.id)

    def _constant(self, node: ast.Constant) -> Any:
        if not isinstance(node.value, str):
            return None
        if node.value in WRITTEN_IN:
            self.declared(node.value)
        self.dotted(node.value)
        return Text(node.value)

    def _joinedstr(self, node: ast.JoinedStr) -> Any:
        parts = [
            self.value(part.value if isinstance(part, ast.FormattedValue) else part)
            for part in node.values
        ]
        if not all(isinstance(part, Text) for part in parts):
            return None
        text = "".join(part.text for part in parts)
        self.dotted(text)
        return Text(text)

    def _attribute(self, node: ast.Attribute) -> Any:
        return self.attribute(self.value(node.value), node.attr)

    def _call(self, node: ast.Call) -> Any:
        function = self.value(node.func)
        given = [self.value(argument) for argument in node.args]
        named = {item.arg: self.value(item.value) for item in node.keywords}
        if isinstance(function, Function):
            _tell(function, given, named)
        if isinstance(function, Function | Class | Returns | Method):
            return function.result
        if isinstance(function, Thing) and function.object is not None:
            self._keywords(function, named)
            return values.result(function)
        if is_room_value(function):
            return function
        called = _BUILTIN.get(ast.unparse(node.func))
        return (
            called(self, node, given) if called is not None and (given or not node.args) else None
        )

    def _keywords(self, function: Thing, named: Mapping[str | None, Any]) -> None:
        for keyword in filter(None, named):
            name = f"{function.name}({keyword}=)"
            self.found.note(name, values.takes(function, keyword), self.where)

    def narrow(self, text: str, value: Any, kind: Any) -> None:
        """After an ``isinstance``, an expression may be of another class, too."""
        if isinstance(value, Instance) and isinstance(kind, Instance):
            kind = Instance(kind.name, (*kind.classes, *value.classes))
        if kind is not None:
            self.names[text] = kind

    def _subscript(self, node: ast.Subscript) -> Any:
        value = self.value(node.value)
        self.value(node.slice)
        if isinstance(value, Many):
            return value if isinstance(node.slice, ast.Slice) else value.value
        return value if is_room_value(value) else None

    def _tuple(self, node: ast.Tuple) -> Any:
        return Row(tuple(self.value(item) for item in node.elts))

    def _list(self, node: ast.List) -> Any:
        item = first_of(*[self.value(item) for item in node.elts])
        return Many(item, item)

    def _ifexp(self, node: ast.IfExp) -> Any:
        self.value(node.test)
        return first_of(self.value(node.body), self.value(node.orelse))

    def _boolop(self, node: ast.BoolOp) -> Any:
        return first_of(*[self.value(item) for item in node.values])

    def _namedexpr(self, node: ast.NamedExpr) -> Any:
        found = self.value(node.value)
        self.bind(node.target, found)
        return found

    def _starred(self, node: ast.Starred) -> Any:
        self.value(node.value)

    def _generatorexp(self, node: ast.GeneratorExp | ast.ListComp | ast.SetComp) -> Any:
        self._loops(node.generators)
        item = self.value(node.elt)
        return Many(item, item)

    _listcomp = _setcomp = _generatorexp

    def _dictcomp(self, node: ast.DictComp) -> Any:
        self._loops(node.generators)
        return Many(self.value(node.key), self.value(node.value))

    def _loops(self, generators: list[ast.comprehension]) -> None:
        for generator in generators:
            self.bind(generator.target, items_of(self.value(generator.iter)))
            for condition in generator.ifs:
                self.value(condition)

    # --- Names -----------------------------------------------------------------------------------

    def bind(self, target: ast.expr, value: Any) -> None:
        """Give a name, or several, what they stand for from now on."""
        if isinstance(target, ast.Tuple | ast.List):
            given = value.values if isinstance(value, Row) else [items_of(value)] * len(target.elts)
            for item, part in zip(target.elts, given, strict=False):
                self.bind(item, part)
        elif isinstance(target, ast.Name):
            if value is not None or target.id in self.names:
                self.names[target.id] = value
        elif isinstance(target, ast.Attribute):
            owner = self.value(target.value)
            if isinstance(owner, Class):
                if value is not None:
                    owner.attributes.setdefault(target.attr, value)
            else:
                self.attribute(owner, target.attr)
        else:
            self.value(target)


def items_of(value: Any) -> Any:
    """What a loop over a value gives."""
    return value.item if isinstance(value, Many) else value if is_room_value(value) else None


def _tell(function: Function, given: list[Any], named: Mapping[str | None, Any]) -> None:
    """Note what a function is called with."""
    arguments = function.node.args
    names = [item.arg for item in (*arguments.posonlyargs, *arguments.args)]
    is_bound = function.owner is not None and names[:1] == ["self"]
    pairs = [*zip(names[is_bound:], given, strict=False), *named.items()]
    for name, value in pairs:
        if name is not None and value is not None:
            function.parameters.setdefault(name, value)


# --- Python's own functions ----------------------------------------------------------------------


def _get(reader: Expressions, _: ast.Call, given: list[Any]) -> Any:
    return reader.attribute(given[0], given[1].text) if isinstance(given[1], Text) else None


def _is_instance(reader: Expressions, node: ast.Call, given: list[Any]) -> None:
    reader.narrow(ast.unparse(node.args[0]), given[0], reader.annotated(node.args[1]))


def _same(_: Expressions, __: ast.Call, given: list[Any]) -> Any:
    return given[0] if given else None


def _one(_: Expressions, __: ast.Call, given: list[Any]) -> Any:
    return items_of(given[0])


def _zip(_: Expressions, __: ast.Call, given: list[Any]) -> Any:
    return Many(Row(tuple(items_of(item) for item in given)), None)


_BUILTIN: Final[Mapping[str, Callable[[Expressions, ast.Call, list[Any]], Any]]] = {
    "getattr": _get,
    "hasattr": _get,
    "isinstance": _is_instance,
    "weakref.ref": lambda _, __, given: Returns(given[0]),
    "sys.modules.get": lambda _, __, given: values.find(given[0].text),
    "super": lambda reader, _, __: reader.names.get("super()"),
    "enumerate": lambda _, __, given: Many(Row((None, items_of(given[0]))), None),
    "zip": _zip,
    **dict.fromkeys(("list", "sorted", "tuple", "reversed", "iter", "set"), _same),
    **dict.fromkeys(("next", "min", "max"), _one),
}
