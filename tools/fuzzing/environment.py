"""The environment of the ranks; set before torch is imported for the first time."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def prepare(cache: Path | None) -> None:
    """Set where kernels are kept, and that they are compiled where they are needed.

    Pools of compilers beside the ranks only compete for the cores.

    Args:
        cache: directory; by default one that this user's runs share.
    """
    kept = cache or Path(tempfile.gettempdir()) / f"fusion-passes-fuzz-{os.getuid()}"
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(kept))
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ.pop("FUSION_PASSES_DDP_FUSION", None)
