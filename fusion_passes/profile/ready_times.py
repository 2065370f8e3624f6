"""When the gradients of a module were ready in rounds of a run: plain values, and their files.

A file is one of a module on a place: its key is made of the module's parameters.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from fusion_passes.profile.files import directory, keep
from fusion_passes.profile.records import Place, read_format

FORMAT: Final = 1
"""Of the file. Another one is measured anew."""


@dataclass(frozen=True)
class ReadyTimes:
    """When the gradients of a module were ready.

    Attributes:
        rounds: how many were measured.
        numbers: of the parameters, in the order in which their gradients come.
        ready_ns: when each is ready on all ranks, in nanoseconds from the start of the backward,
            where nothing is sent meanwhile; never less than for the one before.
        measured: when, for people.

    Raises:
        ValueError: there is no round or parameter, one twice, or a time that falls.
    """

    rounds: int
    numbers: tuple[int, ...]
    ready_ns: tuple[int, ...]
    measured: str

    def __post_init__(self) -> None:
        if self.rounds < 1 or not self.numbers or len(self.numbers) != len(self.ready_ns):
            raise ValueError("there is no round, or not one time for each parameter")
        if len(set(self.numbers)) < len(self.numbers):
            raise ValueError("a parameter has two times")
        if list(self.ready_ns) != sorted(self.ready_ns) or self.ready_ns[0] < 0:
            raise ValueError("a gradient is ready before the one before it")

    def to_json(self) -> str:
        """As text; :meth:`from_json` reads it."""
        return json.dumps({"format": FORMAT, **asdict(self)}, sort_keys=True)

    @staticmethod
    def from_json(text: str) -> ReadyTimes:
        """What :meth:`to_json` wrote.

        Raises:
            ValueError: the text is none, or not whole, or of another format; it says what is wrong.
        """
        with read_format(text, FORMAT) as data:
            return ReadyTimes(
                int(data["rounds"]),
                tuple(map(int, data["numbers"])),
                tuple(map(int, data["ready_ns"])),
                str(data["measured"]),
            )


def parameters_key(parameters: Sequence[tuple[int, str, Sequence[int], str]]) -> str:
    """Equal for modules of equal parameters; 16 hexadecimal digits.

    Args:
        parameters: of each that is trained, its number, name, shape and dtype.
    """
    listed = [[number, name, list(shape), dtype] for number, name, shape, dtype in parameters]
    return hashlib.sha256(json.dumps(listed).encode()).hexdigest()[:16]


def ready_path(place: Place, key: str) -> Path:
    """The file of a module's ready times; see :func:`parameters_key`."""
    return directory() / f"{place.digest()}-{key}.ready.json"


def store_ready(path: Path, times: ReadyTimes) -> bool:
    """Keep what was measured; the log says if that cannot be.

    Returns:
        Whether it is kept.
    """
    return keep(path, times.to_json(), "Ready times")
