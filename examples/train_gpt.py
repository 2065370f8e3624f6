"""Trains a small GPT with DDP's gradient all-reduces fused, and shows what the fusion did.

    python examples/train_gpt.py [--fusion concat|coalesced|auto|none] [--style inside|outside] ...

starts two processes over Gloo, or one a GPU over NCCL where there is CUDA. So does

    torchrun --standalone --nproc-per-node=2 examples/train_gpt.py

Exits with 1 if a gradient of the first steps differs from eager DDP's, or if the loss on
held-out text did not fall, with 2 for a wrong option, and with 130 on Ctrl-C.
"""

from __future__ import annotations

import sys

from byte_gpt.launch import end_at_once_on_interrupt, launch, started_by_torchrun
from byte_gpt.options import parse_options


def main(arguments: list[str]) -> int:
    """Run one rank where torchrun started this process, else start torchrun."""
    end_at_once_on_interrupt()
    options = parse_options(arguments)
    if not started_by_torchrun():
        return launch(__file__, arguments)

    from byte_gpt.training import train  # torch: takes seconds to import

    return train(options)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
