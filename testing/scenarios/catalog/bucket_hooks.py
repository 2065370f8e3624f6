"""DDP's communication hooks that are called with buckets."""

from __future__ import annotations

from typing import Any

from testing.scenarios.catalog.making import (
    ACCUMULATED,
    BF16_EPS,
    COALESCED,
    CONCAT,
    INSIDE,
    KEPT,
    ROUNDS_EPS,
    on_four,
    on_two,
)
from testing.scenarios.entries import MODES, Scenario

PRODUCTS_EPS = 2 * ROUNDS_EPS
"""For PowerSGD: products that are summed in another order."""

FP16_PRODUCTS_EPS = 2.0**14
"""The same where they are sent in fp16, whose eps is this many of fp32's: one rounding, and one
that follows from it."""


def _users(feature: str, title: str, target: str, **options: Any) -> Scenario:
    return on_two(
        f"hook-users{feature}",
        f"a communication hook of the user's own{title}",
        f"bucket_hooks:{target}",
        **options,
    )


BUCKET_HOOKS = [
    _users("", "", "users", launches=1, tested=CONCAT, each_torch=True),
    _users("-inside", ", backward inside", "users", arguments=INSIDE, launches=1, tested=COALESCED),
    _users(
        "-no-sync", ", `no_sync`", "users", arguments=ACCUMULATED | KEPT, launches=1, tested=CONCAT
    ),
    _users(
        "-no-sync-inside",
        ", `no_sync`, backward inside",
        "users",
        arguments={**INSIDE, "steps": 2, "micro_batches": 2, "no_sync": True},
        launches=1,
    ),
    _users("-batch-sizes", ", several batch sizes", "batch_sizes", launches=1),
    _users("-buckets", ", several buckets", "several", tested=CONCAT),
    _users(
        "-autocast", ", autocast", "autocast", dtypes=("bf16",), tolerance_eps=BF16_EPS, launches=1
    ),
    _users(
        "-parameters", ", tied and frozen parameters, buffers", "unusual_parameters", tested=CONCAT
    ),
    _users(
        "-dtypes",
        ", parameters of several dtypes and layouts",
        "several_kinds",
        launches=3,
        tested=MODES,
    ),
    _users("-flag-unset", ", the flag unset while training", "flag_unset", tested=CONCAT),
    _users("-unused", ", `find_unused_parameters`", "unused", launches=2, tested=CONCAT),
    _users(
        "-unused-inside",
        ", `find_unused_parameters`, backward inside",
        "unused_in_turn",
        arguments=INSIDE,
        launches=2,
    ),
    _users(
        "-unused-no-sync",
        ", `find_unused_parameters`, `no_sync`",
        "unused_in_turn",
        arguments={"local": (1, 3)},
        launches=2,
    ),
    _users(
        "-unused-kept",
        ", `find_unused_parameters`, `zero_grad(set_to_none=False)`",
        "unused",
        arguments=KEPT,
        launches=2,
    ),
    _users("-unused-buckets", ", `find_unused_parameters`, several buckets", "unused_several"),
    _users("-unused-never", ", `find_unused_parameters`, all used", "unused_never", launches=2),
    on_two(
        "hook-powersgd",
        "`powerSGD_hook`",
        "bucket_hooks:power_sgd",
        tolerance_eps=PRODUCTS_EPS,
        tested=CONCAT,
        each_torch=True,
    ),
    on_two(
        "hook-wrapper-powersgd",
        "`fp16_compress_wrapper` around `powerSGD_hook`",
        "bucket_hooks:wrapped_power_sgd",
        tolerance_eps=FP16_PRODUCTS_EPS,
    ),
    on_two(
        "hook-wrapper-bf16", "`bf16_compress_wrapper`", "bucket_hooks:wrapped_in_bf16", launches=1
    ),
    on_two(
        "hook-wrapper-unused",
        "`fp16_compress_wrapper`, `find_unused_parameters`",
        "bucket_hooks:unused_wrapped",
        launches=2,
    ),
    on_two("hook-post-local", "`post_localSGD_hook`", "bucket_hooks:post_local_sgd", tested=CONCAT),
    on_two(
        "hook-another-group",
        "`allreduce_hook` over another group",
        "bucket_hooks:another_group",
        tested=CONCAT,
    ),
    on_two(
        "hook-another-group-unused",
        "`allreduce_hook` over another group, `find_unused_parameters`",
        "bucket_hooks:unused_another_group",
    ),
    on_four(
        "ddp-4",
        "hook-users",
        "DDP on 4 ranks, a communication hook of the user's own",
        "bucket_hooks:users",
        launches=1,
        tested=CONCAT,
    ),
    on_four(
        "ddp-4",
        "hook-powersgd",
        "DDP on 4 ranks, `powerSGD_hook`",
        "bucket_hooks:power_sgd",
        tolerance_eps=PRODUCTS_EPS,
        tested=CONCAT,
    ),
]
