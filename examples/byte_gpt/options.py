"""The example's command line. Imports no torch, so that ``--help`` and errors are printed at
once."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

HEAD_WIDTH: Final = 32
"""Features of one attention head; ``--width`` is a multiple of it."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of a run; the same on every rank.

    Attributes:
        fusion: value of ``torch._inductor.config.ddp_fusion``; ``None`` leaves it off.
        style: where ``loss.backward()`` is called: ``"inside"`` the compiled function, or
            ``"outside"`` of it.
        steps: optimizer steps.
        layers: transformer blocks.
        width: features of the residual stream.
        batch: sequences in one step of one rank.
        context: bytes in one sequence.
        seed: seed of the initial weights and, with rank and step, of every batch.
        bucket_cap_mb: DDP's own option of this name, MiB. DDP's default of 25 would put this
            small model into two buckets, which shows little.
        timeline: file for the page of the recorded steps; ``.html``.
    """

    fusion: str | None
    style: str
    steps: int
    layers: int
    width: int
    batch: int
    context: int
    seed: int
    bucket_cap_mb: float
    timeline: str

    @property
    def heads(self) -> int:
        """Attention heads of each block."""
        return self.width // HEAD_WIDTH


def parse_options(arguments: Sequence[str]) -> Options:
    """The options on a command line; an error ends the process with code 2 and a message."""
    values = vars(_parser().parse_args(arguments))
    if values["fusion"] == "none":
        values["fusion"] = None
    return Options(**values)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="train_gpt.py",
        description="Trains a byte-level GPT on the sources of Python's standard library, with "
        "DDP's gradient all-reduces fused, and checks the gradients against eager DDP.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "--fusion",
        choices=("concat", "coalesced", "auto", "none"),
        default="concat",
        help="value of torch._inductor.config.ddp_fusion",
    )
    add(
        "--style",
        choices=("inside", "outside"),
        default="inside",
        help="call loss.backward() inside or outside the compiled function",
    )
    add("--steps", type=_positive_int, default=150, help="optimizer steps")
    add("--layers", type=_positive_int, default=4, help="transformer blocks")
    add("--width", type=_width, default=192, help=f"model width, a multiple of {HEAD_WIDTH}")
    add("--batch", type=_positive_int, default=8, help="sequences a step and process")
    add("--context", type=_positive_int, default=128, help="bytes a sequence")
    add("--seed", type=_seed, default=0, help="seed of weights and batches")
    add("--bucket-cap-mb", type=_positive_float, default=2.0, help="DDP's bucket_cap_mb, MiB")
    add(
        "--timeline",
        type=_timeline,
        default="train-timeline.html",
        metavar="FILE",
        help="page on which recorded steps are drawn (.html)",
    )
    return parser


def _timeline(text: str) -> str:
    if not text.endswith(".html"):
        raise argparse.ArgumentTypeError(f"must end with .html, but is {text!r}")
    return text


def _positive_int(text: str) -> int:
    value = _seed(text)
    if value == 0:
        raise argparse.ArgumentTypeError("must be a whole number of at least 1, but is 0")
    return value


def _seed(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be a whole number, not negative, but is {text!r}")
    return int(text)


def _width(text: str) -> int:
    value = _positive_int(text)
    if value % HEAD_WIDTH:
        raise argparse.ArgumentTypeError(
            f"must be a multiple of {HEAD_WIDTH}, the width of one attention head, but is {value}"
        )
    return value


def _positive_float(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number of MiB above 0, but is {text!r}")
    return value
