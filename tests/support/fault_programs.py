"""Programs for tests of the fault runner that end quickly: without torch, and without a group."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any

from fault_runs.rank import Run, UserError

PEER_ERROR_S = 0.2


def ends(run: Run) -> dict[str, Any]:
    """All ranks end normally, but rank 1 raises if the options say so."""
    run.note("fault")
    if run.rank == 1 and run.way in run.options.get("raises", []):
        raise UserError("the user's own error")
    return {"parameters": [1.0 + (run.way in run.options.get("differs", []))]}


def hangs(run: Run) -> dict[str, Any]:
    """Rank 1 hangs if the options say so, with a child process."""
    run.note("fault")
    if run.rank == 1 and run.way in run.options["hangs"]:
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        time.sleep(600)
    raise RuntimeError("Connection closed by peer")


def fails(run: Run) -> dict[str, Any]:
    """All ranks fail, after a time and with an error that the options give."""
    run.note("fault")
    time.sleep(run.options["seconds"].get(run.way, PEER_ERROR_S))
    raise RuntimeError(run.options["texts"].get(run.way, "Connection closed by peer"))


def stops(run: Run) -> dict[str, Any]:
    """Rank 0 meets its fault, and says how long it took."""
    start = time.monotonic()
    run.step = 3
    run.meet("step")
    return {"seconds": time.monotonic() - start}


def leaves(run: Run) -> dict[str, Any]:
    """Ends normally, and leaves a process behind under the flag."""
    if run.rank == 0 and run.way == "concat":
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    return {}
