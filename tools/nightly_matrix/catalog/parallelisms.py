"""How ranks share the work."""

from __future__ import annotations

from nightly_matrix.catalog.making import ROUNDS_EPS, on_four, on_two
from nightly_matrix.cells import MODES

PARALLELISMS = [
    on_two(
        "plain",
        "DDP on 2 ranks",
        "loops:plain",
        dtypes=("fp32", "bf16", "fp16"),
        quick=MODES,
    ),
    on_four("ddp-4", "plain", "DDP on 4 ranks", "loops:plain", dtypes=("fp32", "bf16", "fp16")),
    on_four("ddp-4", "no-sync", "DDP on 4 ranks, `no_sync`", "loops:no_sync"),
    on_four(
        "ddp-4",
        "unused-changing",
        "DDP on 4 ranks, `find_unused_parameters`, other ranks in each step",
        "unused:on_changing_ranks",
    ),
    on_four("ddp-4", "join", "DDP on 4 ranks, `join`", "reducer:join"),
    on_four("groups", "plain", "two DDP modules over different groups", "groups:two_groups"),
    on_four(
        "groups",
        "backward-inside",
        "two DDP modules over different groups, backward inside",
        "groups:two_groups_inside",
    ),
    on_four(
        "groups",
        "no-sync",
        "two DDP modules over different groups, `no_sync`",
        "groups:two_groups_no_sync",
    ),
    on_four(
        "tp",
        "plain",
        "DDP and tensor parallel, by columns and rows",
        "tensor:colwise_rowwise",
        dtypes=("fp32", "bf16"),
    ),
    on_four(
        "tp",
        "backward-inside",
        "DDP and tensor parallel, backward inside",
        "tensor:colwise_rowwise_inside",
    ),
    on_four(
        "tp",
        "eager-forward",
        "DDP and tensor parallel, nothing compiled but the backward",
        "tensor:colwise_rowwise_eager_forward",
    ),
    on_four(
        "tp",
        "compiled-before",
        "DDP around a compiled tensor-parallel model",
        "tensor:colwise_rowwise_compiled_before",
    ),
    on_four(
        "tp",
        "no-sync",
        "DDP and tensor parallel, `no_sync`",
        "tensor:colwise_rowwise_no_sync",
    ),
    on_four(
        "tp",
        "sequence",
        "DDP and tensor parallel with sequence parallel",
        "tensor:sequence_parallel",
        tolerance_eps=ROUNDS_EPS,
    ),
    on_four("pp", "gpipe", "DDP in pipeline stages made by hand, GPipe", "pipeline:gpipe"),
    on_four(
        "pp",
        "1f1b",
        "DDP in pipeline stages made by hand, 1F1B",
        "pipeline:one_forward_one_backward",
    ),
    on_four(
        "pp",
        "traced-gpipe",
        "DDP in pipeline stages cut by `pipeline()`, GPipe",
        "pipeline:traced_gpipe",
    ),
    on_four(
        "pp",
        "traced-1f1b",
        "DDP in pipeline stages cut by `pipeline()`, 1F1B",
        "pipeline:traced_one_forward_one_backward",
    ),
    on_four("fsdp", "beside", "`fully_shard` beside a DDP module", "sharded:beside", ranks=2),
    on_four(
        "fsdp",
        "beside-inside",
        "`fully_shard` beside a DDP module, backward inside",
        "sharded:beside_inside",
        ranks=2,
    ),
    on_four(
        "fsdp",
        "within",
        "a submodule under `fully_shard` inside of a DDP module",
        "sharded:within",
        ranks=2,
    ),
    on_four("hsdp", "beside", "HSDP beside a DDP module", "sharded:hybrid_beside"),
]
