"""All scenarios, and what must come of each: the contract of the package. ``features`` have their
trainings. Nothing here imports torch: a list must come at once.

A model that rounds may differ from eager DDP by what its compiled kernels round otherwise than
PyTorch's own, and by nothing else, as the entries with ``by_hand`` show: on two ranks, ``a / 2 +
b / 2`` has one order only. All others must be the same in every bit, whatever the number of ranks:
nothing is ever rounded in them (``tests/equality/test_exact_models.py``).
"""

from __future__ import annotations

from typing import Any

from testing.scenarios.entries import Scenario

Arguments = dict[str, Any]

FEATURES = "testing.scenarios.features"

ALL_DTYPES = ("fp32", "bf16", "fp16")
UNFUSED, REFUSED = "equal, unfused", "refused"

ROUNDS_EPS = 32.0
"""For models that round, after three steps. Sums of n terms in two orders differ by about sqrt(n)
eps; n is at most 4 x 8 x 8 = 256 here (a BatchNorm statistic; a row of the embedding's gradient has
fewer), which gives 16, and twice that is left to the steps that follow from it. 10.6 was
measured."""

BF16_EPS = 2.0**16
"""For autocast: eps of bf16 in eps of fp32. A compiled kernel sums the gradient of a bias in fp32,
where eager rounds each step to bf16: half a rounding in the gradient, and as much again in the bf16
copies of the trained weights."""

FP16_EPS = 2.0**13
"""The same for fp16."""

THIRDS_EPS = 4.0
"""For averages over three ranks. Each rank's share is rounded once by a division and twice by a
multiplication with the rounded reciprocal, and two sums are rounded in another order: at most half
an eps each, of values that are at most the largest, is 3; a cancelled sum makes it a little more.
0.83 was measured."""

PRODUCTS_EPS = 2 * ROUNDS_EPS
"""For PowerSGD: products that are summed in another order."""

FP16_PRODUCTS_EPS = 2.0**14
"""The same where they are sent in fp16, whose eps is this many of fp32's: one rounding, and one
that follows from it."""

CONCAT, COALESCED = "concat", "coalesced"
"""Modes in which a check trains a scenario: they take turns."""

EACH_TORCH, NEWEST_TORCH = "each torch", "newest torch"
"""On which torches beside the usual one a check does so."""

INSIDE: Arguments = {"style": "inside"}
KEPT: Arguments = {"zero": "kept"}
TWO_OF_TWO: Arguments = {"steps": 2, "micro_batches": 2, "no_sync": True}
TWO_OF_THREE: Arguments = {"steps": 2, "micro_batches": 3, "no_sync": True}
SIZES: Arguments = {"steps": 4, "sizes": (2, 4, 3, 5)}
"""Loops of several scenarios; see :class:`testing.scenarios.loop.Loop`."""

STAYS_LOCAL = ("stay on their rank, as with eager DDP: its forward has had its",)
OWN_REDUCER = (
    "is trained by DDP's own reducer, as without ddp_fusion, and its gradients are not fused:"
)
NO_EFFECT = ("has no effect under ddp_fusion: it tunes the C++ reducer, which does not run",)
NOT_DDPS_OWN = ("stay on their rank, as with eager DDP: DistributedDataParallel was constructed",)
"""What the user is told in several scenarios."""

TORCH_CRASHES = "torch 2.11 can crash where one thread is traced while another one runs"
"""Seen once in three runs; docs/support.md."""


def on_two(feature: str, target: str, *checked: str, **options: Any) -> Scenario:
    """A scenario of one DDP module on two ranks.

    Args:
        feature: its name.
        target: ``module:function`` among the features.
        checked: the modes that it is tested in, :data:`EACH_TORCH`, :data:`NEWEST_TORCH`.
        options: fields of :class:`testing.scenarios.entries.Scenario`; ``arguments`` and
            ``options`` as dictionaries.
    """
    return on_ranks("ddp-2", feature, target, *checked, **{"ranks": 2, **options})


def on_ranks(
    parallelism: str, feature: str, target: str, *checked: str, ranks: int = 4, **options: Any
) -> Scenario:
    """A scenario of some parallelism, on four ranks if it does not say otherwise."""
    frozen = {name: tuple(options.pop(name, {}).items()) for name in ("arguments", "options")}
    return Scenario(
        parallelism,
        feature,
        f"{FEATURES}.{target}",
        ranks,
        tested=tuple(item for item in checked if item not in (EACH_TORCH, NEWEST_TORCH)),
        each_torch=EACH_TORCH in checked,
        newest_torch=NEWEST_TORCH in checked,
        **frozen,
        **options,
    )


SCENARIOS = (
    # How ranks share the work
    on_two(
        "plain", "loops:plain", CONCAT, "concat/bf16", EACH_TORCH, dtypes=ALL_DTYPES, launches=1
    ),
    on_ranks("ddp-4", "plain", "loops:plain", dtypes=ALL_DTYPES, launches=1),
    on_ranks("ddp-4", "no-sync", "loops:plain", arguments=TWO_OF_THREE),
    on_ranks("ddp-4", "unused-changing", "unused:on_changing_ranks"),
    on_ranks("ddp-4", "unused-added", "unused:added"),
    on_ranks("ddp-4", "update-group", "reducer:another_group"),
    on_ranks(
        "tp",
        "plain",
        "tensor:colwise_rowwise",
        CONCAT,
        dtypes=("fp32", "bf16"),
        arguments={"steps": 2, "sizes": (3, 5)},
        launches=1,
    ),
    on_ranks(
        "tp",
        "backward-inside",
        "tensor:colwise_rowwise",
        COALESCED,
        NEWEST_TORCH,
        arguments=INSIDE | {"steps": 2},
        launches=1,
    ),
    on_ranks(
        "tp",
        "eager-forward",
        "tensor:colwise_rowwise",
        CONCAT,
        arguments={"style": "as it is", "recomputed": True},
    ),
    on_ranks("tp", "compiled-before", "tensor:colwise_rowwise_compiled_before"),
    on_ranks("tp", "no-sync", "tensor:colwise_rowwise", arguments=TWO_OF_TWO),
    on_ranks("tp", "sequence", "tensor:sequence_parallel", tolerance_eps=ROUNDS_EPS, launches=1),
    on_ranks("tp", "returns-dtensors", "tensor:returning_dtensors", CONCAT),
    on_ranks("pp", "gpipe", "pipeline:by_hand", arguments={"schedule": "GPipe"}, launches=1),
    on_ranks("pp", "1f1b", "pipeline:by_hand", arguments={"schedule": "1F1B"}),
    on_ranks("pp", "traced-gpipe", "pipeline:traced", arguments={"schedule": "GPipe"}),
    on_ranks("pp", "traced-1f1b", "pipeline:traced", arguments={"schedule": "1F1B"}),
    on_ranks("fsdp", "beside", "sharded:beside", CONCAT, ranks=2),
    on_ranks("fsdp", "beside-inside", "sharded:beside", ranks=2, arguments=INSIDE),
    on_ranks("fsdp", "within", "sharded:within", ranks=2),
    on_ranks("hsdp", "beside", "sharded:hybrid_beside"),
    # Several process groups
    on_ranks("groups", "plain", "groups:two_groups", CONCAT, launches=2),
    on_ranks("groups", "backward-inside", "groups:two_groups", arguments=INSIDE),
    on_ranks("groups", "no-sync", "groups:two_groups", arguments=TWO_OF_TWO),
    # Ways to write a training loop
    on_two(
        "backward-inside",
        "loops:plain",
        COALESCED,
        EACH_TORCH,
        dtypes=ALL_DTYPES,
        arguments=INSIDE,
        launches=1,
    ),
    on_two("eager-forward", "loops:plain", arguments={"style": "as it is"}),
    on_two("no-sync", "loops:plain", CONCAT, arguments=TWO_OF_THREE, launches=1),
    on_two("no-sync-inside", "loops:plain", COALESCED, arguments=INSIDE | TWO_OF_THREE, launches=1),
    on_two("kept-gradients", "loops:plain", COALESCED, arguments=KEPT, launches=1),
    on_two("added-gradients", "loops:plain", arguments={"zero": "never"}),
    on_two("several-forwards", "loops:several_forwards", COALESCED),
    on_two("several-backwards", "loops:plain", CONCAT, arguments={"micro_batches": 2}, launches=1),
    on_two("forwards-then-backwards", "loops:forwards_then_backwards", warns=STAYS_LOCAL),
    on_two("evaluation", "loops:evaluation_between"),
    on_two("reduce-overhead", "loops:reduce_overhead"),
    on_two("dynamic", "loops:dynamic", launches=1),
    on_two("automatic-dynamic", "loops:plain", CONCAT, arguments=INSIDE | SIZES, launches=1),
    on_two("checkpointing", "loops:checkpointing"),
    on_two("checkpointing-inside", "loops:checkpointing", CONCAT, arguments=INSIDE, launches=1),
    on_two("checkpointing-reentrant", "shapes:reentrant_checkpointing", COALESCED),
    on_two("upsampled", "shapes:upsampled", CONCAT),
    on_two("mark-dynamic", "shapes:marked_dynamic", COALESCED, launches=1),
    on_two("mark-dynamic-inside", "shapes:marked_dynamic", arguments=INSIDE, launches=1),
    on_two("recompilation", "shapes:recompiled", CONCAT, launches=1),
    on_two("transformer", "shapes:transformer", tolerance_eps=ROUNDS_EPS, by_hand=True, launches=1),
    on_two(
        "transformer-inside",
        "shapes:transformer",
        arguments=INSIDE,
        tolerance_eps=ROUNDS_EPS,
        by_hand=True,
        launches=1,
    ),
    # What a backward is asked for, and what reaches it
    on_two(
        "retain-graph",
        "backwards:backward_twice",
        CONCAT,
        EACH_TORCH,
        warns=STAYS_LOCAL,
        keeps_graph=True,
    ),
    on_two("grad-of-inputs", "backwards:grad_of_inputs", CONCAT),
    on_two("gradient-penalty", "backwards:gradient_penalty", CONCAT),
    on_two(
        "no-sync-elsewhere",
        "backwards:no_sync_elsewhere",
        CONCAT,
        warns=STAYS_LOCAL,
        keeps_graph=True,
    ),
    on_two("local-gradients", "backwards:local_gradients", COALESCED, EACH_TORCH),
    on_two("backward-inputs", "backwards:some_inputs", COALESCED, keeps_graph=True),
    on_two("loss-reads-parameter", "backwards:loss_that_reads_a_parameter", CONCAT),
    on_two("flag-unset", "backwards:flag_unset", CONCAT),
    on_two("another-flag", "backwards:another_flag", COALESCED),
    on_two("kept-tensors", "backwards:kept_gradients", COALESCED, EACH_TORCH),
    on_two("kept-unused", "backwards:kept_gradients_of_what_may_be_unused", CONCAT),
    on_two("kept-in-graph", "backwards:kept_in_a_graph", CONCAT),
    on_two("several-outputs", "backwards:several_outputs", CONCAT),
    on_two("several-outputs-eager", "backwards:backwards_of_one_round"),
    on_two("failing", "backwards:failing", COALESCED),
    on_two("queued-callbacks", "backwards:queued_callbacks", COALESCED, EACH_TORCH),
    # Models in several graphs
    on_two("graph-break", "loops:graph_break"),
    on_two("graph-break-inside", "loops:graph_break_inside"),
    on_two("partly-compiled", "loops:partly_compiled"),
    on_two("compiled-before", "loops:compiled_before_ddp", COALESCED),
    on_two("compiler-disable", "loops:compiler_disable"),
    on_two("in-parts", "parts:in_parts", CONCAT),
    on_two("in-parts-failing", "parts:fails_in_parts", CONCAT),
    on_two("in-parts-shared", "parts:shared_by_parts", CONCAT),
    on_two("in-parts-one-by-one", "parts:parts_one_by_one", COALESCED),
    on_two("block-by-block", "parts:block_by_block", COALESCED),
    on_two("breaks-in-a-loop", "parts:breaks_in_a_loop", CONCAT),
    on_two("disabled-hook", "parts:broken_backward", COALESCED, NEWEST_TORCH),
    # Modules that share graphs, weights or a backward
    on_two("two-modules", "groups:two_modules"),
    on_two("two-caps", "groups:two_caps", CONCAT, launches=3),
    on_two("alternating", "groups:alternating"),
    on_two("second-instance", "instances:second_instance", CONCAT, EACH_TORCH),
    on_two("instances-in-parts", "instances:instances_in_parts", COALESCED),
    on_two("instances-in-one-backward", "instances:instances_in_one_backward", COALESCED),
    on_two("same-weights", "instances:over_the_same_weights", COALESCED),
    on_two("same-weights-at-once", "instances:over_the_same_weights_at_once", CONCAT),
    on_two("one-thread", "instances:one_thread", CONCAT),
    on_two("another-thread", "instances:another_thread", COALESCED),
    on_two("threads", "instances:threads", COALESCED, fails_on_oldest=TORCH_CRASHES),
    on_two("bare-threads", "instances:bare_threads", CONCAT, fails_on_oldest=TORCH_CRASHES),
    on_two("subclass", "instances:subclass", CONCAT, EACH_TORCH),
    on_two("subclass-overriding", "instances:overriding_subclass", CONCAT),
    on_two("replicate", "instances:replicated", CONCAT),
    on_two(
        "two-reducers",
        "instances:two_reducers_in_one_backward",
        CONCAT,
        warns=("trained by DDP's own reducer",),
    ),
    on_two(
        "two-reducers-apart",
        "instances:two_reducers_in_two_backwards",
        CONCAT,
        EACH_TORCH,
        warns=("trained by DDP's own reducer",),
    ),
    # Ranks that do not do the same
    on_two("batch-sizes", "ranks:batch_sizes", CONCAT),
    on_two("hooks-on-one-rank", "ranks:hooks_on_one_rank", CONCAT),
    on_two("other-orders", "ranks:other_orders", CONCAT),
    on_two("other-orders-of-two", "ranks:other_orders_of_two", CONCAT),
    on_two("other-orders-of-another", "ranks:other_orders_of_another"),
    on_two("other-orders-of-instances", "ranks:other_orders_of_instances", COALESCED),
    on_two("other-orders-of-blocks", "ranks:other_orders_of_blocks", CONCAT),
    on_two("foreign", "foreign:in_graphs", COALESCED),
    on_two("static-graph-without-some", "ranks:static_graph_without_some", CONCAT),
    on_two("static-graph-sides", "ranks:static_graph_of_sides"),
    on_two("static-graph-changes", "ranks:static_graph_that_changes", CONCAT),
    on_two("unreached", "ranks:unreached", COALESCED, EACH_TORCH, averages=False),
    on_two("unreached-inside", "ranks:unreached_inside", CONCAT, averages=False),
    on_two("unreached-later", "ranks:unreached_later", CONCAT),
    on_two("all-replaced", "ranks:all_replaced", CONCAT, averages=False, warns=NOT_DDPS_OWN),
    on_two("thawed", "ranks:thawed", COALESCED, warns=NOT_DDPS_OWN),
    on_two("swapped", "ranks:swapped", COALESCED, averages=False, warns=NOT_DDPS_OWN),
    # Parameters that take no part in a step
    on_two("unused-never", "unused:all_used", CONCAT),
    on_two("unused-all", "unused:on_all_ranks"),
    on_two("unused-all-kept", "unused:on_all_ranks_kept"),
    on_two("unused-some", "unused:on_one_rank"),
    on_two("unused-some-inside", "unused:on_one_rank", arguments=INSIDE),
    on_two("unused-changing", "unused:on_changing_ranks"),
    on_two("unused-in-turn", "unused:changing", CONCAT, arguments={"steps": 4}),
    on_two("unused-many", "unused:changing", arguments={"steps": 10}),
    on_two("unused-changing-inside", "unused:changing", arguments=INSIDE | {"steps": 6}),
    on_two("unused-changing-eager", "unused:changing", arguments={"style": "as it is", "steps": 6}),
    on_two("unused-new-branch", "unused:a_new_branch"),
    on_two("unused-added", "unused:added"),
    on_two("unused-added-late", "unused:added_to_some"),
    on_two("unused-zeroed", "unused:zeroed"),
    on_two("unused-no-sync", "unused:with_no_sync", CONCAT),
    on_two("unused-hook-fp16", "unused:compressed"),
    on_two("unused-dtypes", "unused:several_dtypes"),
    on_two("unused-static-graph", "unused:in_a_static_graph"),
    on_two("unused-static-graph-later", "unused:in_a_static_graph_later"),
    on_two("unused-several-graphs", "unused:in_several_graphs", CONCAT),
    on_two("unused-in-parts", "unused:in_equal_parts", CONCAT, NEWEST_TORCH),
    on_two("unused-other-parts", "unused:in_parts", COALESCED),
    on_two("unused-shared-parts", "unused:in_shared_parts", CONCAT),
    on_two("unused-shared-zeroed", "unused:in_shared_parts_with_zeros"),
    on_two("unused-shared-others", "unused:in_other_shared_parts", CONCAT),
    on_two("unused-shared-order", "unused:in_shared_parts_of_others", COALESCED),
    on_two("unused-instances", "unused:by_instances", COALESCED),
    on_two("unused-in-parts-of-two", "unused:in_parts_beside_another"),
    on_two("unused-beside-foreign", "foreign:with_unused"),
    on_two("skip-unused", "unused:skipped_reduction"),
    on_two("missing-one", "unused:missing_on_one_rank", becomes=REFUSED, must_fail="middle"),
    # Unusual parameters
    on_two("frozen", "unused:frozen", COALESCED, launches=1),
    on_two("ignored", "reducer:ignored_parameters"),
    on_two("sparse", "reducer:sparse_embedding"),
    on_two("sparse-accumulated", "reducer:sparse_accumulation"),
    on_two("sparse-bag", "reducer:sparse_bag"),
    on_two("tied", "reducer:tied_weights", CONCAT, launches=1),
    on_two("layouts", "shapes:layouts", launches=1),
    on_two("layouts-kept", "shapes:layouts", CONCAT, NEWEST_TORCH, arguments=KEPT, launches=1),
    on_two("scalars", "shapes:scalars", CONCAT, launches=1),
    on_two("complex", "shapes:complex_numbers", launches=2),
    on_two("complex-kept", "shapes:complex_that_stay"),
    on_two("shared-storage", "reducer:shared_storage"),
    # What DDP offers
    on_two("static-graph", "reducer:static_graph", COALESCED),
    on_two("static-graph-unused", "reducer:static_graph_with_unused", CONCAT),
    on_two("bucket-view", "reducer:gradient_as_bucket_view", warns=NO_EFFECT),
    on_two("batched-copy", "reducer:batched_grad_copy", warns=NO_EFFECT),
    on_two("bucket-cap", "reducer:bucket_cap_mb", COALESCED, launches=3),
    on_two(
        "flag-cap",
        "reducer:caps_of_the_flag",
        CONCAT,
        options={"bucket_cap_mb": 300 / 2**20, "first_bucket_cap_mb": 300 / 2**20},
        launches=3,
    ),
    on_two("bucket-cap-list", "reducer:bucket_cap_mb_list", CONCAT, launches=2),
    on_two(
        "delay",
        "reducer:delayed_all_reduce",
        CONCAT,
        becomes=UNFUSED,
        warns=(f"{OWN_REDUCER} it was given delay_all_reduce_named_params=...",),
    ),
    on_two("update-group", "reducer:update_process_group"),
    on_two(
        "update-group-after-error",
        "reducer:another_group_after_an_error",
        CONCAT,
        leaves_unwaited=True,
    ),
    on_two("state-dict", "reducer:state_dict", CONCAT),
    on_two("saved-module", "reducer:saved_module", CONCAT),
    on_two("deepcopy", "reducer:deepcopy", CONCAT, EACH_TORCH),
    on_two("ema", "reducer:deepcopy_of_the_model"),
    on_two("second-ddp", "reducer:second_ddp", CONCAT),
    on_two("two-ddps", "reducer:two_ddps", warns=STAYS_LOCAL),
    # join
    on_two("join", "joining:some_have_more", CONCAT, EACH_TORCH),
    on_two("join-rank-0", "joining:uneven", COALESCED, arguments={"steps": ((4, 1),)}),
    on_two(
        "join-several-times",
        "joining:uneven",
        CONCAT,
        arguments={"steps": ((0, 3), (3, 1), (2, 2))},
    ),
    on_two("join-divided", "joining:divided", COALESCED),
    on_two("join-buffers", "joining:with_buffers", CONCAT, EACH_TORCH),
    on_two(
        "join-no-sync", "joining:uneven", COALESCED, arguments={"steps": ((1, 3),), "local": True}
    ),
    on_two(
        "join-inside", "joining:uneven", CONCAT, arguments={"steps": ((2, 4),), "is_inside": True}
    ),
    on_two(
        "join-batch-sizes",
        "joining:uneven",
        COALESCED,
        arguments={"steps": ((2, 5),), "sizes": (4, 1, 3)},
    ),
    on_two("join-buckets", "joining:several_buckets", CONCAT),
    on_two("join-hook", "joining:with_a_hook", COALESCED),
    on_two("join-unused", "joining:with_unused"),
    on_two("join-unused-more", "joining:with_more_unused"),
    on_two("join-static-graph", "joining:with_a_static_graph", CONCAT),
    on_two("join-static-graph-unused", "joining:with_a_static_graph_of_some"),
    on_two("join-optimizer", "joining:beside_an_optimizer", CONCAT),
    on_two("join-disabled", "joining:disabled", CONCAT),
    on_ranks("ddp-4", "join", "joining:some_have_more", CONCAT),
    on_ranks("ddp-4", "join-divided", "joining:divided", tolerance_eps=THIRDS_EPS),
    # Buffers
    on_two("buffers", "buffers:broadcast"),
    on_two("buffers-inside", "buffers:broadcast", arguments=INSIDE),
    on_two("buffers-no-sync", "buffers:broadcast", arguments={"micro_batches": 3, "no_sync": True}),
    on_two(
        "buffers-several-forwards",
        "buffers:broadcast_between_forwards",
        CONCAT,
        tolerance_eps=ROUNDS_EPS,
        fails_on_oldest="eager DDP of this torch raises here",
    ),
    on_two("no-forward-sync", "buffers:no_forward_sync"),
    on_two("no-broadcast", "buffers:no_broadcast"),
    on_two(
        "buffers-called",
        "buffers:broadcast_where_operators_are_called",
        CONCAT,
        EACH_TORCH,
        launches=2,
    ),
    on_two(
        "buffer-hook",
        "buffers:buffer_hook",
        CONCAT,
        becomes=UNFUSED,
        warns=(f"{OWN_REDUCER} a hook of yours synchronises its buffers",),
    ),
    # One for the floating-point buffers, and one for the counters.
    on_two("batch-norm", "buffers:batch_norm", tolerance_eps=ROUNDS_EPS, by_hand=True, launches=3),
    on_two(
        "batch-norm-inside",
        "buffers:batch_norm",
        arguments=INSIDE,
        tolerance_eps=ROUNDS_EPS,
        by_hand=True,
        launches=3,
    ),
    on_two(
        "batch-norm-evaluated",
        "buffers:batch_norm_evaluated",
        tolerance_eps=ROUNDS_EPS,
        by_hand=True,
        launches=3,
    ),
    # Dtypes
    on_two(
        "mixed-precision", "precision:mixed_precision", becomes=REFUSED, dtypes=("bf16", "fp16")
    ),
    on_two(
        "autocast",
        "precision:autocast",
        CONCAT,
        dtypes=("bf16",),
        tolerance_eps=BF16_EPS,
        by_hand=True,
        launches=1,
    ),
    on_two(
        "autocast-inside",
        "precision:autocast",
        dtypes=("bf16",),
        arguments=INSIDE,
        tolerance_eps=BF16_EPS,
        by_hand=True,
        launches=1,
    ),
    on_two("grad-scaler", "precision:grad_scaler"),
    on_two("grad-scaler-inf", "precision:grad_scaler_infinite"),
    on_two(
        "grad-scaler-autocast",
        "precision:grad_scaler_autocast",
        CONCAT,
        dtypes=("fp16",),
        tolerance_eps=FP16_EPS,
    ),
    on_two("two-dtypes", "precision:two_dtypes", COALESCED, launches=2),
    on_two("fp64", "precision:double_precision", launches=1),
    # Where gradients are scaled, and in which dtype they are sent
    on_two(
        "scaling-collective",
        "precision:scaled",
        CONCAT,
        options={"scaling": "collective"},
        launches=1,
    ),
    on_two(
        "scaling-bucket",
        "precision:scaled",
        CONCAT,
        modes=("concat",),
        options={"scaling": "bucket"},
        launches=1,
    ),
    on_two(
        "scaling-collective-kept",
        "precision:scaled",
        COALESCED,
        arguments=KEPT,
        options={"scaling": "collective"},
        launches=1,
    ),
    on_two(
        "scaling-bucket-kept",
        "precision:scaled",
        CONCAT,
        modes=("concat",),
        arguments=KEPT,
        options={"scaling": "bucket"},
        launches=1,
    ),
    on_ranks(
        "ddp-3",
        "scaling-auto",
        "precision:in_thirds",
        ranks=3,
        options={"scaling": "auto"},
        tolerance_eps=THIRDS_EPS,
        launches=1,
    ),
    on_ranks(
        "ddp-3",
        "scaling-collective",
        "precision:in_thirds",
        COALESCED,
        ranks=3,
        options={"scaling": "collective"},
        tolerance_eps=THIRDS_EPS,
        launches=1,
    ),
    on_ranks(
        "ddp-3",
        "scaling-bucket",
        "precision:in_thirds",
        ranks=3,
        modes=("concat",),
        options={"scaling": "bucket"},
        tolerance_eps=THIRDS_EPS,
        launches=1,
    ),
    on_two(
        "near-overflow", "precision:near_overflow", CONCAT, COALESCED, dtypes=("fp16",), launches=1
    ),
    on_two(
        "reduce-bf16",
        "precision:sent_in",
        arguments={"dtype": "bf16"},
        options={"reduce_dtype": "bf16"},
        launches=1,
    ),
    on_two(
        "reduce-bf16-kept",
        "precision:sent_in",
        arguments=KEPT | {"dtype": "bf16"},
        options={"reduce_dtype": "bf16"},
        launches=1,
    ),
    on_two(
        "reduce-fp16",
        "precision:sent_in",
        arguments={"dtype": "fp16"},
        options={"reduce_dtype": "fp16"},
        launches=1,
    ),
    on_two(
        "reduce-fp16-kept",
        "precision:sent_in",
        CONCAT,
        arguments=KEPT | {"dtype": "fp16"},
        options={"reduce_dtype": "fp16"},
        launches=1,
    ),
    on_two(
        "reduce-bf16-collective",
        "precision:sent_in",
        arguments={"dtype": "bf16"},
        options={"reduce_dtype": "bf16", "scaling": "collective"},
        launches=1,
    ),
    on_two(
        "reduce-bf16-bucket",
        "precision:sent_in",
        modes=("concat",),
        arguments={"dtype": "bf16"},
        options={"reduce_dtype": "bf16", "scaling": "bucket"},
        launches=1,
    ),
    on_two(
        "reduce-small",
        "precision:small_already",
        CONCAT,
        options={"reduce_dtype": "fp16"},
        launches=2,
    ),
    # Hooks of users, and the communication hooks that only average
    on_two("tensor-hook", "hooks:tensor_hook"),
    on_two("parameter-hook", "hooks:parameter_hook"),
    on_two("parameter-hook-inside", "hooks:parameter_hook", arguments=INSIDE),
    on_two("accumulation-hook", "hooks:accumulation_hook"),
    on_two("accumulation-hook-behind", "hooks:accumulation_hook_behind"),
    on_two("hooks-in-order", "hooks:hooks_in_order", CONCAT),
    on_two("hooks-that-come-and-go", "hooks:hooks_that_come_and_go", COALESCED, EACH_TORCH),
    on_two("node-hooks", "hooks:node_hooks", CONCAT, EACH_TORCH),
    on_two("node-hooks-before", "hooks:node_hooks_before", COALESCED),
    on_two("module-hooks", "hooks:module_hooks"),
    # Only compiled autograd traces a hook of the user's.
    on_ranks(
        "ddp-4",
        "users-average",
        "hooks:users_average",
        CONCAT,
        options={"backward_graph": "compiled_autograd"},
    ),
    on_two("hook-allreduce", "hooks:allreduce_hook", CONCAT, launches=1),
    on_two("hook-builtin", "hooks:builtin_hook"),
    on_two("hook-bf16", "hooks:bf16_hook", COALESCED, launches=1),
    on_two("hook-fp16", "hooks:fp16_hook", CONCAT, EACH_TORCH, launches=1),
    on_two("hook-wrapper", "hooks:wrapped_hook", CONCAT, launches=1),
    on_two("hook-noop", "hooks:noop_hook"),
    # Communication hooks that are called with buckets
    on_two("hook-users", "bucket_hooks:users", CONCAT, EACH_TORCH, launches=1),
    on_two("hook-users-inside", "bucket_hooks:users", COALESCED, arguments=INSIDE, launches=1),
    on_two(
        "hook-users-no-sync",
        "bucket_hooks:users",
        CONCAT,
        arguments=KEPT | TWO_OF_THREE,
        launches=1,
    ),
    on_two(
        "hook-users-no-sync-inside", "bucket_hooks:users", arguments=INSIDE | TWO_OF_TWO, launches=1
    ),
    on_two("hook-users-batch-sizes", "bucket_hooks:batch_sizes", launches=1),
    on_two("hook-users-buckets", "bucket_hooks:several", CONCAT),
    on_two(
        "hook-users-autocast",
        "bucket_hooks:autocast",
        dtypes=("bf16",),
        tolerance_eps=BF16_EPS,
        launches=1,
    ),
    on_two("hook-users-parameters", "bucket_hooks:unusual_parameters", CONCAT),
    on_two("hook-users-dtypes", "bucket_hooks:several_kinds", CONCAT, COALESCED, launches=3),
    on_two("hook-users-flag-unset", "bucket_hooks:flag_unset", CONCAT),
    on_two("hook-users-unused", "bucket_hooks:unused", CONCAT, launches=2),
    on_two("hook-users-unused-inside", "bucket_hooks:unused_in_turn", arguments=INSIDE, launches=2),
    on_two(
        "hook-users-unused-no-sync",
        "bucket_hooks:unused_in_turn",
        arguments={"local": (1, 3)},
        launches=2,
    ),
    on_two("hook-users-unused-kept", "bucket_hooks:unused", arguments=KEPT, launches=2),
    on_two("hook-users-unused-buckets", "bucket_hooks:unused_several"),
    on_two("hook-users-unused-never", "bucket_hooks:unused_never", launches=2),
    on_two(
        "hook-powersgd", "bucket_hooks:power_sgd", CONCAT, EACH_TORCH, tolerance_eps=PRODUCTS_EPS
    ),
    on_two(
        "hook-wrapper-powersgd", "bucket_hooks:wrapped_power_sgd", tolerance_eps=FP16_PRODUCTS_EPS
    ),
    on_two("hook-wrapper-bf16", "bucket_hooks:wrapped_in_bf16", launches=1),
    on_two("hook-wrapper-unused", "bucket_hooks:unused_wrapped", launches=2),
    on_two("hook-post-local", "bucket_hooks:post_local_sgd", CONCAT),
    on_two("hook-another-group", "bucket_hooks:another_group", CONCAT),
    on_two("hook-another-group-unused", "bucket_hooks:unused_another_group"),
    on_ranks("ddp-4", "hook-users", "bucket_hooks:users", CONCAT, launches=1),
    on_ranks(
        "ddp-4", "hook-powersgd", "bucket_hooks:power_sgd", CONCAT, tolerance_eps=PRODUCTS_EPS
    ),
    # Optimizers
    on_two("optimizer-in-backward", "optimizers:in_backward", becomes=REFUSED),
    on_two("optimizer-in-hook", "optimizers:fused_in_hook", becomes=UNFUSED, warns=(OWN_REDUCER,)),
    on_two("optimizer-fused", "optimizers:fused", tolerance_eps=ROUNDS_EPS),
    on_two("optimizer-foreach", "optimizers:foreach", tolerance_eps=ROUNDS_EPS),
    on_two("optimizer-foreach-inside", "optimizers:foreach_momentum", tolerance_eps=ROUNDS_EPS),
    on_two("optimizer-compiled", "optimizers:compiled_step", tolerance_eps=ROUNDS_EPS),
)
