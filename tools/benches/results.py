"""What all parts of the bench keep: where their figures are from, and the page that shows them."""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch

import command_line

FORMAT: Final = 1
"""Of the JSON files; another one is not read."""

TOOL: Final = "tools/bench.py"


@dataclass(frozen=True)
class Origin:
    """Where figures are from.

    Attributes:
        date: in ISO's form.
        command: that repeats them.
        versions: of torch and Python.
        machine: its cores or GPUs.
    """

    date: str
    command: str
    versions: str
    machine: str

    @classmethod
    def here(cls, part: str, arguments: Sequence[str]) -> Origin:
        """Return the origin of figures that are measured now on this machine.

        Args:
            part: of the bench; empty if the command names none.
            arguments: of the part.
        """
        command = shlex.join(["python", TOOL, *([part] if part else []), *arguments])
        versions = f"torch {torch.__version__}, Python {platform.python_version()}"
        return cls(str(datetime.date.today()), command, versions, _machine())

    def lines(self) -> list[str]:
        """Where figures are from, as a page says it below its title."""
        said = f"{self.date}, {self.versions}, {self.machine}."
        return [said, "", f"Reproduce: `{self.command}`.", ""]


def page(title: str, origin: Origin, *paragraphs: str) -> str:
    """A page of Markdown: a title, where its figures are from, and paragraphs or tables."""
    blocks = [f"# {title}", "\n".join(origin.lines()).rstrip(), *paragraphs]
    return "\n\n".join(block.strip("\n") for block in blocks if block.strip()) + "\n"


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, words: int = 1) -> str:
    """A table of Markdown.

    Args:
        columns: its head.
        rows: as many cells each.
        words: how many columns at the left hold words; the others hold numbers.
    """
    marks = ["---"] * words + ["---:"] * (len(columns) - words)
    return "\n".join(f"| {' | '.join(row)} |" for row in (columns, marks, *rows))


def write_json(path: Path, part: str, origin: Origin, figures: dict[str, Any]) -> None:
    """Put figures into a file; it appears whole or not at all."""
    data = {"format": FORMAT, "part": part, **asdict(origin), **figures}
    temporary = path.with_suffix(".part")
    temporary.write_text(json.dumps(data, default=_plain) + "\n")
    temporary.replace(path)


def read_json(path: Path, part: str) -> tuple[Origin, dict[str, Any]]:
    """Read figures from a file, and where they are from.

    Raises:
        ValueError: it is no file of this part of the bench, or one of another format.
    """
    try:
        data: dict[str, Any] = json.loads(path.read_text())
        known = data.pop("format", None)
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise ValueError(f"{path} must be a JSON file of this bench: {error}.") from error
    if known != FORMAT:
        raise ValueError(f"{path} has format {known}, this bench reads {FORMAT}. Run it anew.")
    # The first files had the steps alone, and no name of a part.
    found = data.pop("part", "steps")
    if found != part:
        raise ValueError(f"{path} must be of the part {part}, but is of {found}. Give another.")
    try:
        origin = Origin(**{name: data.pop(name) for name in Origin.__dataclass_fields__})
    except KeyError as error:
        raise ValueError(
            f"{path} must say its {error.args[0]}, but does not. Run it anew."
        ) from error
    return origin, data


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """A part's command line, with the options that all parts have."""
    parser = command_line.parser_of(description)
    parser.add_argument("--output", type=Path, metavar="DIR", help="keep the figures and the page")
    return parser


def keep(
    output: Path | None, part: str, origin: Origin, figures: dict[str, Any], text: str
) -> None:
    """Print a page; with a directory, keep it there beside what was measured."""
    print(text)
    if output is not None:
        write(output, part, origin, figures, text)


def write(output: Path, part: str, origin: Origin, figures: dict[str, Any], text: str) -> None:
    """Keep a page in a directory, beside what was measured."""
    output.mkdir(parents=True, exist_ok=True)
    write_json(output / f"{part}.json", part, origin, figures)
    (output / f"{part}.md").write_text(text)


def _plain(value: Any) -> Any:
    """A dataclass as what JSON has words for."""
    as_plain: Callable[[Any], Any] = asdict
    return as_plain(value)


def _machine() -> str:
    if torch.cuda.is_available():
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{len(names)} cores of {names[0]}" if names else platform.processor() or sys.platform
