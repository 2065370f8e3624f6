"""One rank of a training with a fault: a program of its own, so that it can be killed.

    python -m fault_runs.rank PROGRAM WAY DIRECTORY OPTIONS

It trains like a user's script: an exception ends it as it ends any program. Events are appended to
a file.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from fault_runs.records import events_path, failure_of, write_event
from fault_runs.scenarios import Fault


class UserError(RuntimeError):
    """The exception that scenarios raise."""


USER_TEXT = "the user's own error"


@dataclass
class Run:
    """The data of a program's run.

    Attributes:
        way: eager, compiled, or a mode of the flag.
        directory: directory of this run.
        options: options of the scenario.
        group_timeout_s: timeout of the process groups that the program makes, in seconds.
        fault: the fault, if any.
        step: number of the current step.
        is_armed: whether a gradient hook shall raise.
    """

    way: str
    directory: Path
    options: dict[str, Any]
    group_timeout_s: float
    fault: Fault | None
    step: int = 0
    is_armed: bool = False
    rank: int = field(default_factory=lambda: int(os.environ["RANK"]))

    @property
    def is_compiled(self) -> bool:
        return self.way != "eager"

    def note(self, kind: str, **values: Any) -> None:
        write_event(events_path(self.directory, self.rank), event=kind, **values)

    def note_error(self, error: BaseException) -> None:
        self.note("error", step=self.step, **failure_of(error))

    def is_hit(self, point: str) -> bool:
        """Whether the fault hits this rank at this point now."""
        return self.fault is not None and self.fault.hits(self.rank, point, self.step)

    def meet(self, point: str) -> None:
        """Cause the fault if it is due here."""
        if self.fault is None or not self.is_hit(point):
            return
        fault, self.fault = self.fault, None
        self.note("fault")
        if fault.action == "raise":
            raise UserError(USER_TEXT)
        if fault.action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault.action == "stop":
            if fault.continue_s is not None:
                waking = f"sleep {fault.continue_s}; kill -CONT {os.getpid()}"
                subprocess.Popen(["sh", "-c", waking])
            os.kill(os.getpid(), signal.SIGSTOP)

    def init_group(self, file: str | None = None) -> None:
        """Make the process group.

        Args:
            file: file of its store, in the run's directory. By default rank 0 has the store. The
                port of one group serves no other, because a rank that is ahead would find the store
                of the previous group.
        """
        import torch.distributed as dist

        options: dict[str, Any] = {"timeout": timedelta(seconds=self.group_timeout_s)}
        if file is not None:
            world_size = int(os.environ["WORLD_SIZE"])
            store = dist.FileStore(str(self.directory / file), world_size)
            options |= {"store": store, "rank": self.rank, "world_size": world_size}
        dist.init_process_group("gloo", **options)


def main(arguments: list[str]) -> None:
    """Run the program, and let its exceptions through."""
    program, way, directory, text = arguments
    values = json.loads(text)
    fault = Fault(**values["fault"]) if values["fault"] else None
    run = Run(way, Path(directory), values["options"], values["group_timeout_s"], fault)
    stacks = (run.directory / f"stacks-{run.rank}.txt").open("a")
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    faulthandler.enable(all_threads=True)
    module, _, function = program.partition(":")
    run.note("start", pid=os.getpid())
    try:
        result = getattr(importlib.import_module(module), function)(run)
    except BaseException as error:
        run.note_error(error)
        raise
    run.note("result", result=result or {})


if __name__ == "__main__":
    main(sys.argv[1:])
