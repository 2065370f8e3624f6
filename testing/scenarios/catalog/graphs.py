"""Models in several graphs, modules that share some, and ranks that have others."""

from __future__ import annotations

from testing.scenarios.catalog.making import (
    COALESCED,
    CONCAT,
    INSIDE,
    NOT_DDPS_OWN,
    TORCH_CRASHES,
    on_four,
    on_two,
)

PARTS = [
    on_two("graph-break", "a graph break in the forward", "loops:graph_break"),
    on_two(
        "graph-break-inside",
        "a graph break before the backward, backward inside",
        "loops:graph_break_inside",
    ),
    on_two("partly-compiled", "a part of the model not compiled", "loops:partly_compiled"),
    on_two(
        "compiled-before",
        "DDP around a compiled model",
        "loops:compiled_before_ddp",
        tested=COALESCED,
    ),
    on_two("compiler-disable", "`torch.compiler.disable` on a layer", "loops:compiler_disable"),
    on_two(
        "in-parts",
        "functions that are not compiled, and other layouts between them",
        "parts:in_parts",
        tested=CONCAT,
    ),
    on_two(
        "in-parts-failing",
        "the same, and a hook behind the first part fails",
        "parts:fails_in_parts",
        tested=CONCAT,
    ),
    on_two(
        "in-parts-shared", "a weight that two parts share", "parts:shared_by_parts", tested=CONCAT
    ),
    on_two(
        "in-parts-one-by-one",
        "a backward for each part",
        "parts:parts_one_by_one",
        tested=COALESCED,
    ),
    on_two(
        "block-by-block",
        "blocks compiled alone, layers outside",
        "parts:block_by_block",
        tested=COALESCED,
    ),
    on_two(
        "breaks-in-a-loop",
        "a graph break in a loop over blocks",
        "parts:breaks_in_a_loop",
        tested=CONCAT,
    ),
    on_two(
        "disabled-hook",
        "`torch.compiler.disable` on a gradient hook, `no_sync`",
        "parts:broken_backward",
        tested=COALESCED,
        newest_torch=True,
    ),
]

INSTANCES = [
    on_two("two-modules", "two DDP modules in one step", "groups:two_modules"),
    on_two(
        "two-caps",
        "two DDP modules with caps of their own, backward inside",
        "groups:two_caps",
        launches=3,
        tested=CONCAT,
    ),
    on_two("alternating", "two DDP modules in turn, as in a GAN", "groups:alternating"),
    on_two(
        "second-instance",
        "a second module of the same class, on a group of its own",
        "instances:second_instance",
        tested=CONCAT,
        each_torch=True,
    ),
    on_two(
        "instances-in-parts",
        "two modules of one class, in several graphs",
        "instances:instances_in_parts",
        tested=COALESCED,
    ),
    on_two(
        "instances-in-one-backward",
        "two modules of one class in one backward",
        "instances:instances_in_one_backward",
        tested=COALESCED,
    ),
    on_two(
        "same-weights",
        "several DDP modules over the same weights, one after the other",
        "instances:over_the_same_weights",
        tested=COALESCED,
    ),
    on_two(
        "same-weights-at-once",
        "two DDP modules over the same weights, called in turn",
        "instances:over_the_same_weights_at_once",
        tested=CONCAT,
    ),
    on_two(
        "one-thread",
        "a training in a thread that is not the main one",
        "instances:one_thread",
        tested=CONCAT,
    ),
    on_two(
        "another-thread",
        "a training in another thread than the one that constructed DDP",
        "instances:another_thread",
        tested=COALESCED,
    ),
    on_two(
        "threads",
        "two modules, each trained in a thread",
        "instances:threads",
        tested=COALESCED,
        fails_on_oldest=TORCH_CRASHES,
    ),
    on_two(
        "bare-threads",
        "the same in threads that see none of torch's options",
        "instances:bare_threads",
        tested=CONCAT,
        fails_on_oldest=TORCH_CRASHES,
    ),
    on_two("subclass", "a subclass of DDP", "instances:subclass", tested=CONCAT, each_torch=True),
    on_two(
        "subclass-overriding",
        "a subclass that overrides what DDP calls",
        "instances:overriding_subclass",
        tested=CONCAT,
    ),
    on_two("replicate", "`replicate`", "instances:replicated", tested=CONCAT),
    on_two(
        "two-reducers",
        "a module that is fused, and one that is not, in one backward",
        "instances:two_reducers_in_one_backward",
        tested=CONCAT,
        warns=("trained by DDP's own reducer",),
    ),
    on_two(
        "two-reducers-apart",
        "the same in two backwards",
        "instances:two_reducers_in_two_backwards",
        warns=("trained by DDP's own reducer",),
        tested=CONCAT,
        each_torch=True,
    ),
]

RANKS = [
    on_two("batch-sizes", "other batch sizes on each rank", "ranks:batch_sizes", tested=CONCAT),
    on_two("hooks-on-one-rank", "a hook on one rank", "ranks:hooks_on_one_rank", tested=CONCAT),
    on_two("other-orders", "the same layers in another order", "ranks:other_orders", tested=CONCAT),
    on_two(
        "other-orders-of-two",
        "the same, of two modules in one backward",
        "ranks:other_orders_of_two",
        tested=CONCAT,
    ),
    on_two(
        "other-orders-of-another",
        "the same, of the other one of the two",
        "ranks:other_orders_of_another",
    ),
    on_two(
        "other-orders-of-instances",
        "the same, of two modules of a class",
        "ranks:other_orders_of_instances",
        tested=COALESCED,
    ),
    on_two(
        "other-orders-of-blocks",
        "the same, of blocks that share a compiled forward",
        "ranks:other_orders_of_blocks",
        tested=CONCAT,
    ),
    on_two(
        "foreign",
        "collectives of the model's own between its layers (as `SyncBatchNorm` on GPUs)",
        "foreign:in_graphs",
        tested=COALESCED,
    ),
    on_two(
        "static-graph-without-some",
        "`static_graph`, parameters without a gradient on one rank",
        "ranks:static_graph_without_some",
        tested=CONCAT,
    ),
    on_two(
        "static-graph-sides",
        "`static_graph`, other parameters on each rank, compiled at times",
        "ranks:static_graph_of_sides",
    ),
    on_two(
        "static-graph-changes",
        "`static_graph` of a graph that changes: eager DDP's error",
        "ranks:static_graph_that_changes",
        tested=CONCAT,
    ),
    on_two(
        "unreached",
        "a parameter without a gradient on all ranks, no option: eager DDP's error",
        "ranks:unreached",
        tested=COALESCED,
        each_torch=True,
        averages=False,
    ),
    on_two(
        "unreached-inside",
        "the same with the backward inside",
        "ranks:unreached_inside",
        tested=CONCAT,
        averages=False,
    ),
    on_two(
        "unreached-later",
        "the same after a plain step, in a gradient penalty",
        "ranks:unreached_later",
        tested=CONCAT,
    ),
    on_two(
        "all-replaced",
        "all parameters replaced after DDP was constructed: local gradients",
        "ranks:all_replaced",
        warns=NOT_DDPS_OWN,
        tested=CONCAT,
        averages=False,
    ),
    on_two(
        "thawed",
        "a layer thawed after DDP was constructed: its local gradients",
        "ranks:thawed",
        warns=NOT_DDPS_OWN,
        tested=COALESCED,
    ),
    on_two(
        "swapped",
        "a parameter replaced after DDP was constructed: eager DDP's error",
        "ranks:swapped",
        warns=NOT_DDPS_OWN,
        tested=COALESCED,
        averages=False,
    ),
]

GROUPS = [
    on_four(
        "groups",
        "plain",
        "two DDP modules over different groups",
        "groups:two_groups",
        launches=2,
        tested=CONCAT,
    ),
    on_four(
        "groups",
        "backward-inside",
        "two DDP modules over different groups, backward inside",
        "groups:two_groups",
        arguments=INSIDE,
    ),
    on_four(
        "groups",
        "no-sync",
        "two DDP modules over different groups, `no_sync`",
        "groups:two_groups",
        arguments={"steps": 2, "micro_batches": 2, "no_sync": True},
    ),
]
