"""Parameters that take no part in a step."""

from __future__ import annotations

from testing.scenarios.catalog.making import COALESCED, CONCAT, INSIDE, on_two

UNUSED = [
    on_two("unused-never", "`find_unused_parameters`, all used", "unused:all_used", tested=CONCAT),
    on_two("unused-all", "`find_unused_parameters`, unused on all ranks", "unused:on_all_ranks"),
    on_two(
        "unused-all-kept",
        "`find_unused_parameters`, unused at times, gradients kept",
        "unused:on_all_ranks_kept",
    ),
    on_two("unused-some", "`find_unused_parameters`, unused on one rank", "unused:on_one_rank"),
    on_two(
        "unused-some-inside",
        "`find_unused_parameters`, unused on one rank, backward inside",
        "unused:on_one_rank",
        arguments=INSIDE,
    ),
    on_two(
        "unused-changing",
        "`find_unused_parameters`, other ranks in each step",
        "unused:on_changing_ranks",
    ),
    on_two(
        "unused-in-turn",
        "`find_unused_parameters`, one of two branches",
        "unused:changing",
        arguments={"steps": 4},
        tested=CONCAT,
    ),
    on_two(
        "unused-many",
        "`find_unused_parameters`, many branches",
        "unused:changing",
        arguments={"steps": 10},
    ),
    on_two(
        "unused-changing-inside",
        "`find_unused_parameters`, other ranks in each step, backward inside",
        "unused:changing",
        arguments={**INSIDE, "steps": 6},
    ),
    on_two(
        "unused-changing-eager",
        "`find_unused_parameters`, other ranks in each step, nothing compiled but the backward",
        "unused:changing",
        arguments={"style": "as it is", "steps": 6},
    ),
    on_two(
        "unused-new-branch",
        "`find_unused_parameters`, another branch for a while",
        "unused:a_new_branch",
    ),
    on_two(
        "unused-added",
        "`find_unused_parameters`, gradients added to from step to step",
        "unused:added",
    ),
    on_two(
        "unused-added-late",
        "`find_unused_parameters`, gradients added to, a branch that comes late",
        "unused:added_to_some",
    ),
    on_two(
        "unused-zeroed", "`find_unused_parameters`, `zero_grad(set_to_none=False)`", "unused:zeroed"
    ),
    on_two(
        "unused-no-sync",
        "`find_unused_parameters`, `no_sync`",
        "unused:with_no_sync",
        tested=CONCAT,
    ),
    on_two(
        "unused-hook-fp16", "`find_unused_parameters`, `fp16_compress_hook`", "unused:compressed"
    ),
    on_two("unused-dtypes", "`find_unused_parameters`, several dtypes", "unused:several_dtypes"),
    on_two(
        "unused-static-graph",
        "`find_unused_parameters`, `static_graph`",
        "unused:in_a_static_graph",
    ),
    on_two(
        "unused-static-graph-later",
        "`find_unused_parameters`, `_set_static_graph`",
        "unused:in_a_static_graph_later",
    ),
    on_two(
        "unused-several-graphs",
        "`find_unused_parameters`, a backward in several graphs, other ranks in each step",
        "unused:in_several_graphs",
        tested=CONCAT,
    ),
    on_two(
        "unused-in-parts",
        "`find_unused_parameters`, a forward in several graphs",
        "unused:in_equal_parts",
        tested=CONCAT,
        newest_torch=True,
    ),
    on_two(
        "unused-other-parts",
        "`find_unused_parameters`, a forward in several graphs, others on some ranks at times",
        "unused:in_parts",
        tested=COALESCED,
    ),
    on_two(
        "unused-shared-parts",
        "`find_unused_parameters`, blocks that share a compiled forward, some left out",
        "unused:in_shared_parts",
        tested=CONCAT,
    ),
    on_two(
        "unused-shared-zeroed",
        "`find_unused_parameters`, a graph break in a loop over blocks, gradients kept",
        "unused:in_shared_parts_with_zeros",
    ),
    on_two(
        "unused-shared-others",
        "`find_unused_parameters`, blocks that share a compiled forward, others on some ranks",
        "unused:in_other_shared_parts",
        tested=CONCAT,
    ),
    on_two(
        "unused-shared-order",
        "`find_unused_parameters`, blocks that share a compiled forward, others on each rank",
        "unused:in_shared_parts_of_others",
        warns=(),
        tested=COALESCED,
    ),
    on_two(
        "unused-instances",
        "`find_unused_parameters`, two modules of one class",
        "unused:by_instances",
        tested=COALESCED,
    ),
    on_two(
        "unused-in-parts-of-two",
        "`find_unused_parameters`, blocks left out, another module on the group",
        "unused:in_parts_beside_another",
    ),
    on_two(
        "unused-beside-foreign",
        "`find_unused_parameters`, collectives of the model's own between layers that are left out",
        "foreign:with_unused",
    ),
    on_two("skip-unused", "`skip_all_reduce_unused_params`", "unused:skipped_reduction"),
    on_two(
        "missing-one",
        "a parameter without a gradient on one rank, no option: an error that names it",
        "unused:missing_on_one_rank",
        must_fail="middle",
        becomes="refused",
    ),
]
