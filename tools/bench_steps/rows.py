"""What is measured: the rows of a table. Nothing here imports torch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

CAPS_MB: Final = (1.0, 5.0, 10.0, 25.0, 50.0, 100.0)
"""Caps that are tried for the ways that have one, in MiB."""

Kind = Literal["way", "network", "probe"]
"""A way of training; the network alone; compute alone, noting when each gradient is ready."""


@dataclass(frozen=True)
class Row:
    """One row of a table: processes of its own.

    Attributes:
        kind: what its processes do.
        way: name of the way, of a row of that kind.
        cap_mb: of a bucket, in MiB; ``None`` is the way's default.
    """

    kind: Kind
    way: str = ""
    cap_mb: float | None = None

    @property
    def label(self) -> str:
        """``torch concat, 5 MB``."""
        name = self.way or {"network": "network alone", "probe": "ready times"}[self.kind]
        return name if self.cap_mb is None else f"{name}, {self.cap_mb:g} MB"


@dataclass(frozen=True)
class Assignment:
    """What one rank of a row is to do.

    Attributes:
        row: of which row.
        model: name of the model.
        size: name of its size.
        rank: which rank.
        ranks: how many there are.
        cores: that its threads run on.
        host: where rank 0 is found by the others.
        timeout_s: of the process group.
        forwards: of a step, before one backward.
        timeline: whether generated kernels say their names to the profiler.
    """

    row: Row
    model: str
    size: str
    rank: int
    ranks: int
    cores: tuple[int, ...]
    host: str
    timeout_s: float
    forwards: int = 1
    timeline: bool = False

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Assignment:
        data: dict[str, Any] = json.loads(text)
        data["row"] = Row(**data["row"])
        data["cores"] = tuple(data["cores"])
        return cls(**data)


@dataclass(frozen=True)
class Started:
    """That a rank is ready to be measured.

    Attributes:
        seconds: from the wrapping in DDP to the end of the first step.
        gradient_bytes: of each gradient.
        dtypes: of the gradients, by name.
    """

    seconds: float
    gradient_bytes: tuple[int, ...] = ()
    dtypes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Checked:
    """A rank's gradients beside eager DDP's.

    Attributes:
        error: the largest difference of an element, over the largest element of its gradient.
        worst: the parameter where that is.
        missing: parameters with a gradient on one side only.
        buffers: buffers that differ.
        compared: whether there was something to compare with.
    """

    error: float = 0.0
    worst: str = ""
    missing: tuple[str, ...] = ()
    buffers: tuple[str, ...] = ()
    compared: bool = True


@dataclass(frozen=True)
class Stepped:
    """Some steps of a rank.

    Attributes:
        seconds: of each step.
        cpu_s: seconds of the process on CPUs, of all threads, for all steps together.
        ready_s: of a probe, for each step: from its start until each gradient was there.
        ready_bytes: of a probe: size of these gradients.
    """

    seconds: tuple[float, ...]
    cpu_s: float
    ready_s: tuple[tuple[float, ...], ...] = ()
    ready_bytes: tuple[int, ...] = ()


def rows_of(
    ways: Iterable[str], capped: Iterable[str], caps_mb: Sequence[float], gradient_bytes: int
) -> list[Row]:
    """The rows of a model.

    Args:
        ways: each at its default.
        capped: those that are also tried with each cap.
        caps_mb: in MiB. Of those that hold all gradients only the smallest is tried: with each of
            them there is one bucket.
        gradient_bytes: of all gradients together.
    """
    defaults = [Row("way", way) for way in ways]
    useful = list[float]()
    for cap_mb in sorted(caps_mb):
        useful.append(cap_mb)
        if cap_mb * 2**20 >= gradient_bytes:
            break
    # Defaults are compared with each other, so they come first, to be measured together.
    return defaults + [Row("way", way, cap_mb) for way in capped for cap_mb in useful]


def groups_of(rows: Sequence[Row], size: int) -> list[list[Row]]:
    """Rows that are measured together, ``size`` at a time, in their order."""
    return [list(rows[i : i + size]) for i in range(0, len(rows), size)]
