"""What a commit is checked with is what ``make lint`` runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parent.parent


def test_the_hooks_of_a_commit_run_the_commands_of_make_lint() -> None:
    recipe = re.search(r"^lint:\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert recipe is not None
    commands = re.findall(r"^\t@\$\(RUN\) (.*)$", recipe[1], re.MULTILINE)
    assert len(commands) == recipe[1].count("\n"), "each line of the recipe is a command"
    hooks = (ROOT / ".pre-commit-config.yaml").read_text()
    assert (
        re.findall(r"entry: python3 tools/setup_env.py -- (.*)$", hooks, re.MULTILINE) == commands
    )
    assert hooks.count("entry:") == hooks.count("language: system") == len(commands)
    assert hooks.count("pass_filenames: false") == len(commands), "they check all files"


def test_types_are_checked_everywhere() -> None:
    settings = (ROOT / "pyproject.toml").read_text()
    files = re.search(r"^files = \[(.*)\]$", settings, re.MULTILINE)
    assert files is not None
    checked = set(re.findall(r'"(\w+)"', files[1]))
    assert checked == {"fusion_passes", "examples", "testing", "tools", "tests"}
    assert "ignore_errors" not in settings
