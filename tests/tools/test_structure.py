"""The tool that prints the shape of the package."""

from __future__ import annotations

from pathlib import Path

import pytest
import structure

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
