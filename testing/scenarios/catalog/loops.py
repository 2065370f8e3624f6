"""Ways to write a training loop."""

from __future__ import annotations

from testing.scenarios.catalog.making import COALESCED, CONCAT, ROUNDS_EPS, STAYS_LOCAL, on_two

LOOPS = [
    on_two(
        "backward-inside",
        "backward inside the compiled function",
        "loops:backward_inside",
        dtypes=("fp32", "bf16", "fp16"),
        graph="aot_autograd",
        launches=1,
        tested=COALESCED,
        each_torch=True,
    ),
    on_two("eager-forward", "nothing compiled but the backward", "loops:only_the_flag"),
    on_two(
        "no-sync",
        "`no_sync`",
        "loops:no_sync",
        launches=1,
        tested=CONCAT,
    ),
    on_two(
        "no-sync-inside",
        "`no_sync`, backward inside",
        "loops:no_sync_inside",
        launches=1,
        tested=COALESCED,
    ),
    on_two(
        "kept-gradients",
        "`zero_grad(set_to_none=False)`",
        "loops:kept_gradients",
        launches=1,
        tested=COALESCED,
    ),
    on_two("added-gradients", "gradients added to from step to step", "loops:added_gradients"),
    on_two(
        "several-forwards",
        "several forwards before one backward",
        "loops:several_forwards",
        graph="compiled_autograd",
        tested=COALESCED,
    ),
    on_two(
        "several-backwards",
        "several forwards and backwards in a step",
        "loops:several_backwards",
        quick=COALESCED,
        launches=1,
        tested=CONCAT,
    ),
    on_two(
        "forwards-then-backwards",
        "several forwards, then their backwards",
        "loops:forwards_then_backwards",
        warns=STAYS_LOCAL,
    ),
    on_two("evaluation", "evaluation between steps", "loops:evaluation_between"),
    on_two("reduce-overhead", '`mode="reduce-overhead"`', "loops:reduce_overhead"),
    on_two(
        "dynamic", "`dynamic=True`, several batch sizes", "loops:dynamic", launches=1, tested=CONCAT
    ),
    on_two(
        "automatic-dynamic",
        "several batch sizes, backward inside",
        "loops:automatic_dynamic",
        launches=1,
        tested=CONCAT,
        each_torch=True,
    ),
    on_two("checkpointing", "activation checkpointing", "loops:checkpointing"),
    on_two(
        "checkpointing-inside",
        "activation checkpointing, backward inside",
        "loops:checkpointing_inside",
        launches=1,
        tested=CONCAT,
    ),
    on_two(
        "checkpointing-reentrant",
        "reentrant activation checkpointing, other batch sizes",
        "shapes:reentrant_checkpointing",
        warns=("use_reentrant=False",),
        tested=COALESCED,
    ),
    on_two(
        "mark-dynamic",
        "`maybe_mark_dynamic`",
        "shapes:marked_dynamic",
        launches=1,
        tested=COALESCED,
    ),
    on_two(
        "mark-dynamic-inside",
        "`mark_dynamic`, backward inside",
        "shapes:marked_dynamic_inside",
        launches=1,
    ),
    on_two(
        "recompilation",
        "recompilation in the middle of training",
        "shapes:recompiled",
        launches=1,
        tested=CONCAT,
    ),
    on_two(
        "transformer",
        "a GPT-2 of `transformers`",
        "shapes:transformer",
        tolerance_eps=ROUNDS_EPS,
    ),
]
