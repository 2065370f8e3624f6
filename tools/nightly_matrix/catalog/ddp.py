"""What DDP offers."""

from __future__ import annotations

from nightly_matrix.catalog.making import ROUNDS_EPS, on_two

PARAMETERS = [
    on_two(
        "unused-never",
        "`find_unused_parameters`, all used",
        "unused:all_used",
        quick=("concat",),
    ),
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
        "unused:on_one_rank_inside",
    ),
    on_two(
        "unused-changing",
        "`find_unused_parameters`, other ranks in each step",
        "unused:on_changing_ranks",
    ),
    on_two("skip-unused", "`skip_all_reduce_unused_params`", "unused:skipped_reduction"),
    on_two(
        "missing-one",
        "a parameter without a gradient on one rank, no option: an error that names it",
        "unused:missing_on_one_rank",
        must_fail="middle",
        group_timeout_s=20,
    ),
    on_two("frozen", "frozen parameters", "unused:frozen"),
    on_two("ignored", "ignored parameters", "reducer:ignored_parameters"),
    on_two("sparse", "`nn.Embedding(sparse=True)`", "reducer:sparse_embedding"),
    on_two(
        "sparse-accumulated",
        "`nn.Embedding(sparse=True)`, gradients accumulated",
        "reducer:sparse_accumulation",
    ),
    on_two("sparse-bag", "`nn.EmbeddingBag(sparse=True)`", "reducer:sparse_bag"),
    on_two("tied", "tied weights", "reducer:tied_weights"),
    on_two("layouts", "parameters that are not contiguous", "shapes:layouts"),
    on_two("scalars", "scalar and empty parameters", "shapes:scalars"),
    on_two("complex", "complex parameters", "shapes:complex_numbers"),
    on_two("shared-storage", "parameters that share a storage", "reducer:shared_storage"),
]

OPTIONS = [
    on_two("static-graph", "`static_graph`", "reducer:static_graph"),
    on_two("bucket-view", "`gradient_as_bucket_view`", "reducer:gradient_as_bucket_view"),
    on_two("batched-copy", "`batched_grad_copy`", "reducer:batched_grad_copy"),
    on_two("bucket-cap", "`bucket_cap_mb`, several buckets", "reducer:bucket_cap_mb"),
    on_two("bucket-cap-list", "`bucket_cap_mb_list`", "reducer:bucket_cap_mb_list"),
    on_two("delay", "`delay_all_reduce_named_params`", "reducer:delayed_all_reduce"),
    on_two("join", "`join` with uneven inputs", "reducer:join"),
    on_two("update-group", "`_update_process_group`", "reducer:update_process_group"),
    on_two("state-dict", "`state_dict` saved and loaded", "reducer:state_dict"),
    on_two("deepcopy", "`copy.deepcopy` of the DDP module", "reducer:deepcopy"),
    on_two("ema", "an average of the weights (`AveragedModel`)", "reducer:deepcopy_of_the_model"),
    on_two("second-ddp", "the model wrapped again, the first dropped", "reducer:second_ddp"),
    on_two("two-ddps", "two DDP modules over one model", "reducer:two_ddps"),
]

BUFFERS = [
    on_two("buffers", "buffers", "buffers:broadcast"),
    on_two("buffers-inside", "buffers, backward inside", "buffers:broadcast_inside"),
    on_two("buffers-no-sync", "buffers, `no_sync`", "buffers:broadcast_no_sync"),
    on_two("no-forward-sync", "`forward_sync_buffers=False`", "buffers:no_forward_sync"),
    on_two("no-broadcast", "`broadcast_buffers=False`", "buffers:no_broadcast"),
    on_two("buffer-hook", "`_register_buffer_comm_hook`", "buffers:buffer_hook"),
    on_two("batch-norm", "BatchNorm", "buffers:batch_norm", tolerance_eps=ROUNDS_EPS),
]

HOOKS = [
    on_two("tensor-hook", "a hook on a tensor", "hooks:tensor_hook"),
    on_two("parameter-hook", "a hook on a parameter", "hooks:parameter_hook"),
    on_two(
        "parameter-hook-inside",
        "a hook on a parameter, backward inside",
        "hooks:parameter_hook_inside",
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
    on_two("module-hooks", "hooks on a layer", "hooks:module_hooks"),
    on_two("hook-allreduce", "`allreduce_hook`", "hooks:allreduce_hook"),
    on_two("hook-builtin", "a built-in hook of the C++ reducer", "hooks:builtin_hook"),
    on_two("hook-bf16", "`bf16_compress_hook`", "hooks:bf16_hook"),
    on_two("hook-fp16", "`fp16_compress_hook`", "hooks:fp16_hook"),
    on_two("hook-wrapper", "`fp16_compress_wrapper`", "hooks:wrapped_hook"),
    on_two("hook-noop", "`noop_hook`", "hooks:noop_hook"),
    on_two("hook-powersgd", "`powerSGD_hook`", "hooks:power_sgd_hook", tolerance_eps=ROUNDS_EPS),
    on_two("hook-users", "a communication hook of the user's own", "hooks:users_hook"),
    on_two(
        "hook-users-unused",
        "a communication hook of the user's own, `find_unused_parameters`",
        "unused:with_users_hook",
    ),
]
