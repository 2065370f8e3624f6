"""Refuses settings of torch that contradict the flag."""

from __future__ import annotations

from fusion_passes.config import FusionConfig
from fusion_passes.flag import FLAG
from fusion_passes.torch_private import inductor_config
from fusion_passes.torch_private.dynamo import dynamo_config
from fusion_passes.torch_private.inductor import torch_fuses_ddp


def check_conflicts() -> None:
    """Refuse settings that would undo or repeat what the passes do.

    Raises:
        ValueError: it names the setting, its value and the remedy.
    """
    overlap = inductor_config.aten_distributed_optimizations
    settings = {
        "bucket_all_reduces_fx": (inductor_config.bucket_all_reduces_fx, "none"),
        "aten_distributed_optimizations.enable_overlap_scheduling": (
            overlap.enable_overlap_scheduling,
            False,
        ),
        "_fuse_ddp_communication": (torch_fuses_ddp(), False),
    }
    for name, (value, needed) in settings.items():
        if value != needed:
            raise ValueError(
                f"torch._inductor.config.{name} = {value!r} cannot be combined with ddp_fusion: "
                "both would fuse and place the same gradient all-reduces. Set it to "
                f"{needed!r}, or set ddp_fusion = None."
            )


def check_reducer_mode() -> None:
    """Refuse a reducer that the fusion cannot use.

    Raises:
        ValueError: as :func:`check_conflicts`.
    """
    mode = dynamo_config().optimize_ddp
    if mode not in (True, "python_reducer"):
        raise ValueError(
            f"torch._dynamo.config.optimize_ddp = {mode!r} contradicts "
            f"torch._inductor.config.ddp_fusion = {getattr(inductor_config, FLAG)!r}: the fusion "
            "needs DDP's Python reducer, which it switches on itself. Leave optimize_ddp at its "
            "default, or set ddp_fusion = None."
        )


def check_tracing(config: FusionConfig) -> None:
    """Refuse to trace the backwards of a module with a reducer, whose calls no graph can hold.

    Raises:
        ValueError: as :func:`check_conflicts`.
    """
    if config.backward_graph == "aot_autograd" and dynamo_config().compiled_autograd:
        raise ValueError(
            "torch._dynamo.config.compiled_autograd = True cannot be combined with "
            "FusionConfig.backward_graph = 'aot_autograd': compiled autograd cannot trace what a "
            "reducer does. Set it to False, or leave backward_graph out."
        )
