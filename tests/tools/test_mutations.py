"""The list of breaks that tests must notice. Running them takes minutes: ``make mutations``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import mutations
import pytest
from mutations import MUTATIONS, Mutation

BREAK = Mutation("doubled", "a.py", "x = 1", "x = 2", ("tests/test_a.py",))


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    file = tmp_path / mutations.PACKAGE / BREAK.file
    file.parent.mkdir()
    file.write_text("x = 1\n")
    return tmp_path


def test_each_text_occurs_once() -> None:
    assert mutations.main(["--check"]) == 0


def test_a_text_that_is_gone_is_named(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert mutations.misplaced([BREAK], checkout) == []
    for text, count in (("x = 3", 0), ("x = 1; x = 1", 2)):
        (checkout / mutations.PACKAGE / BREAK.file).write_text(text)
        problem = f"doubled: a.py has its text {count} times"
        assert mutations.misplaced([BREAK], checkout) == [problem]
    monkeypatch.setattr(mutations, "MUTATIONS", (BREAK,))
    monkeypatch.setattr(mutations, "ROOT", checkout)
    assert mutations.main([]) == 1
    assert "has its text 2 times" in capsys.readouterr().out


def test_each_changes_something_and_names_tests_that_are_there() -> None:
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS)
    for mutation in MUTATIONS:
        assert mutation.text != mutation.replacement
        for test in mutation.tests:
            file, _, name = test.partition("::")
            source = (mutations.ROOT / file).read_text()
            assert f"def {name.partition('[')[0]}(" in source if name else source


def test_a_break_is_applied(checkout: Path) -> None:
    BREAK.apply(checkout)
    assert (checkout / mutations.PACKAGE / BREAK.file).read_text() == "x = 2\n"


@pytest.mark.parametrize(
    ("ends", "code", "said"),
    [
        ([0, 1], 0, ["doubled red", "1 of 1 are noticed"]),
        ([0, 0], 1, ["doubled SURVIVED", "0 of 1 are noticed"]),
        ([0, 2], 1, ["doubled SURVIVED", "0 of 1 are noticed"]),
        ([0, None], 1, ["doubled SURVIVED", "0 of 1 are noticed"]),
        ([1], 1, ["red without a break"]),
    ],
    ids=["red", "green", "not collected", "stopped", "red before"],
)
def test_what_becomes_of_a_break(
    checkout: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    ends: list[int | None],
    code: int,
    said: list[str],
) -> None:
    left = iter(ends)
    monkeypatch.setattr(mutations, "copy_checkout", lambda *_: checkout)
    monkeypatch.setattr(mutations, "run_tests", lambda *_: next(left))
    assert mutations.run([BREAK]) == code
    words = " ".join(capsys.readouterr().out.split())
    assert all(text in words for text in said)


@pytest.mark.parametrize(("test", "end"), [("assert True", 0), ("assert False", 1), ("x = (", 2)])
def test_tests_run_in_a_copy(tmp_path: Path, test: str, end: int) -> None:
    source = f"def test():\n    {test}\n"
    (tmp_path / "test_a.py").write_text(source)
    assert mutations.run_tests(tmp_path, ["test_a.py"]) == end


def test_a_copy_has_what_git_knows(tmp_path: Path) -> None:
    copy = mutations.copy_checkout(mutations.ROOT, tmp_path / "copy")
    assert (copy / "pyproject.toml").read_text() == (mutations.ROOT / "pyproject.toml").read_text()
    assert not (copy / ".git").exists()


@pytest.mark.parametrize("arguments", [["no-such-break"], ["--list", "no-such-break"]])
def test_a_name_that_is_not_there(arguments: Sequence[str]) -> None:
    with pytest.raises(SystemExit):
        mutations.main(arguments)


def test_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert mutations.main(["--list"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(MUTATIONS)
