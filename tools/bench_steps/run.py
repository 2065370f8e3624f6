"""A run of the bench: its cells, and what they depend on."""

from __future__ import annotations

import datetime
import json
import platform
import shlex
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch

from bench_steps.results import Cell
from bench_steps.timelines import Timeline

FORMAT: Final = 1
"""Of the JSON file; another one is not read."""


@dataclass
class Run:
    """What was measured, and on what.

    Attributes:
        date: in ISO's form.
        command: that repeats it.
        versions: of torch and Python.
        machine: its cores or GPUs.
        cells: what was measured.
        failures: by model, why it could not be measured at all; by way, why it has no timeline.
        timelines: of the ways for which they were asked.
    """

    date: str
    command: str
    versions: str
    machine: str
    cells: list[Cell] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)
    timelines: list[Timeline] = field(default_factory=list)

    @classmethod
    def here(cls, arguments: list[str]) -> Run:
        """A run that starts now on this machine."""
        command = shlex.join(["python", "tools/bench.py", *arguments])
        versions = f"torch {torch.__version__}, Python {platform.python_version()}"
        return cls(str(datetime.date.today()), command, versions, _machine())

    def write(self, path: Path) -> None:
        """Put the run into a file; it appears whole or not at all."""
        data = vars(self) | {"format": FORMAT}
        data["cells"] = [cell.to_json() for cell in self.cells]
        data["timelines"] = [timeline.to_json() for timeline in self.timelines]
        part = path.with_suffix(".part")
        part.write_text(json.dumps(data) + "\n")
        part.replace(path)

    @classmethod
    def read(cls, path: Path) -> Run:
        """A run from a file.

        Raises:
            ValueError: it is no file of a run, or one of another format.
        """
        try:
            data: dict[str, Any] = json.loads(path.read_text())
            known = data.pop("format", None)
        except (OSError, ValueError, AttributeError, TypeError) as error:
            raise ValueError(f"{path} must be a JSON file of this bench: {error}.") from error
        if known != FORMAT:
            raise ValueError(f"{path} has format {known}, this bench reads {FORMAT}. Run it anew.")
        cells = [Cell.from_json(cell) for cell in data.pop("cells")]
        timelines = [Timeline.from_json(one) for one in data.pop("timelines")]
        return cls(**data, cells=cells, timelines=timelines)


def _machine() -> str:
    if torch.cuda.is_available():
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{len(names)} cores of {names[0]}" if names else platform.processor() or sys.platform
