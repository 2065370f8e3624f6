"""A process of its own that trains two steps and says what came out of Inductor's caches.

    python -m tests.support.cached_training MODE

With ``--load F`` and ``--save F`` the caches come from a file of
``torch.compiler.save_cache_artifacts()`` and go to one. Prints a JSON object: the cache counters,
and how many gradients the second backward has stored in their bucket. Kernels compute nothing.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import torch._dynamo.utils
import torch._inductor.config as inductor_config
from torch.nn.parallel import DistributedDataParallel


def main(mode: str, load: Path | None) -> dict[str, Any]:
    """Train, and return what is printed."""
    if load is not None:  # Before the package is imported.
        torch.compiler.load_cache_artifacts(load.read_bytes())
    import fusion_passes  # noqa: F401 - it adds the flag
    from fusion_passes.reducer.reducer import reducer_of
    from testing.fake_world import one_rank, two_layers, without_kernels

    inductor_config.ddp_fusion = mode
    with one_rank(), without_kernels():
        ddp = DistributedDataParallel(two_layers())
        compiled = torch.compile(ddp)
        for _ in range(2):
            compiled(torch.ones(2, 4)).sum().backward()
    counters = torch._dynamo.utils.counters
    return {
        "hits": counters["inductor"]["fxgraph_cache_hit"],
        "misses": counters["inductor"]["fxgraph_cache_miss"],
        "bypasses": counters["inductor"]["fxgraph_cache_bypass"],
        "aot_hits": counters["aot_autograd"]["autograd_cache_hit"],
        "aot_misses": counters["aot_autograd"]["autograd_cache_miss"],
        "traced": counters["compiled_autograd"]["captures"],
        "stored": reducer_of(ddp).num_stored,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("mode")
    parser.add_argument("--load", type=Path)
    parser.add_argument("--save", type=Path)
    given = parser.parse_args()
    said = main(given.mode, given.load)
    if given.save is not None:
        saved = torch.compiler.save_cache_artifacts()
        assert saved is not None
        given.save.write_bytes(saved[0])
    print(json.dumps(said))
