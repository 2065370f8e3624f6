"""Simulates steps of known models on known networks: the buckets that auto chooses beside fixed
caps, MG-WFBP, and the best that there is. Needs no network, and takes a minute or two.

    python tools/simulate.py                              # the page, on the terminal
    python tools/simulate.py --page docs/simulation.md    # kept, with its plots beside it
    python tools/simulate.py --models dlrm --ranks 8 64   # a part of it
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from simulation.cases import RANKS, Result, simulate
from simulation.models import MODELS
from simulation.networks import NETWORKS
from simulation.page import as_markdown, draw


def main(arguments: Sequence[str] | None = None) -> int:
    """Simulate what the command line asks for."""
    names = [model.__name__ for model in MODELS]
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n\n")[0])
    parser.add_argument("--models", nargs="+", choices=names, default=names, metavar="NAME")
    parser.add_argument("--ranks", nargs="+", type=_ranks, default=RANKS, metavar="N")
    parser.add_argument("--page", type=Path, metavar="FILE", help="write it, and a PNG beside it")
    options = parser.parse_args(arguments)
    results: list[Result] = []
    quiet: list[Result] = []
    for make in MODELS:
        if make.__name__ not in options.models:
            continue
        model = make()
        print(f"{model.name}: {len(model.num_bytes)} gradients", file=sys.stderr)
        for network in NETWORKS:
            results += [simulate(model, network, ranks) for ranks in options.ranks]
            quiet += [simulate(model, network, ranks, noise=0.0) for ranks in options.ranks]
    if options.page is None:
        print(as_markdown(results, quiet, "simulation.png"))
    else:
        picture = options.page.with_suffix(".png")
        options.page.write_text(as_markdown(results, quiet, picture.name))
        draw(results, picture)
    return 0


def _ranks(text: str) -> int:
    count = int(text)
    if count < 2:
        raise argparse.ArgumentTypeError(f"ranks must be at least 2, but are {count}")
    return count


if __name__ == "__main__":
    sys.exit(main())
