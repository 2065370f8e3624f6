"""``python -m fusion_passes.explain SCRIPT [ARGS...]``: run a training script unchanged, and print
the report after some of its steps."""

from __future__ import annotations

import argparse
import atexit
import os
import runpy
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fusion_passes.config import ENVIRONMENT_VARIABLE, FUSION_MODES
from fusion_passes.reporting.modules import backward_counts
from fusion_passes.reporting.recording import ENDED, Recording, record_steps
from fusion_passes.reporting.report import report
from fusion_passes.reporting.table import format_report
from fusion_passes.torch_private import inductor_config

DESCRIPTION: Final = """\
Run a training script unchanged, with ddp_fusion set, and print the report after some steps:
buckets, warnings, times. Use it under torchrun:

    torchrun --nproc-per-node=2 -m fusion_passes.explain SCRIPT [ARGS...]
    torchrun --nproc-per-node=2 -m fusion_passes.explain -m MODULE [ARGS...]
"""


@dataclass
class _Explained:
    """Shows the report of the script that runs, once."""

    options: argparse.Namespace
    recording: Recording

    def after_backward(self) -> None:
        self.recording.after_backward()
        if self.recording.is_done:
            atexit.unregister(self.show)
            self.show()

    def show(self) -> None:
        """Print the report on rank 0, and write the files that the options ask for."""
        found, options = report(), self.options
        # The script may have destroyed its process group.
        rank = int(os.environ.get("RANK", "0")) if found.rank is None else found.rank
        if rank != 0:
            return
        columns = shutil.get_terminal_size((120, 0)).columns  # 120 without a terminal.
        print(format_report(found, width=columns), file=sys.stderr)
        if found.timeline is None:
            why = self.recording.problem or ENDED
            print(f"Nothing was measured: {why}.", file=sys.stderr)
        try:
            if options.json is not None:
                options.json.write_text(found.to_json() + "\n", encoding="utf-8")
                print(f"ddp_fusion: wrote {options.json}", file=sys.stderr)
            if options.timeline is not None and found.timeline is not None:
                found.write_timeline(options.timeline)
                print(f"ddp_fusion: wrote {options.timeline}", file=sys.stderr)
        except OSError as error:  # The training continues.
            print(f"ddp_fusion: cannot write the report: {error}", file=sys.stderr)


def main(arguments: Sequence[str]) -> None:
    """Run the command with these arguments."""
    options = _options(arguments)
    if ENVIRONMENT_VARIABLE not in os.environ:
        inductor_config.ddp_fusion = options.flag
    explained = _Explained(options, record_steps(options.steps, plain_steps=options.plain_steps))
    backward_counts.after = explained.after_backward
    atexit.register(explained.show)
    sys.argv = [options.script, *options.arguments]
    if options.module:
        runpy.run_module(options.script, run_name="__main__", alter_sys=True)
    else:
        # As Python does: a script can change its working directory and import from its own folder.
        sys.path[0] = str(Path(options.script).resolve().parent)
        runpy.run_path(str(Path(options.script).absolute()), run_name="__main__")


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m fusion_passes.explain",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--flag", choices=FUSION_MODES, default="concat",
        help="value of ddp_fusion, unless the script or the environment sets it")  # fmt: skip
    add("--steps", type=int, default=3, help="steps to record (3)")
    add("--plain-steps", type=int, default=3,
        help="steps to time before that, without a profiler (3)")  # fmt: skip
    add("--json", type=_output, metavar="FILE", help="write the report as JSON")
    add("--timeline", type=_output, metavar="FILE",
        help="write the steps of all ranks as a page for a browser (.html)")  # fmt: skip
    add("-m", "--module", action="store_true",
        help="SCRIPT is the name of a module, as for python -m")  # fmt: skip
    add("script", metavar="SCRIPT")
    add("arguments", nargs=argparse.REMAINDER, metavar="ARGS")
    options = parser.parse_args(arguments)
    if not options.module and not Path(options.script).is_file():
        parser.error(
            f"SCRIPT must be the path of a Python file, but {options.script!r} is not a file. To "
            "run a module, pass its name after -m."
        )
    return options


def _output(text: str) -> Path:
    """The absolute path of an output file: the script may change its working directory."""
    path = Path(text).absolute()
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(
            f"must be in a directory that exists, but is {text!r}. Create the directory first"
        )
    return path


if __name__ == "__main__":
    main(sys.argv[1:])
