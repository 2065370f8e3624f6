"""Measures a profile before training, and shows it.

::

    torchrun --nproc-per-node 2 -m fusion_passes.profile
    torchrun ... -m fusion_passes.profile --dtypes float32 bfloat16 --seconds 10 --plot costs.png

All ranks of the training take part, started as the training will be: a profile holds for these
hosts, this backend and device, and this version of torch. It goes where ``ddp_fusion = "auto"``
looks for it (``FUSION_PASSES_PROFILE_DIR``), in the place of an older one.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from fusion_passes.profile.files import path_of
from fusion_passes.profile.measure import (
    SECONDS,
    Ranks,
    agree_on_place,
    keep_profile,
    measure,
)
from fusion_passes.profile.records import Kind, Profile
from fusion_passes.torch_private.process_groups import world_group

DTYPES = ("float32", "bfloat16", "float16", "float64")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, in a process of ``torchrun``."""
    options = _parse(arguments)
    if "RANK" not in os.environ or int(os.environ.get("WORLD_SIZE", "1")) < 2:
        print(
            "python -m fusion_passes.profile measures between ranks, but there are none. Start it "
            "as the training is started: torchrun --nproc-per-node 2 -m fusion_passes.profile",
            file=sys.stderr,
        )
        return 2
    device = _device(options.backend)
    dist.init_process_group(options.backend)
    try:
        ranks = Ranks.of(world_group(), device)
        # fp16 is divided before it is summed, others are averaged where the backend can.
        kinds = tuple(Kind(name, "sum" if name == "float16" else "avg") for name in options.dtypes)
        profile = measure(ranks, agree_on_place(ranks), kinds, options.seconds)
        keep_profile(ranks, profile)
        if ranks.is_first:
            print(as_text(profile))
            if options.plot is not None:
                draw(profile, options.plot)
        return 0
    finally:
        dist.destroy_process_group()


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="fusion_passes.profile", description=str(__doc__).split("\n\n")[0]
    )
    parser.add_argument("--backend", help="of the process group; by default torch's own choice")
    parser.add_argument(
        "--dtypes",
        nargs="+",
        choices=DTYPES,
        default=["float32"],
        help="in which gradients are sent",
    )
    parser.add_argument(
        "--seconds", type=_seconds, default=SECONDS, help="for all tables together (%(default)s)"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="a picture; needs matplotlib")
    return parser.parse_args(arguments)


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"seconds must be finite and above 0, but are {text}")
    return value


def _device(backend: str | None) -> torch.device:
    """The device of this rank's gradients, which becomes the current one."""
    if backend == "gloo" or not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def as_text(profile: Profile) -> str:
    """The profile for people: a table of each kind, and the line that fits it."""
    lines = [f"{profile.place}, torch {profile.place.torch}", f"file: {path_of(profile.place)}"]
    for kind, table in profile.tables:
        lines += ["", f"{kind}: {table.fit()}", f"{'KiB':>10}  {'us':>10}"]
        lines += [
            f"{size / 1024:>10.0f}  {time / 1000:>10.1f}"
            for size, time in zip(table.num_bytes, table.times_ns, strict=True)
        ]
    lines += ["", f"contention: an all-reduce takes {profile.taken} from the compute beside it"]
    return "\n".join(lines)


def draw(profile: Profile, path: Path) -> None:
    """Write a PNG: microseconds by size."""
    # Without a display, and without a window's state.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for kind, table in profile.tables:
        times = [time / 1000 for time in table.times_ns]
        axes.loglog(table.num_bytes, times, marker="o", markersize=3, label=str(kind))
    axes.set_xlabel("bytes of an all-reduce")
    axes.set_ylabel("microseconds")
    axes.set_title(str(profile.place), fontsize=9)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    sys.exit(main())
