"""Ways to write a training loop."""

from __future__ import annotations

from nightly_matrix.catalog.making import ROUNDS_EPS, on_two

LOOPS = [
    on_two(
        "backward-inside",
        "backward inside the compiled function",
        "loops:backward_inside",
        dtypes=("fp32", "bf16", "fp16"),
    ),
    on_two("eager-forward", "nothing compiled but the backward", "loops:only_the_flag"),
    on_two("no-sync", "`no_sync`", "loops:no_sync", quick=("concat",)),
    on_two("no-sync-inside", "`no_sync`, backward inside", "loops:no_sync_inside"),
    on_two("kept-gradients", "`zero_grad(set_to_none=False)`", "loops:kept_gradients"),
    on_two("added-gradients", "gradients added to from step to step", "loops:added_gradients"),
    on_two("several-forwards", "several forwards before one backward", "loops:several_forwards"),
    on_two(
        "several-backwards",
        "several forwards and backwards in a step",
        "loops:several_backwards",
        quick=("coalesced",),
    ),
    on_two(
        "forwards-then-backwards",
        "several forwards, then their backwards",
        "loops:forwards_then_backwards",
    ),
    on_two(
        "no-sync-elsewhere",
        "`no_sync` around a forward or its backward alone",
        "loops:backwards_elsewhere",
    ),
    on_two("retain-graph", "two backwards through one forward", "loops:backward_twice"),
    on_two("evaluation", "evaluation between steps", "loops:evaluation_between"),
    on_two("graph-break", "a graph break in the forward", "loops:graph_break"),
    on_two(
        "graph-break-inside",
        "a graph break before the backward, backward inside",
        "loops:graph_break_inside",
    ),
    on_two("partly-compiled", "a part of the model not compiled", "loops:partly_compiled"),
    on_two("compiled-before", "DDP around a compiled model", "loops:compiled_before_ddp"),
    on_two("compiler-disable", "`torch.compiler.disable` on a layer", "loops:compiler_disable"),
    on_two(
        "disabled-hook",
        "`torch.compiler.disable` on a gradient hook",
        "loops:disabled_hook",
    ),
    on_two("reduce-overhead", '`mode="reduce-overhead"`', "loops:reduce_overhead"),
    on_two("dynamic", "`dynamic=True`, several batch sizes", "loops:dynamic"),
    on_two("automatic-dynamic", "several batch sizes, backward inside", "loops:automatic_dynamic"),
    on_two("checkpointing", "activation checkpointing", "loops:checkpointing"),
    on_two(
        "checkpointing-inside",
        "activation checkpointing, backward inside",
        "loops:checkpointing_inside",
    ),
    on_two("mark-dynamic", "`maybe_mark_dynamic`", "shapes:marked_dynamic"),
    on_two("recompilation", "recompilation in the middle of training", "shapes:recompiled"),
    on_two(
        "transformer",
        "a GPT-2 of `transformers`",
        "shapes:transformer",
        tolerance_eps=ROUNDS_EPS,
    ),
    on_two("two-modules", "two DDP modules in one step", "groups:two_modules"),
    on_two("alternating", "two DDP modules in turn, as in a GAN", "groups:alternating"),
]
