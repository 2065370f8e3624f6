"""What DDP offers."""

from __future__ import annotations

from testing.scenarios.catalog.making import (
    COALESCED,
    CONCAT,
    INSIDE,
    KEPT,
    NO_EFFECT,
    OWN_REDUCER,
    ROUNDS_EPS,
    STAYS_LOCAL,
    on_four,
    on_two,
)

PARAMETERS = [
    on_two("frozen", "frozen parameters", "unused:frozen", launches=1, tested=COALESCED),
    on_two("ignored", "ignored parameters", "reducer:ignored_parameters"),
    on_two("sparse", "`nn.Embedding(sparse=True)`", "reducer:sparse_embedding"),
    on_two(
        "sparse-accumulated",
        "`nn.Embedding(sparse=True)`, gradients accumulated",
        "reducer:sparse_accumulation",
    ),
    on_two("sparse-bag", "`nn.EmbeddingBag(sparse=True)`", "reducer:sparse_bag"),
    on_two("tied", "tied weights", "reducer:tied_weights", launches=1, tested=CONCAT),
    on_two("layouts", "parameters that are not contiguous", "shapes:layouts", launches=1),
    on_two(
        "layouts-kept",
        "parameters that are not contiguous, gradients kept",
        "shapes:layouts",
        arguments=KEPT,
        launches=1,
        tested=CONCAT,
        newest_torch=True,
    ),
    on_two("scalars", "scalar and empty parameters", "shapes:scalars", launches=1, tested=CONCAT),
    on_two("complex", "complex parameters", "shapes:complex_numbers", launches=2),
    on_two(
        "complex-kept",
        "complex gradients kept, an eager forward among them",
        "shapes:complex_that_stay",
    ),
    on_two("shared-storage", "parameters that share a storage", "reducer:shared_storage"),
]

OPTIONS = [
    on_two("static-graph", "`static_graph`", "reducer:static_graph", tested=COALESCED),
    on_two(
        "static-graph-unused",
        "`static_graph`, a layer that is never used",
        "reducer:static_graph_with_unused",
        tested=CONCAT,
    ),
    on_two(
        "bucket-view",
        "`gradient_as_bucket_view`",
        "reducer:gradient_as_bucket_view",
        warns=NO_EFFECT,
    ),
    on_two("batched-copy", "`batched_grad_copy`", "reducer:batched_grad_copy", warns=NO_EFFECT),
    on_two(
        "bucket-cap",
        "`bucket_cap_mb`, several buckets",
        "reducer:bucket_cap_mb",
        tested=COALESCED,
        launches=3,
    ),
    on_two(
        "flag-cap",
        "`bucket_cap_mb` of the flag, several buckets, backward inside",
        "reducer:caps_of_the_flag",
        options=(("bucket_cap_mb", 300 / 2**20), ("first_bucket_cap_mb", 300 / 2**20)),
        tested=CONCAT,
        launches=3,
    ),
    on_two(
        "bucket-cap-list",
        "`bucket_cap_mb_list`",
        "reducer:bucket_cap_mb_list",
        launches=2,
        tested=CONCAT,
    ),
    on_two(
        "delay",
        "`delay_all_reduce_named_params`",
        "reducer:delayed_all_reduce",
        becomes="equal, unfused",
        warns=(f"{OWN_REDUCER} it was given delay_all_reduce_named_params=...",),
        tested=CONCAT,
    ),
    on_two("update-group", "`_update_process_group`", "reducer:update_process_group"),
    on_two(
        "update-group-after-error",
        "`_update_process_group` after an error on one rank",
        "reducer:another_group_after_an_error",
        tested=CONCAT,
        leaves_unwaited=True,
    ),
    on_two("state-dict", "`state_dict` saved and loaded", "reducer:state_dict", tested=CONCAT),
    on_two("saved-module", "a DDP module saved and loaded", "reducer:saved_module", tested=CONCAT),
    on_two(
        "deepcopy",
        "`copy.deepcopy` of the DDP module",
        "reducer:deepcopy",
        tested=CONCAT,
        each_torch=True,
    ),
    on_two("ema", "an average of the weights (`AveragedModel`)", "reducer:deepcopy_of_the_model"),
    on_two(
        "second-ddp",
        "the model wrapped again, the first dropped",
        "reducer:second_ddp",
        tested=CONCAT,
    ),
    on_two("two-ddps", "two DDP modules over one model", "reducer:two_ddps", warns=STAYS_LOCAL),
]

BUFFERS = [
    on_two("buffers", "buffers", "buffers:broadcast"),
    on_two("buffers-inside", "buffers, backward inside", "buffers:broadcast", arguments=INSIDE),
    on_two(
        "buffers-no-sync",
        "buffers, `no_sync`",
        "buffers:broadcast",
        arguments={"micro_batches": 3, "no_sync": True},
    ),
    on_two(
        "buffers-several-forwards",
        "buffers, several forwards before a backward",
        "buffers:broadcast_between_forwards",
        tolerance_eps=ROUNDS_EPS,
        tested=CONCAT,
        fails_on_oldest="eager DDP of this torch raises here",
    ),
    on_two("no-forward-sync", "`forward_sync_buffers=False`", "buffers:no_forward_sync"),
    on_two("no-broadcast", "`broadcast_buffers=False`", "buffers:no_broadcast"),
    on_two(
        "buffers-called",
        "buffers, backward inside, operators called (`fallback_by_default`)",
        "buffers:broadcast_where_operators_are_called",
        launches=2,
        tested=CONCAT,
        each_torch=True,
    ),
    on_two(
        "buffer-hook",
        "`_register_buffer_comm_hook`",
        "buffers:buffer_hook",
        becomes="equal, unfused",
        warns=(f"{OWN_REDUCER} a hook of yours synchronises its buffers",),
        tested=CONCAT,
    ),
    on_two(
        "batch-norm",
        "BatchNorm",
        "buffers:batch_norm",
        tolerance_eps=ROUNDS_EPS,
        by_hand=True,
        launches=3,  # One for the floating-point buffers, and one for the counters.
    ),
    on_two(
        "batch-norm-inside",
        "BatchNorm, backward inside",
        "buffers:batch_norm",
        arguments=INSIDE,
        tolerance_eps=ROUNDS_EPS,
        by_hand=True,
        launches=3,
    ),
    on_two(
        "batch-norm-evaluated",
        "BatchNorm in evaluation mode, channels last",
        "buffers:batch_norm_evaluated",
        tolerance_eps=ROUNDS_EPS,
        by_hand=True,
        launches=3,
    ),
]

HOOKS = [
    on_two("tensor-hook", "a hook on a tensor", "hooks:tensor_hook"),
    on_two("parameter-hook", "a hook on a parameter", "hooks:parameter_hook"),
    on_two(
        "parameter-hook-inside",
        "a hook on a parameter, backward inside",
        "hooks:parameter_hook",
        arguments=INSIDE,
    ),
    on_two(
        "accumulation-hook",
        "a post-accumulate hook, registered before DDP",
        "hooks:accumulation_hook",
    ),
    on_two(
        "accumulation-hook-behind",
        "a post-accumulate hook, registered after DDP",
        "hooks:accumulation_hook_behind",
    ),
    on_two(
        "hooks-in-order",
        "hooks registered before and after DDP: what they see",
        "hooks:hooks_in_order",
        tested=CONCAT,
    ),
    on_two(
        "hooks-that-come-and-go",
        "hooks registered and removed between steps",
        "hooks:hooks_that_come_and_go",
        tested=COALESCED,
        each_torch=True,
    ),
    on_two(
        "node-hooks",
        "hooks on autograd nodes that accumulate gradients",
        "hooks:node_hooks",
        tested=CONCAT,
        each_torch=True,
    ),
    on_two(
        "node-hooks-before",
        "the same, registered before DDP; `no_sync`, backward inside",
        "hooks:node_hooks_before",
        tested=COALESCED,
    ),
    on_two("module-hooks", "hooks on a layer", "hooks:module_hooks"),
    on_four(
        "ddp-4",
        "users-average",
        "DDP on 4 ranks, a hook of the user's that averages over pairs",
        "hooks:users_average",
        # Only compiled autograd traces a hook of the user's.
        options=(("backward_graph", "compiled_autograd"),),
        tested=CONCAT,
    ),
    on_two("hook-allreduce", "`allreduce_hook`", "hooks:allreduce_hook", launches=1, tested=CONCAT),
    on_two("hook-builtin", "a built-in hook of the C++ reducer", "hooks:builtin_hook"),
    on_two("hook-bf16", "`bf16_compress_hook`", "hooks:bf16_hook", launches=1, tested=COALESCED),
    on_two(
        "hook-fp16",
        "`fp16_compress_hook`",
        "hooks:fp16_hook",
        launches=1,
        tested=CONCAT,
        each_torch=True,
    ),
    on_two(
        "hook-wrapper", "`fp16_compress_wrapper`", "hooks:wrapped_hook", launches=1, tested=CONCAT
    ),
    on_two("hook-noop", "`noop_hook`", "hooks:noop_hook"),
]
