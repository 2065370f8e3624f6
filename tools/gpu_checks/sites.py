"""Where a part runs, and what has become of it. Nothing here imports torch."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from benches.processes import Place, cores_of
from benches.results import Row

SITE: Final = "site.json"
"""File of a part's directory that has its :class:`Site`."""

ROWS: Final = "rows.jsonl"
"""File of it with the rows that were noted, one a line."""

Note = Callable[[Row], None]
"""Takes a row of a part's table as soon as it is known; a later one of its title replaces it."""

MPS: Final = "CUDA_MPS_PIPE_DIRECTORY"
"""Environment variable: by which processes find NVIDIA's Multi-Process Service, which runs the
kernels of several at a time. Without it they have the GPU in turns of milliseconds, which each
all-reduce between them waits for."""

MPS_COMMAND: Final = "nvidia-cuda-mps-control"
MPS_PATHS: Final = ("/usr/local/nvidia/bin", "/usr/local/cuda/bin", "/usr/bin")
MPS_ANSWER_S: Final = 10.0


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
        turns = "kernels side by side (MPS)" if self.mps else "kernels in turns"
        return f"{'as two machines' if self.apart else 'of one GPU'}, {turns}"


@dataclass(frozen=True)
class Site:
    """Where a part runs.

    Attributes:
        device: ``"cuda"`` or ``"cpu"``. On the CPU all is tiny: it shows that the checks work.
        backend: of the process group.
        directory: for files of the part.
        cores: that it may use.
        gpus: how many there are.
        memory_gib: of the device; 0 on the CPU.
        sharing: how two ranks have one GPU.
        catalog: module whose ``PARTS`` the part is from.
        deadline: by the clock ``time.monotonic``, which all processes of a machine share.
    """

    device: str
    backend: str
    directory: str = ""
    cores: int = 1
    gpus: int = 0
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

    def place(self, ranks: int, **options: Any) -> Place:
        """Where ranks run here.

        Args:
            ranks: how many; two of them share one GPU where there is but one.
            options: of :class:`benches.processes.Place`, beside or in the place of these.
        """
        variables = dict[str, str]()
        prefixes: tuple[tuple[str, ...], ...] = options.pop("prefixes", ((),) * ranks)
        if self.is_small:
            variables["CUDA_VISIBLE_DEVICES"] = ""
        elif ranks > self.gpus:
            variables["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
            if self.sharing.mps:
                variables[MPS] = self.sharing.mps
            if self.sharing.apart:
                hosts = enumerate(prefixes)
                prefixes = tuple((*p, "env", f"NCCL_HOSTID=rank-{rank}") for rank, p in hosts)
        given: dict[str, Any] = {
            "model": "",
            "size": "tiny",
            "cores": cores_of(ranks, range(self.cores)),
            "host": "127.0.0.1",
            "directory": Path(self.directory),
            "shares_kernels": True,
            **options,
            "variables": variables | options.get("variables", {}),
        }
        return Place(**given, prefixes=prefixes, backend=self.backend)


@dataclass(frozen=True)
class Result:
    """What became of a part.

    Attributes:
        part: its name.
        key: of the machine and the code; see :attr:`gpu_checks.machine.Machine.key`.
        backend: of its process group.
        seconds: how long it took.
        rows: its table.
        failure: why it has not come to its end; empty if it has.
    """

    part: str
    key: str
    backend: str
    seconds: float
    rows: tuple[Row, ...] = ()
    failure: str = ""

    @property
    def is_right(self) -> bool:
        return not self.failure and bool(self.rows) and all(row.is_right for row in self.rows)

    def write(self, directory: Path) -> None:
        """Put the result where :func:`read_result` finds it; it appears whole or not at all."""
        path = directory / f"{self.part}.json"
        begun = path.with_suffix(".part")
        begun.write_text(json.dumps(asdict(self), indent=1) + "\n")
        begun.replace(path)


def read_result(directory: Path, part: str, key: str) -> Result | None:
    """A part's result; ``None`` if there is none, or one of another machine or other code."""
    path = directory / f"{part}.json"
    data: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    if data.get("key") != key:
        return None
    rows = tuple(Row(**row) for row in data.pop("rows"))
    return Result(**data, rows=rows)


def control_mps(directory: Path, *arguments: str, words: str = "") -> bool:
    """Start a service of our own (``-d``), or tell it something; whether that went well. No setting
    of the GPU changes."""
    directory.mkdir(parents=True, exist_ok=True)
    command = shutil.which(
        MPS_COMMAND, path=os.pathsep.join([os.environ.get("PATH", ""), *MPS_PATHS])
    )
    if command is None:
        return False
    variables = os.environ | {MPS: str(directory), "CUDA_MPS_LOG_DIRECTORY": str(directory)}
    # Of the service, which holds what it inherits, nobody reads.
    nowhere = subprocess.DEVNULL
    try:
        done = subprocess.run(
            [command, *arguments],
            input=words.encode(),
            stdout=nowhere,
            stderr=nowhere,
            env=variables,
            timeout=MPS_ANSWER_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0
