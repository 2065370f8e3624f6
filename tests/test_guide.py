"""The guide: its pages are built, its examples run, and every message of the package is in it."""

from __future__ import annotations

import ast
import doctest
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
import torch

from testing.fake_world import fake_world

ROOT: Final = Path(__file__).parent.parent
GUIDE: Final = ROOT / "docs" / "guide"
PACKAGE: Final = ROOT / "fusion_passes"

# --- Messages ------------------------------------------------------------------------------------

SAYING: Final = {
    "warn_once", "ValueError", "RuntimeError", "TimeoutError", "raise_as_ddp", "RanksDisagreeError",
    "ChangedGraphError", "RefusedGradientError", "SettingsDifferError", "warning",
}  # fmt: skip
"""What makes a message for people."""

NOT_FOR_USERS: Final = {"passes", "graph", "lowering", "torch_private", "plan", "state.py"}
"""Rooms whose errors are bugs of the package, and whose texts are explained with the report."""

NO_MESSAGES: Final = {
    "advice.py", "command.py", "memory.py", "object_patches.py", "patch.py", "patches.py",
    "records.py",
}  # fmt: skip
"""Files with texts that are no warnings and no errors."""

SHORTEST: Final = 30
"""Characters of a part of a text that says which text it is."""


def fragments(node: ast.AST) -> list[str]:
    """The constant parts of a text that is put together."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [node.value]
    if isinstance(node, ast.JoinedStr):
        return [part for value in node.values for part in fragments(value)]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = fragments(node.left), fragments(node.right)
        if left and right:
            return [*left[:-1], left[-1] + right[0], *right[1:]]
        return left + right
    return []


def texts(source: str) -> Iterator[str]:
    """The longest constant part of each message that a source file has, and of each text that
    becomes a part of one: a sentence that a function returns or a variable is given."""
    for node in ast.walk(ast.parse(source)):
        found: list[ast.AST] = []
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func).split(".")[-1]
            found = [*node.args, *(k.value for k in node.keywords)] if name in SAYING else []
        elif isinstance(node, ast.Return | ast.Assign | ast.AnnAssign) and node.value is not None:
            found = [node.value]
            if isinstance(node.value, ast.IfExp):
                found = [node.value.body, node.value.orelse]
        for item in found:
            longest = max(fragments(item), key=len, default="")
            if len(longest) >= SHORTEST and " " in longest:
                yield " ".join(longest.split())


def plain(page: str) -> str:
    """A page as it is read: without marks, in one line."""
    return " ".join(re.sub(r"[`*#>|]", "", page).split())


def messages() -> dict[str, str]:
    """The messages of the package, each with its file."""
    files = [
        path
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.relative_to(PACKAGE).parts[0] not in NOT_FOR_USERS and path.name not in NO_MESSAGES
    ]
    return {text: str(path.relative_to(ROOT)) for path in files for text in texts(path.read_text())}


def test_every_message_is_explained() -> None:
    page = plain((GUIDE / "messages.md").read_text())
    missing = {text: path for text, path in messages().items() if plain(text) not in page}
    assert missing == {}, "add cause and remedy to docs/guide/messages.md"
    assert len(messages()) > 20


def test_every_entry_is_a_message_of_the_package() -> None:
    """None is left of a text that has changed or gone."""
    nodes = [
        node for path in PACKAGE.rglob("*.py") for node in ast.walk(ast.parse(path.read_text()))
    ]
    said = " | ".join(plain(part) for node in nodes for part in fragments(node))
    titles = re.findall(r"^### (.+)$", (GUIDE / "messages.md").read_text(), re.MULTILINE)
    longest = [
        max(map(str.strip, re.split(r"\bX\b|%s|[:,] ", plain(title))), key=len) for title in titles
    ]
    assert [part for part in longest if part.strip(".") not in said] == []


def test_each_message_has_a_cause_and_a_remedy() -> None:
    sections = re.split(r"^### ", (GUIDE / "messages.md").read_text(), flags=re.MULTILINE)[1:]
    assert len(sections) > 20
    for section in sections:
        assert "**Cause:**" in section, section
        assert "**Remedy:**" in section, section


def test_a_message_is_found_in_its_parts() -> None:
    source = """
def f(x):
    warn_once("topic", f"{x} is a text that is long enough to be one: "
              f"{x} was given. And this is its longest part, which is warned apart.")
    raise ValueError("too short")
"""
    assert list(texts(source)) == [
        "was given. And this is its longest part, which is warned apart."
    ]


# --- Pages ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted(GUIDE.glob("*.md")), ids=lambda path: path.stem)
def test_examples_run(path: Path) -> None:
    """Those that are written as at Python's prompt, in a process group that sends nothing."""
    torch._dynamo.reset()
    try:
        with fake_world():
            failed, _ = doctest.testfile(str(path), module_relative=False)
    finally:
        torch._inductor.config.ddp_fusion = None
    assert not failed


def test_pages_are_built(tmp_path: Path) -> None:
    """Links between them too: mkdocs fails on one that leads nowhere."""
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    config = load_config(str(ROOT / "mkdocs.yml"), strict=True, site_dir=str(tmp_path))
    build(config)
    for page in GUIDE.glob("*.md"):
        name = "index.html" if page.stem == "README" else f"{page.stem}/index.html"
        assert (tmp_path / "guide" / name).is_file(), page
