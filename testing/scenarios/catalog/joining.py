"""``join``."""

from __future__ import annotations

from testing.scenarios.catalog.making import COALESCED, CONCAT, THIRDS_EPS, on_four, on_two

JOIN = [
    on_two(
        "join",
        "`join` with uneven inputs",
        "joining:some_have_more",
        tested=CONCAT,
        each_torch=True,
    ),
    on_two(
        "join-rank-0",
        "`join`, rank 0 has more",
        "joining:uneven",
        arguments={"steps": ((4, 1),)},
        tested=COALESCED,
    ),
    on_two(
        "join-several-times",
        "`join` several times, a rank without any inputs",
        "joining:uneven",
        arguments={"steps": ((0, 3), (3, 1), (2, 2))},
        tested=CONCAT,
    ),
    on_two(
        "join-divided",
        "`join(divide_by_initial_world_size=False)`",
        "joining:divided",
        tested=COALESCED,
    ),
    on_two(
        "join-buffers", "`join` and buffers", "joining:with_buffers", tested=CONCAT, each_torch=True
    ),
    on_two(
        "join-no-sync",
        "`join` and `no_sync`",
        "joining:uneven",
        arguments={"steps": ((1, 3),), "local": True},
        tested=COALESCED,
    ),
    on_two(
        "join-inside",
        "`join`, backward inside",
        "joining:uneven",
        arguments={"steps": ((2, 4),), "is_inside": True},
        tested=CONCAT,
    ),
    on_two(
        "join-batch-sizes",
        "`join`, several batch sizes",
        "joining:uneven",
        arguments={"steps": ((2, 5),), "sizes": (4, 1, 3)},
        tested=COALESCED,
    ),
    on_two("join-buckets", "`join`, several buckets", "joining:several_buckets", tested=CONCAT),
    on_two(
        "join-hook",
        "`join`, a communication hook of the user's own",
        "joining:with_a_hook",
        tested=COALESCED,
    ),
    on_two("join-unused", "`join`, `find_unused_parameters`", "joining:with_unused"),
    on_two(
        "join-unused-more",
        "`join`, `find_unused_parameters`, several branches",
        "joining:with_more_unused",
    ),
    on_two(
        "join-static-graph", "`join`, `static_graph`", "joining:with_a_static_graph", tested=CONCAT
    ),
    on_two(
        "join-static-graph-unused",
        "`join`, `static_graph`, parameters that no rank or one rank uses",
        "joining:with_a_static_graph_of_some",
    ),
    on_two(
        "join-optimizer",
        "`join` of a DDP module and `ZeroRedundancyOptimizer`",
        "joining:beside_an_optimizer",
        tested=CONCAT,
    ),
    on_two("join-disabled", "`join(enable=False)`", "joining:disabled", tested=CONCAT),
    on_four("ddp-4", "join", "DDP on 4 ranks, `join`", "joining:some_have_more", tested=CONCAT),
    on_four(
        "ddp-4",
        "join-divided",
        "DDP on 4 ranks, `join(divide_by_initial_world_size=False)`",
        "joining:divided",
        tolerance_eps=THIRDS_EPS,
    ),
]
