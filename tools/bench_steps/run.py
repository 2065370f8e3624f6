"""A run of the bench: its cells, and what they depend on."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from bench_steps.results import Cell
from bench_steps.timelines import Timeline
from benches.results import Origin, read_json, write_json

PART: Final = "steps"


@dataclass
class Run:
    """What was measured, and on what.

    Attributes:
        origin: where its figures are from.
        cells: what was measured.
        failures: by model, why it could not be measured at all; by way, why it has no timeline.
        timelines: of the ways for which they were asked.
    """

    origin: Origin
    cells: list[Cell] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)
    timelines: list[Timeline] = field(default_factory=list)

    def write(self, path: Path) -> None:
        """Put the run into a file; it appears whole or not at all."""
        figures = {
            "cells": [cell.to_json() for cell in self.cells],
            "failures": self.failures,
            "timelines": [timeline.to_json() for timeline in self.timelines],
        }
        write_json(path, PART, self.origin, figures)

    @classmethod
    def read(cls, path: Path) -> Run:
        """A run from a file.

        Raises:
            ValueError: it is no file of a run, or one of another format.
        """
        origin, data = read_json(path, PART)
        cells = [Cell.from_json(cell) for cell in data.pop("cells")]
        timelines = [Timeline.from_json(one) for one in data.pop("timelines")]
        return cls(origin, **data, cells=cells, timelines=timelines)
