"""Dtypes and optimizers."""

from __future__ import annotations

from testing.scenarios.catalog.making import (
    BF16_EPS,
    COALESCED,
    CONCAT,
    FP16_EPS,
    INSIDE,
    KEPT,
    OWN_REDUCER,
    ROUNDS_EPS,
    THIRDS_EPS,
    on_four,
    on_two,
)
from testing.scenarios.entries import MODES

PRECISION = [
    on_two(
        "mixed-precision",
        "`mixed_precision`",
        "precision:mixed_precision",
        dtypes=("bf16", "fp16"),
        becomes="refused",
    ),
    on_two(
        "autocast",
        "autocast",
        "precision:autocast",
        dtypes=("bf16",),
        tolerance_eps=BF16_EPS,
        by_hand=True,
        launches=1,
        tested=CONCAT,
    ),
    on_two(
        "autocast-inside",
        "autocast, backward inside",
        "precision:autocast",
        arguments=INSIDE,
        dtypes=("bf16",),
        tolerance_eps=BF16_EPS,
        by_hand=True,
        launches=1,
    ),
    on_two("grad-scaler", "`GradScaler`", "precision:grad_scaler"),
    on_two(
        "grad-scaler-inf",
        "`GradScaler`, a step with infinite gradients",
        "precision:grad_scaler_infinite",
    ),
    on_two(
        "grad-scaler-autocast",
        "`GradScaler`, autocast, a step with infinite gradients",
        "precision:grad_scaler_autocast",
        dtypes=("fp16",),
        tolerance_eps=FP16_EPS,
        tested=CONCAT,
    ),
    on_two(
        "two-dtypes",
        "fp32 and bf16 parameters in one module",
        "precision:two_dtypes",
        launches=2,
        tested=COALESCED,
    ),
    on_two("fp64", "fp64 parameters", "precision:double_precision", launches=1),
]

_KEPT = "`zero_grad(set_to_none=False)`"


def _modes_with(scaling: str) -> tuple[str, ...]:
    """The modes that have an option: without a bucket there is none to scale in."""
    return CONCAT if scaling == "bucket" else MODES


SCALING = [
    *(
        on_two(
            f"scaling-{scaling}",
            f"`scaling` {scaling!r}",
            "precision:scaled",
            options=(("scaling", scaling),),
            modes=_modes_with(scaling),
            launches=1,
            tested=tested,
        )
        for scaling, tested in (("collective", CONCAT), ("bucket", CONCAT))
    ),
    *(
        on_two(
            f"scaling-{scaling}-kept",
            f"`scaling` {scaling!r}, {_KEPT}",
            "precision:scaled",
            arguments=KEPT,
            options=(("scaling", scaling),),
            modes=_modes_with(scaling),
            launches=1,
            tested=tested,
        )
        for scaling, tested in (("collective", COALESCED), ("bucket", CONCAT))
    ),
    *(
        on_four(
            "ddp-3",
            f"scaling-{scaling}",
            f"DDP on 3 ranks, `scaling` {scaling!r}",
            "precision:in_thirds",
            ranks=3,
            options=(("scaling", scaling),),
            modes=_modes_with(scaling),
            tolerance_eps=THIRDS_EPS,
            launches=1,
            tested=tested,
        )
        for scaling, tested in (("auto", ()), ("collective", COALESCED), ("bucket", ()))
    ),
    on_two(
        "near-overflow",
        "gradients in fp16 whose sum would overflow, backward inside",
        "precision:near_overflow",
        dtypes=("fp16",),
        launches=1,
        tested=("concat", "coalesced"),
    ),
    *(
        on_two(
            f"reduce-{dtype}{suffix}",
            f"`reduce_dtype` {dtype!r}{words}",
            "precision:sent_in",
            arguments={"dtype": dtype, **loop},
            options=(("reduce_dtype", dtype),),
            launches=1,
            tested=tested,
        )
        for dtype, tested_kept in (("bf16", ()), ("fp16", CONCAT))
        for suffix, words, loop, tested in (
            ("", "", {}, ()),
            ("-kept", f", {_KEPT}", KEPT, tested_kept),
        )
    ),
    *(
        on_two(
            f"reduce-bf16-{scaling}",
            f"`reduce_dtype` 'bf16', `scaling` {scaling!r}",
            "precision:sent_in",
            arguments={"dtype": "bf16"},
            options=(("reduce_dtype", "bf16"), ("scaling", scaling)),
            modes=_modes_with(scaling),
            launches=1,
            tested=tested,
        )
        for scaling, tested in (("collective", ()), ("bucket", ()))
    ),
    on_two(
        "reduce-small",
        "`reduce_dtype` 'fp16' with fp32 and bf16 parameters",
        "precision:small_already",
        options=(("reduce_dtype", "fp16"),),
        launches=2,
        tested=CONCAT,
    ),
]

OPTIMIZERS = [
    on_two(
        "optimizer-in-backward",
        "`_apply_optimizer_in_backward`",
        "optimizers:in_backward",
        becomes="refused",
    ),
    on_two(
        "optimizer-in-hook",
        "`_register_fused_optim`",
        "optimizers:fused_in_hook",
        becomes="equal, unfused",
        warns=(OWN_REDUCER,),
    ),
    on_two(
        "optimizer-fused",
        "a fused optimizer, `clip_grad_norm_`",
        "optimizers:fused",
        tolerance_eps=ROUNDS_EPS,
    ),
    on_two(
        "optimizer-foreach",
        "a foreach optimizer, `clip_grad_norm_`",
        "optimizers:foreach",
        tolerance_eps=ROUNDS_EPS,
    ),
    on_two(
        "optimizer-foreach-inside",
        "a foreach optimizer with momentum, backward inside",
        "optimizers:foreach_momentum",
        tolerance_eps=ROUNDS_EPS,
    ),
    on_two(
        "optimizer-compiled",
        "a compiled optimizer",
        "optimizers:compiled_step",
        tolerance_eps=ROUNDS_EPS,
    ),
]
