"""A process of its own that trains two steps and says what came out of Inductor's caches.

    python -m tests.support.cached_training FLAG BUCKET_CAP_MB [PACKAGE_VERSION]

FLAG is a mode, a cap, or the graph that reduces. With ``--load F`` and ``--save F`` the caches come
from a file of ``torch.compiler.save_cache_artifacts()`` and go to one. Prints a JSON object: the
cache counters and the package's reports.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch._dynamo.utils
import torch._inductor.config as inductor_config
from torch.nn.parallel import DistributedDataParallel


def flag_of(text: str) -> Any:
    """The value of the flag: a mode, a cap in MiB, or the graph that reduces."""
    from fusion_passes import FusionConfig

    if text[0].isdigit():
        return FusionConfig(bucket_cap_mb=float(text))
    return FusionConfig(backward_graph=text) if "_" in text else text  # type: ignore[arg-type]


def main(flag: str, bucket_cap_mb: float, version: str, load: Path | None) -> dict[str, Any]:
    """Train, and return what is printed."""
    if load is not None:  # Before the package is imported.
        torch.compiler.load_cache_artifacts(load.read_bytes())
    import fusion_passes
    from fusion_passes.install import inductor_pass
    from testing.fake_world import one_rank, two_layers

    if version:
        vars(inductor_pass)["__version__"] = version
    inductor_config.ddp_fusion = flag_of(flag)
    with one_rank():
        ddp = DistributedDataParallel(two_layers(), bucket_cap_mb=bucket_cap_mb)
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
        "reports": [asdict(report) for report in fusion_passes.reports()],
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("flag")
    parser.add_argument("cap", type=float)
    parser.add_argument("version", nargs="?", default="")
    parser.add_argument("--load", type=Path)
    parser.add_argument("--save", type=Path)
    given = parser.parse_args()
    said = main(given.flag, given.cap, given.version, given.load)
    if given.save is not None:
        saved = torch.compiler.save_cache_artifacts()
        assert saved is not None
        given.save.write_bytes(saved[0])
    print(json.dumps(said))
