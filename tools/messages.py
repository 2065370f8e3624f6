"""Generates docs/messages.md from the code: the package's messages, by their first words.

    python tools/messages.py > docs/messages.md

Only the sources are read. Text that varies is written as an ellipsis.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

PACKAGE: Final = Path(__file__).parent.parent / "fusion_passes"

NOT_FOR_USERS: Final = ("graph", "layout", "stored", "torch_private", "traced")
"""Rooms whose errors are bugs of the package, except files of :data:`WITH_PARTS`."""

WITH_PARTS: Final = (
    "config.py",
    "ddp",
    "explain.py",
    "reducer",
    "reporting",
    "traced/backwards.py",
    "tuning",
)
"""Rooms and files that also return and keep strings that become a part of a message, or a reason in
the report."""

ERRORS: Final = "Errors"

PARTS: Final = "Reasons and parts"

OF_ERRORS: Final = "reducer/errors.py"
"""A file whose functions return the texts of errors."""

KINDS: Final = {
    "Warnings": re.compile("warn_once"),
    ERRORS: re.compile(r"\w+Error|raise_as_ddp"),
    "In the log and on the screen": re.compile("warning|info|print|exit"),
    PARTS: re.compile("append"),
}
"""Functions that are called with a message, by the heading of the page."""

SHORTEST: Final = 30
"""Minimum length of a message, in characters. A shorter string is a part of one, or not for
people."""

UNKNOWN: Final = "\N{HORIZONTAL ELLIPSIS}"

HEAD: Final = f"""\
# Every warning and error

Find a message by its first words; `{UNKNOWN}` stands for text that varies. Each message says what
to do; [symptoms](symptoms.md) covers problems without a message. This page is generated from the
code (`python tools/messages.py > docs/messages.md`).
"""


def text_of(node: ast.AST | None, names: dict[str, str]) -> str:
    """The string of an expression, with an ellipsis for each unknown part; ``names``: strings of
    constants."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.sub(r"%[sdr]", UNKNOWN, node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part, names) for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return text_of(node.left, names) + text_of(node.right, names)
    if isinstance(node, ast.FormattedValue):
        return text_of(node.value, names)
    return names.get(node.id, UNKNOWN) if isinstance(node, ast.Name) else UNKNOWN


def constants(trees: Iterable[ast.Module]) -> dict[str, str]:
    """The strings of constants that have one value wherever they are defined."""
    found: dict[str, set[str]] = {}
    for node in (node for tree in trees for node in tree.body):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.setdefault(node.target.id, set()).add(text_of(node.value, {}))
    texts = {name: next(iter(texts)) for name, texts in found.items() if len(texts) == 1}
    return {name: text for name, text in texts.items() if UNKNOWN not in text}


def messages(tree: ast.Module, names: dict[str, str]) -> Iterator[tuple[str, str]]:
    """The messages of a file for people, each with its heading."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func).rpartition(".")[2]
            for kind in (kind for kind, calls in KINDS.items() if calls.fullmatch(called)):
                yield from ((kind, text_of(argument, names)) for argument in node.args)
        elif isinstance(node, ast.Return | ast.Assign | ast.AnnAssign):
            value = node.value
            for part in (value.body, value.orelse) if isinstance(value, ast.IfExp) else (value,):
                yield PARTS, text_of(part, names)
        elif isinstance(node, ast.List | ast.Dict):
            for part in node.elts if isinstance(node, ast.List) else node.keys:
                yield PARTS, text_of(part, names)


def page() -> str:
    """The page, as Markdown."""
    trees = {path: ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}
    names = constants(trees.values())
    found: dict[str, set[str]] = {kind: set() for kind in KINDS}
    for path, tree in trees.items():
        rooms = {path.relative_to(PACKAGE).parts[0], str(path.relative_to(PACKAGE))}
        has_parts = not rooms.isdisjoint(WITH_PARTS)
        is_for_users = has_parts or rooms.isdisjoint(NOT_FOR_USERS)
        for kind, text in messages(tree, names) if is_for_users else ():
            kind = ERRORS if kind == PARTS and OF_ERRORS in rooms else kind  # noqa: PLW2901
            is_long = len(text.replace(UNKNOWN, "")) >= SHORTEST and " " in text
            if is_long and "\n\n" not in text and (kind != PARTS or has_parts):
                found[kind].add(" ".join(text.split()))
    found[PARTS].difference_update(*(texts for kind, texts in found.items() if kind != PARTS))
    lines = [HEAD]
    for kind, texts in found.items():
        lines += [f"## {kind}\n", *(f"* {text}" for text in sorted(texts, key=str.lower)), ""]
    return "\n".join(lines)


if __name__ == "__main__":
    print(page(), end="")
