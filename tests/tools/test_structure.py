"""The tool that prints the shape of the package."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import pytest
import structure

from structure_drawing import floors_of, implied_imports, purposes_of

ONE = '''"""A file."""

from fusion_passes.two import b


def a():
    """Has a docstring.

    Of three lines.
    """

    def inner(): pass

    return b
'''
TWO = "import torch\nimport fusion_passes.torch_private.door\n\ndef b(): return torch._C\n"
DOOR = "from torch._ops import OpOverload\n"


@pytest.fixture
def package(tmp_path: Path) -> Path:
    folder = tmp_path / "fusion_passes"
    for name, text in {"one/a": ONE, "two": TWO, "torch_private/door": DOOR}.items():
        path = folder / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def test_tables(package: Path) -> None:
    assert structure.as_markdown(package).splitlines() == [
        "| room | files | lines | imports |",
        "| --- | ---: | ---: | --- |",
        "| torch_private | 1 | 1 |  |",
        "| two | 1 | 4 | torch_private |",
        "| one | 1 | 14 | two |",
        "| all | 3 | 19 | |",
        "",
        "| lines | number | median | 90 % have at most | longest |",
        "| --- | ---: | ---: | ---: | ---: |",
        "| of a file | 3 | 4 | 12 | 14 |",
        "| of a function, without its docstring | 3 | 1 | 4 | 5 |",
        "",
        (
            "Private names of torch: 1 in torch_private; elsewhere 1 imported or written out, and "
            "0 more as attributes of torch's objects, as arguments, or in the registry of patches."
        ),
    ]


def test_rooms_that_import_each_other_are_listed(package: Path) -> None:
    (package / "two.py").write_text("from fusion_passes.one import a\n")
    rooms = {room.name: room.imports for room in structure.rooms_of(package)}
    assert rooms == {"torch_private": (), "one": ("two",), "two": ("one",)}


def test_a_commit_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert structure.main(["--commit", "no-such-commit"]) == 1
    assert "no-such-commit" in capsys.readouterr().err


# --- The drawing -------------------------------------------------------------------------------

PAGE = """\
| room | what it does |
| --- | --- |
| `fusion_passes/one/` | does <one> |
| `fusion_passes/two.py`, `fusion_passes/torch_private/` | does `two`; the door |
"""


def test_rooms_stand_above_what_they_import(package: Path) -> None:
    assert floors_of(structure.rooms_of(package)) == {"torch_private": 0, "two": 1, "one": 2}


def test_an_import_that_another_brings_along_is_implied(package: Path) -> None:
    assert implied_imports(structure.rooms_of(package)) == set()
    (package / "one" / "b.py").write_text("import fusion_passes.torch_private.door\n")
    assert implied_imports(structure.rooms_of(package)) == {("one", "torch_private")}


def test_a_circle_is_drawn_too(package: Path) -> None:
    (package / "two.py").write_text("from fusion_passes.one import a\n")
    rooms = structure.rooms_of(package)
    assert floors_of(rooms) == {"torch_private": 0, "one": 0, "two": 1}
    assert implied_imports(rooms) == set()


def test_what_the_page_says() -> None:
    assert purposes_of(PAGE) == {
        "one": "does <one>",
        "two": "does two",
        "torch_private": "the door",
    }


@pytest.mark.parametrize("page", [PAGE, None])
def test_the_drawing_is_svg_with_all_rooms_and_imports(package: Path, page: str | None) -> None:
    if page is not None:
        (package.parent / "docs").mkdir()
        (package.parent / "docs" / "architecture.md").write_text(page)
    root = ElementTree.fromstring(structure.as_svg(package.parent))
    classes = Counter(element.get("class") for element in root.iter())
    assert (classes["box"], classes["import"], classes["implied"]) == (3, 2, 0)
    assert classes["what"] == (3 if page else 0)
    titles = {element.text for element in root.iter("{http://www.w3.org/2000/svg}title")}
    assert {"one imports two", "two imports torch_private"} <= titles


def test_the_drawing_is_written_into_a_file(tmp_path: Path) -> None:
    file = tmp_path / "drawing.svg"
    assert structure.main(["--draw", str(file)]) == 0
    kept = structure.ROOT / "docs" / "structure.svg"
    remedy = "python tools/structure.py --draw docs/structure.svg"
    assert file.read_text() == kept.read_text(), remedy
