"""A process of its own that trains two steps and says what came out of Inductor's caches.

    python -m tests.support.cached_training FLAG BUCKET_CAP_MB [PACKAGE_VERSION]

Prints a JSON object: Inductor's cache counters and the package's reports.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

import torch
import torch._dynamo.utils
import torch._inductor.config as inductor_config
from torch.nn.parallel import DistributedDataParallel

import fusion_passes
from fusion_passes.install import inductor_pass
from testing.fake_world import fake_world, two_layers


def main(flag: str, bucket_cap_mb: float, version: str | None) -> None:
    if version:
        vars(inductor_pass)["__version__"] = version
    inductor_config.ddp_fusion = (
        fusion_passes.FusionConfig(bucket_cap_mb=float(flag)) if flag[0].isdigit() else flag
    )
    with fake_world():
        ddp = DistributedDataParallel(two_layers(), bucket_cap_mb=bucket_cap_mb)
        compiled = torch.compile(ddp)
        for _ in range(2):
            compiled(torch.ones(2, 4)).sum().backward()
    counters = torch._dynamo.utils.counters["inductor"]
    reports = [asdict(report) for report in fusion_passes.reports()]
    print(
        json.dumps(
            {
                "hits": counters["fxgraph_cache_hit"],
                "misses": counters["fxgraph_cache_miss"],
                "bypasses": counters["fxgraph_cache_bypass"],
                "reports": reports,
            }
        )
    )


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else None)
