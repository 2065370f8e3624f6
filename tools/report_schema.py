"""Generates the JSON Schema of a report's JSON from its classes: their fields, and the descriptions
in their docstrings.

python tools/report_schema.py > docs/report.schema.json
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any

from pydantic import TypeAdapter

from fusion_passes.reporting.records import SCHEMA, Report


def json_schema() -> dict[str, Any]:
    """The schema, with a sentence for each field."""
    schema = TypeAdapter(Report).json_schema(mode="serialization")
    # It is not in the JSON.
    del schema["properties"]["timeline"]
    for name in ("Timeline", "RankSteps", "Span"):
        del schema["$defs"][name]
    for item in (schema, *schema["$defs"].values()):
        _describe(item)
        item["required"], item["additionalProperties"] = list(item["properties"]), False
    schema["properties"]["schema"]["const"] = SCHEMA
    dialect = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    return dialect | schema | {"title": SCHEMA}


def _describe(item: dict[str, Any]) -> None:
    """Add the description in a class's docstring to each of its fields."""
    said, _, attributes = item["description"].partition("\n\nAttributes:\n")
    item["description"] = _one_line(said)
    for name, words in re.findall(r"^    (\w+): (.+(?:\n {5,}.+)*)", attributes, re.MULTILINE):
        if name in item["properties"]:
            item["properties"][name]["description"] = _one_line(words)


def _one_line(text: str) -> str:
    return re.sub(r"\s+", " ", text)


if __name__ == "__main__":
    sys.stdout.write(json.dumps(json_schema(), indent=2) + "\n")
