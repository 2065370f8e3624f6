"""The JSON Schema of a report's JSON, made from the classes that it is written from.

python -m fusion_passes.reporting.schema > docs/report.schema.json
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import sys
import types
import typing
from collections.abc import Mapping
from typing import Any, Final

from fusion_passes.reporting.records import SCHEMA, Report

_SIMPLE: Final = types.MappingProxyType(
    {str: "string", int: "integer", float: "number", bool: "boolean"}
)
_LEFT_OUT: Final = "timeline"
"""The field of a report that its JSON has not."""


def json_schema() -> dict[str, Any]:
    """The schema, with the docstrings' words for each field."""
    properties = _of_class(Report)
    properties["properties"]["schema"]["const"] = SCHEMA
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": SCHEMA} | properties


def _of_class(kind: type) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    said = _descriptions(kind)
    names = [item.name for item in dataclasses.fields(kind) if item.name != _LEFT_OUT]
    return {
        "type": "object",
        "description": inspect.cleandoc(kind.__doc__ or "").split("\n\n")[0].replace("\n", " "),
        "properties": {name: _of_type(hints[name]) | _words(said, name) for name in names},
        "required": names,
        "additionalProperties": False,
    }


def _words(said: Mapping[str, str], name: str) -> dict[str, str]:
    return {"description": said[name]} if name in said else {}


def _descriptions(kind: type) -> dict[str, str]:
    """What a docstring says of each attribute."""
    _, _, text = inspect.cleandoc(kind.__doc__ or "").partition("Attributes:\n")
    items = re.findall(r"^    (\w+): (.+(?:\n {5,}.+)*)", text, re.MULTILINE)
    return {name: re.sub(r"\s+", " ", words) for name, words in items}


def _of_type(hint: Any) -> dict[str, Any]:  # noqa: PLR0911  One for each kind of type.
    if hint in _SIMPLE:
        return {"type": _SIMPLE[hint]}
    if hint is Any:
        return {}
    if dataclasses.is_dataclass(hint):
        return _of_class(hint)  # type: ignore[arg-type]
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return {"enum": list(inner)}
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [_of_type(item) for item in inner]}
    if hint is type(None):
        return {"type": "null"}
    if origin is tuple and inner[-1] is Ellipsis:
        return {"type": "array", "items": _of_type(inner[0])}
    if origin is tuple:
        items = [_of_type(item) for item in inner]
        return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}
    assert origin is Mapping, f"a report has no fields of type {hint}"
    return {"type": "object", "additionalProperties": _of_type(inner[1])}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(json_schema(), indent=2) + "\n")
