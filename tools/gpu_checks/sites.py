"""What a part knows about where it runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gpu_checks.results import Row

SITE = "site.json"
"""File of a part's directory that has its :class:`Site`."""

ROWS = "rows.jsonl"
"""File of it with the rows that were measured, one a line."""

Note = Callable[[Row], None]
"""Takes a row of a part's table as soon as it is known; a later one of its title replaces it."""


@dataclass(frozen=True)
class Sharing:
    """How two ranks have one GPU.

    Attributes:
        apart: whether NCCL is told that each is on a machine of its own; it then takes two in any
            version, and sends through sockets.
        mps: directory of the service that runs the kernels of both at a time; empty without it.
    """

    apart: bool = False
    mps: str = ""

    def __str__(self) -> str:
        return f"{'as two machines' if self.apart else 'of one GPU'}, {self.turns}"

    @property
    def turns(self) -> str:
        """How their kernels run."""
        return "kernels side by side (MPS)" if self.mps else "kernels in turns"


@dataclass(frozen=True)
class Site:
    """Where a part runs.

    Attributes:
        device: ``"cuda"`` or ``"cpu"``. On the CPU all is tiny: it shows that the checks work.
        backend: of the process group.
        directory: for files of the part.
        cores: that it may use.
        memory_gib: of the device; 0 on the CPU.
        sharing: how two ranks have one GPU.
        catalog: module whose ``PARTS`` the part is from.
        deadline: by the clock ``time.monotonic``, which all processes of a machine share.
    """

    device: str
    backend: str
    directory: str
    cores: int = 1
    memory_gib: float = 0.0
    sharing: Sharing = Sharing()
    catalog: str = "gpu_checks.parts"
    deadline: float = 0.0

    @property
    def is_small(self) -> bool:
        return self.device == "cpu"

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> Site:
        data: dict[str, Any] = json.loads(path.read_text())
        return cls(**data | {"sharing": Sharing(**data["sharing"])})
