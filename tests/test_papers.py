"""README, CONTRIBUTING, the changelog and docs/: their links and the names in them exist."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from fusion_passes import FusionConfig
from fusion_passes.traced import pipeline
from fusion_passes.traced.verify import GraphPass
from tests.support.launch import ROOT, tracked

PAPERS: Final = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])

FIRST_PAGES: Final = ("README", "start", "options", "support", "symptoms", "how_it_works")
"""The pages for newcomers, in ``docs/``."""

MAX_FIRST_WORDS: Final = 4000

LINK: Final = re.compile(r"\]\((?![a-z]+:)([^)\s]*)\)")
FOLDERS: Final = r"(?:fusion_passes|testing|tests|tools|examples|docs|\.ci|\.github)"
PATH: Final = re.compile(rf"(?<![\w./~-])({FOLDERS}/[\w./*-]*[\w/*])(?:::(\w+))?")
PYTHON_FILE: Final = re.compile(r"(?<![\w./-])([\w/]+\.py)\b")
CODE: Final = re.compile(r"`([^`\n]+)`")
NAME: Final = re.compile(r"[A-Za-z_]\w*(?:\.\w+)*(?:\(\))?")

PLACEHOLDERS: Final = {"ddp_fusion_1_EraseDeadCode", "NCCL_SOCKET_IFNAME"}
"""Names that a page defines itself, that code assembles, or that only NCCL reads."""


def _label(path: Path) -> str:
    return str(path.relative_to(ROOT))


@functools.cache
def words_of_code() -> frozenset[str]:
    files = [name for name in tracked() if name.endswith(".py")]
    return frozenset(re.findall(r"\w+", " ".join((ROOT / name).read_text() for name in files)))


def prose(text: str) -> str:
    """The text without code blocks."""
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def anchors(text: str) -> set[str]:
    """Link targets of the headings of a page, as repository hosts make them."""
    headings = re.findall(r"^#+ (.+)$", prose(text), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def links(path: Path) -> Iterator[tuple[Path, str]]:
    """The files that a page links to, and the headings in them."""
    for link in LINK.findall(prose(path.read_text())):
        name, _, anchor = link.partition("#")
        yield (path.parent / name).resolve() if name else path, anchor


def broken_links(path: Path) -> Iterator[str]:
    for target, anchor in links(path):
        if not target.exists() or (anchor and anchor not in anchors(target.read_text())):
            yield f"{target}#{anchor}"


def missing_files(text: str) -> Iterator[str]:
    """Paths and tests in a text that do not exist."""
    for name, test in PATH.findall(text):
        found = list(ROOT.glob(name.rstrip("/"))) if "*" in name else [ROOT / name]
        if not found or not found[0].exists():
            yield name
        elif test and f"def {test}(" not in found[0].read_text():
            yield f"{name}::{test}"
    for name in PYTHON_FILE.findall(text):
        if not any(f"/{file}".endswith(f"/{name}") for file in tracked()):
            yield name


def unknown_names(text: str) -> Iterator[str]:
    """Names of functions, classes and options in a text that occur in no code."""
    for code in CODE.findall(prose(text)):
        if NAME.fullmatch(code) and not code.startswith("torch."):
            last = code.removesuffix("()").split(".")[-1]
            if last not in words_of_code() | PLACEHOLDERS:
                yield code


def test_links_lead_somewhere() -> None:
    assert {_label(path): found for path in PAPERS if (found := list(broken_links(path)))} == {}


def test_files_that_are_named_are_there() -> None:
    found = {_label(path): list(missing_files(path.read_text())) for path in PAPERS}
    assert {path: names for path, names in found.items() if names} == {}


def test_names_are_those_of_the_code() -> None:
    """The changelog is excluded, because it also names earlier things."""
    papers = [path for path in PAPERS if path.stem != "CHANGELOG"]
    found = {_label(path): list(unknown_names(path.read_text())) for path in papers}
    assert {path: names for path, names in found.items() if names} == {}


def test_what_is_read_first_is_short() -> None:
    pages = [ROOT / "docs" / f"{name}.md" for name in FIRST_PAGES]
    assert sum(len(page.read_text().split()) for page in pages) <= MAX_FIRST_WORDS


def test_every_page_can_be_reached_from_readme() -> None:
    reached, new = set[Path](), {ROOT / "README.md"}
    while new:
        reached |= new
        linked = {target for page in new for target, _ in links(page)}
        new = linked.intersection(PAPERS) - reached
    assert [_label(path) for path in PAPERS if path not in reached] == []


def test_options_are_explained() -> None:
    """Options are explained where a user looks: in their table, and in the docstring that ``help``
    shows."""
    table = (ROOT / "docs" / "options.md").read_text()
    for field in dataclasses.fields(FusionConfig):
        assert f"| `{field.name}` |" in table
        assert f"    {field.name}: " in str(FusionConfig.__doc__)


def test_passes_are_explained() -> None:
    page = (ROOT / "docs" / "passes.md").read_text()
    options = (ROOT / "docs" / "options.md").read_text()
    classes = [value for value in vars(pipeline).values() if isinstance(value, type)]
    passes = [one.__name__ for one in classes if issubclass(one, GraphPass)]
    assert len(passes) > 3
    for name in {*passes} - {"GraphPass"}:
        assert f"| `{name}` |" in page
        assert f"## {name}\n" in page
        assert f"`{name}`" in options, "a user can switch it off, or reads there that not"
