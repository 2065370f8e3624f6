"""The pages of docs/: their examples run, and the page of messages is generated from the code."""

from __future__ import annotations

import ast
import doctest
import re
from pathlib import Path
from typing import Final

import messages
import pytest
import torch

from fusion_passes.reducer import copies
from tests.support.fake_world import fake_world
from tests.support.launch import ROOT

DOCS: Final = ROOT / "docs"
PAGES: Final = sorted(DOCS.glob("*.md"))


def test_messages_are_those_of_the_code() -> None:
    remedy = "python tools/messages.py > docs/messages.md"
    assert (DOCS / "messages.md").read_text() == messages.page(), remedy


def test_every_way_to_say_something_is_found() -> None:
    source = """
def f(x):
    warn_once("topic", f"{x} was warned" " of.")
    log.warning("%s was logged.", x)
    if x:
        raise ValueError(f"{OPTION} was " + "refused.")
    said.append(f"{x} was said.")
    text = "a reason" if x else "another one"
    x.call("nobody reads this")
"""
    found = set(messages.messages(ast.parse(source), {"OPTION": "mode"}))
    unknown = messages.UNKNOWN
    assert found - {("In the log and on the screen", unknown), ("Warnings", "topic")} == {
        ("Warnings", f"{unknown} was warned of."),
        ("In the log and on the screen", f"{unknown} was logged."),
        ("Errors", "mode was refused."),
        (messages.PARTS, f"{unknown} was said."),
        (messages.PARTS, "a reason"),
        (messages.PARTS, "another one"),
    }


def test_what_to_do_about_copied_gradients_is_in_the_symptoms() -> None:
    page = (DOCS / "symptoms.md").read_text()
    reasons = [text for name, text in vars(copies).items() if name.isupper()]
    assert len(reasons) > 10
    assert [text for text in reasons if re.split("[:,]", text)[0] not in page] == []


@pytest.mark.parametrize(
    "path", [path for path in PAGES if ">>> " in path.read_text()], ids=lambda path: path.stem
)
def test_examples_run(path: Path) -> None:
    """Run the examples of a page that are written for Python's prompt, in a fake process group."""
    try:
        with fake_world():
            failed, _ = doctest.testfile(str(path), module_relative=False)
    finally:
        torch._inductor.config.ddp_fusion = None
    assert not failed
