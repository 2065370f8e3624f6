"""The flag ``torch._inductor.config.ddp_fusion`` and its options.

Every option says its unit in its name, and its default and where that comes from in the
docstring of :class:`FusionConfig`. Nothing here imports torch: a value can be checked
anywhere, before anything is changed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Final, Literal, TypeAlias, get_args

FusionMode: TypeAlias = Literal["concat", "coalesced", "auto"]
ReduceMode: TypeAlias = Literal["concat", "coalesced"]
FUSION_MODES: Final[tuple[FusionMode, ...]] = get_args(FusionMode)

ScalingOption: TypeAlias = Literal["auto", "collective", "bucket"]
SCALING_OPTIONS: Final[tuple[str, ...]] = get_args(ScalingOption)

BackwardGraph: TypeAlias = Literal["auto", "aot_autograd", "compiled_autograd"]
BACKWARD_GRAPHS: Final[tuple[str, ...]] = get_args(BackwardGraph)

ReduceDtype: TypeAlias = Literal["bf16", "fp16"]
REDUCE_DTYPES: Final[tuple[str, ...]] = get_args(ReduceDtype)

MemoryOption: TypeAlias = Literal["plain", "registered"]
MEMORY_OPTIONS: Final[tuple[str, ...]] = get_args(MemoryOption)

ENVIRONMENT_VARIABLE: Final = "FUSION_PASSES_DDP_FUSION"
"""Gives ``ddp_fusion`` its default: a mode's name, or "" or "0" for off."""

OPTION: Final = "torch._inductor.config.ddp_fusion"


@dataclass(frozen=True, kw_only=True)
class FusionConfig:
    """Options of the fusion, for ``torch._inductor.config.ddp_fusion``.

    A mode's name alone (``ddp_fusion = "concat"``) is ``FusionConfig(mode="concat")``.

    Attributes:
        mode: How a bucket is reduced. ``"concat"``: by one all-reduce of its memory, in which the
            gradients lie one behind the other. ``"coalesced"``: by one ``all_reduce_coalesced`` of
            its gradients. ``"auto"``: as ``"concat"``, in the buckets with which the last
            all-reduce ends earliest, by what an earlier run has measured; the first one fills
            buckets up to caps, and measures. Default ``"concat"``, torch's own default for
            ``_fuse_ddp_communication_passes``.
        bucket_cap_mb: A bucket is closed by the gradient that brings it to this size, and by small
            ones that are ready with it, less than an eighth of it together. MiB.
            Default ``None``: the ``bucket_cap_mb`` that each DDP module was given; where it was
            given none, an eighth of its gradients, at least 1 and at most DDP's own default of 25.
        first_bucket_cap_mb: The same for the first bucket of a module, which is kept small so
            that communication starts early. MiB. Default ``None``: as DDP does, 1 if neither
            the module nor this object sets a ``bucket_cap_mb``, else that cap.
        scaling: Where gradients are divided by the number of ranks. ``"collective"``: the
            collective averages. ``"bucket"``: by one pass over the bucket before the launch.
            Default ``"auto"``: ``"collective"`` on NCCL and Gloo, ``"bucket"`` elsewhere, in
            registered memory, and over NCCL for bf16 where the number of ranks is no power of two;
            fp16 never ``"collective"``. docs/buckets.md says why, and how each rounds.
        reduce_dtype: The dtype in which gradients of a wider floating-point dtype are sent,
            ``"bf16"`` or ``"fp16"``. Gradients of other dtypes are sent as they are. Default
            ``None``: all are.
        backward_graph: Which backwards fill the buckets. ``"aot_autograd"``: those that AOTAutograd
            compiles with each forward and keeps in its cache; hooks bring what none of them stores.
            ``"compiled_autograd"``: whole backwards, which compiled autograd traces again in each
            process; docs/buckets.md says when that is better.
            Default ``"auto"``: as ``"aot_autograd"``.
        memory: Where buckets lie. ``"plain"``: in memory that is allocated anew for each round, and
            freed with the last gradient in it. ``"registered"``: in memory that NCCL has allocated
            and registered, once for all rounds, and can send as it lies; the next averaged backward
            overwrites it, as with DDP's ``gradient_as_bucket_view=True``. Only over NCCL;
            docs/gpu.md says what it changes. Default ``"plain"``, as in DDP.

    Raises:
        ValueError: an unknown choice; a size that is not a finite number greater than 0; options
            that exclude each other.
    """

    mode: FusionMode = "concat"
    bucket_cap_mb: float | None = None
    first_bucket_cap_mb: float | None = None
    scaling: ScalingOption = "auto"
    reduce_dtype: ReduceDtype | None = None
    backward_graph: BackwardGraph = "auto"
    memory: MemoryOption = "plain"

    def __post_init__(self) -> None:
        if self.mode not in FUSION_MODES:
            raise ValueError(_unknown_mode("FusionConfig.mode", self.mode))
        _check_choice("scaling", self.scaling, SCALING_OPTIONS)
        _check_choice("backward_graph", self.backward_graph, BACKWARD_GRAPHS)
        _check_choice("memory", self.memory, MEMORY_OPTIONS)
        if self.reduce_dtype is not None:
            _check_choice("reduce_dtype", self.reduce_dtype, REDUCE_DTYPES)
        if self.memory == "registered":
            self._check_sent_as_it_lies()
        for field in fields(self):
            if field.name.endswith("_mb"):
                _check_size(field.name, getattr(self, field.name))

    def _check_sent_as_it_lies(self) -> None:
        """Refuse options with which something else than the buckets' memory is sent."""
        if self.reduce_dtype is not None:
            raise ValueError(
                "FusionConfig.memory = 'registered' needs gradients that are sent as they lie, and "
                f"reduce_dtype = {self.reduce_dtype!r} sends a copy of them. Set reduce_dtype = "
                "None or memory = 'plain'."
            )
        if self.backward_graph == "compiled_autograd":
            raise ValueError(
                "FusionConfig.memory = 'registered' needs buckets in memory of a reducer, and with "
                "backward_graph = 'compiled_autograd' they are buffers of a graph. Set "
                "backward_graph = 'auto' or memory = 'plain'."
            )

    @property
    def reduces_by(self) -> ReduceMode:
        """How each bucket is reduced."""
        return "coalesced" if self.mode == "coalesced" else "concat"

    @property
    def scales_by(self) -> ScalingOption:
        """Where gradients are divided. NCCL uses registered memory for sums; for averages some of
        its kernels do from 2.30 on, and none before."""
        is_registered = self.memory == "registered"
        return "bucket" if is_registered and self.scaling == "auto" else self.scaling


def parse_flag(value: object, option: str = OPTION) -> FusionConfig | None:
    """The options that a value of the flag stands for; ``None`` where fusion is off.

    Raises:
        ValueError: no mode's name, :class:`FusionConfig` or ``None``; it names the option, the
            choices and the value.
    """
    if value is None or isinstance(value, FusionConfig):
        return value
    if isinstance(value, str) and value in FUSION_MODES:
        return _OF_MODE[value]
    raise ValueError(_unknown_mode(option, value))


def parse_environment(text: str | None) -> FusionMode | None:
    """The flag's default from the environment variable's text.

    Raises:
        ValueError: text that is no mode's name; it names the variable and the choices.
    """
    if text is None or text.strip() in ("", "0"):
        return None
    config = parse_flag(text.strip(), f"environment variable {ENVIRONMENT_VARIABLE}")
    return config.mode if config else None


def _unknown_mode(option: str, value: object) -> str:
    choices = ", ".join(repr(mode) for mode in FUSION_MODES)
    return (
        f"{option} must be one of {choices}, a fusion_passes.FusionConfig, or None (off), "
        f"but is {value!r}. Set one of these."
    )


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(
            f"FusionConfig.{name} must be one of {', '.join(map(repr, choices))}, but is "
            f"{value!r}. Choose one of these."
        )


def _check_size(name: str, value: object) -> None:
    if value is None:
        return
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or value <= 0:  # type: ignore[arg-type, operator]
        raise ValueError(
            f"FusionConfig.{name} must be a finite number of MiB greater than 0, or None for the "
            f"default, but is {value!r}. Give a size in MiB."
        )


_OF_MODE: Final = MappingProxyType({mode: FusionConfig(mode=mode) for mode in FUSION_MODES})
"""The options of each mode: each step asks for them."""
