"""``python -m fusion_passes.explain``: see :mod:`fusion_passes.explain.command`."""

import sys

from fusion_passes.explain.command import main

if __name__ == "__main__":
    main(sys.argv[1:])
