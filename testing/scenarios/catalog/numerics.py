"""Dtypes and optimizers."""

from __future__ import annotations

from testing.scenarios.catalog.making import (
    BF16_EPS,
    COALESCED,
    CONCAT,
    FP16_EPS,
    OWN_REDUCER,
    ROUNDS_EPS,
    on_two,
)

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
    ),
    on_two(
        "autocast-inside",
        "autocast, backward inside",
        "precision:autocast_inside",
        dtypes=("bf16",),
        tolerance_eps=BF16_EPS,
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
        graph="aot_autograd",
        tested=CONCAT,
    ),
    on_two(
        "two-dtypes",
        "fp32 and bf16 parameters in one module",
        "precision:two_dtypes",
        launches=2,
        tested=COALESCED,
        each_torch=True,
    ),
    on_two(
        "fp64",
        "fp64 parameters",
        "precision:double_precision",
        graph="aot_autograd",
        launches=1,
        tested=COALESCED,
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
