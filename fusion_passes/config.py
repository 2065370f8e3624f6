"""The flag ``torch._inductor.config.ddp_fusion`` and its options, and the version of the package.

The name of an option contains its unit. The docstring of :class:`FusionConfig` gives the default
of each option and the reason for it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Final, Literal, TypeAlias, get_args

from fusion_passes.torch_private import inductor_config

__version__ = "0.1.0"
"""The version of the package, which setup.py reads as text."""

FusionMode: TypeAlias = Literal["concat", "coalesced", "auto"]
ReduceMode: TypeAlias = Literal["concat", "coalesced"]
FUSION_MODES: Final[tuple[FusionMode, ...]] = get_args(FusionMode)

ScalingOption: TypeAlias = Literal["auto", "collective", "bucket"]
BackwardGraph: TypeAlias = Literal["auto", "aot_autograd", "compiled_autograd"]
ReduceDtype: TypeAlias = Literal["bf16", "fp16"]
MemoryOption: TypeAlias = Literal["plain", "registered"]
ShardOptimizer: TypeAlias = bool | Literal["overlap"]

ENVIRONMENT_VARIABLE: Final = "FUSION_PASSES_DDP_FUSION"
"""The environment variable that sets the default of ``ddp_fusion``: the name of a mode, or "" or
"0" for off."""

OPTION: Final = "torch._inductor.config.ddp_fusion"


@dataclass(frozen=True, kw_only=True)
class FusionConfig:
    """Options of the gradient fusion: a value of ``torch._inductor.config.ddp_fusion``.

    The name of a mode (``ddp_fusion = "concat"``) stands for ``FusionConfig(mode="concat")``.

    Attributes:
        mode: How each bucket is all-reduced. ``"concat"``: one all-reduce of the bucket's flat
            memory, in which its gradients lie back to back. ``"coalesced"``: one
            ``all_reduce_coalesced`` of the list of its gradients. ``"auto"``: as ``"concat"``, but
            the first steps of a run compare several groupings of the gradients, and the fastest is
            kept, for the next run too.
            Default ``"concat"``, torch's own default for ``_fuse_ddp_communication_passes``.
        bucket_cap_mb: Size of a bucket in MiB. The gradient that brings a bucket to this size
            closes it. Small gradients that become ready together with that gradient join the same
            bucket, less than an eighth of this size in total. Default ``None``: the
            ``bucket_cap_mb`` of each DDP module; for a module that was constructed without one, an
            eighth of the size of its gradients, at least 1 and at most DDP's own default of 25.
        first_bucket_cap_mb: The same size for the first bucket of a module, in MiB. A small first
            bucket lets communication start early. Default ``None``: as in DDP, 1 if neither the
            module nor this object sets a ``bucket_cap_mb``, otherwise that ``bucket_cap_mb``.
        scaling: Where gradients are divided by the number of ranks. ``"collective"``: the
            collective averages. ``"bucket"``: one pass over the bucket before the launch. Default
            ``"auto"``: ``"collective"`` over NCCL and Gloo; ``"bucket"`` over other backends, in
            registered memory, and over NCCL for bf16 if the number of ranks is not a power of two.
            A collective never averages fp16. docs/buckets.md gives the reasons and the rounding.
        reduce_dtype: Dtype in which gradients of a wider floating-point dtype are all-reduced:
            ``"bf16"`` or ``"fp16"``. Other gradients, and sparse gradients, are all-reduced in
            their own dtype. Default ``None``: every gradient is all-reduced in its own dtype.
        backward_graph: Which backwards fill the buckets. ``"aot_autograd"``: the backwards that
            AOTAutograd compiles with each forward and keeps in its cache; autograd hooks copy the
            gradients that no such backward stores. ``"compiled_autograd"``: whole backwards, which
            compiled autograd traces again in each process; docs/buckets.md says when that is
            better. Default ``"auto"``: the same as ``"aot_autograd"``.
        memory: Where buckets are allocated. ``"plain"``: in memory that is allocated again in each
            iteration and freed with the last gradient in it. ``"registered"``: in memory that NCCL
            allocates and registers once for all iterations and can send from directly. The next
            averaged backward overwrites it, as with DDP's ``gradient_as_bucket_view=True``. Only
            over NCCL; docs/gpu.md says what changes. Default ``"plain"``, as in DDP.
        shard_optimizer: Whether optimizer state and optimizer compute are divided by the ranks.
            ``True``: one rank owns each parameter. Only there does ``.grad`` hold the average after
            a backward; elsewhere it is ``None``, so optimizers of ``torch.optim`` skip the
            parameter. At the end of each ``optimizer.step()``, owners send their parameters to all
            ranks. ``"overlap"``: the same, but the next forward waits for the parameters instead
            of the step, where it first reads each. docs/sharded_optimizer.md says what changes.
            Default ``False``, as in DDP.

    Raises:
        ValueError: an option has an unknown value, a size is not a finite number greater than 0,
            or two options exclude each other.
    """

    mode: FusionMode = "concat"
    bucket_cap_mb: float | None = None
    first_bucket_cap_mb: float | None = None
    scaling: ScalingOption = "auto"
    reduce_dtype: ReduceDtype | None = None
    backward_graph: BackwardGraph = "auto"
    memory: MemoryOption = "plain"
    shard_optimizer: ShardOptimizer = False

    def __post_init__(self) -> None:
        if self.mode not in FUSION_MODES:
            raise ValueError(_unknown_mode("FusionConfig.mode", self.mode))
        _check_choice("scaling", self.scaling, ScalingOption)
        _check_choice("backward_graph", self.backward_graph, BackwardGraph)
        _check_choice("memory", self.memory, MemoryOption)
        if self.reduce_dtype is not None:
            _check_choice("reduce_dtype", self.reduce_dtype, ReduceDtype)
        if self.memory == "registered":
            self._check_sent_as_it_lies()
        if self.shard_optimizer is not False:
            self._check_sharded()
        for field in fields(self):
            if field.name.endswith("_mb"):
                _check_size(field.name, getattr(self, field.name))

    def _check_sent_as_it_lies(self) -> None:
        """Refuse options with which registered memory would not be all-reduced itself."""
        if self.reduce_dtype is not None:
            raise ValueError(
                "FusionConfig.memory = 'registered' all-reduces the memory of the bucket itself, "
                f"but reduce_dtype = {self.reduce_dtype!r} all-reduces a copy. Set reduce_dtype = "
                "None or memory = 'plain'."
            )
        if self.backward_graph == "compiled_autograd":
            raise ValueError(
                "FusionConfig.memory = 'registered' needs buckets that the reducer allocates, but "
                "with backward_graph = 'compiled_autograd' the graph allocates them. Set "
                "backward_graph = 'auto' or memory = 'plain'."
            )

    def _check_sharded(self) -> None:
        """Refuse options that are not implemented beside ``shard_optimizer``."""
        if self.shard_optimizer is not True and self.shard_optimizer != "overlap":
            raise ValueError(
                "FusionConfig.shard_optimizer must be True, False or 'overlap', but is "
                f"{self.shard_optimizer!r}. Choose one of these."
            )
        needed = {
            "mode": (self.mode, ("concat", "auto")),
            "scaling": (self.scaling, ("auto",)),
            "backward_graph": (self.backward_graph, ("auto", "aot_autograd")),
            "memory": (self.memory, ("plain",)),
        }
        for name, (value, choices) in needed.items():
            if value not in choices:
                raise ValueError(
                    f"FusionConfig.shard_optimizer needs {name} = "
                    f"{' or '.join(map(repr, choices))}, but {name} is {value!r}. Set {name} = "
                    f"{choices[0]!r}, or shard_optimizer = False."
                )

    @property
    def reduces_by(self) -> ReduceMode:
        """The kind of all-reduce that a bucket becomes; ``"auto"`` uses ``"concat"``."""
        return "coalesced" if self.mode == "coalesced" else "concat"

    @property
    def scales_by(self) -> ScalingOption:
        """Where gradients are divided. For registered memory, ``"auto"`` means ``"bucket"``: NCCL
        uses registered memory for sums. Some of its kernels use it for averages too, from NCCL 2.30
        on; before that, none do."""
        is_registered = self.memory == "registered"
        return "bucket" if is_registered and self.scaling == "auto" else self.scaling


def active_config() -> FusionConfig | None:
    """The options that the flag has now, in this thread; ``None`` if fusion is off."""
    return parse_flag(inductor_config.ddp_fusion)


def parse_flag(value: object, option: str = OPTION) -> FusionConfig | None:
    """The options that a value of the flag stands for; ``None`` if fusion is off.

    Raises:
        ValueError: ``value`` is not the name of a mode, a :class:`FusionConfig` or ``None``. The
            message names ``option``, the choices and the value.
    """
    if value is None or isinstance(value, FusionConfig):
        return value
    if isinstance(value, str) and value in FUSION_MODES:
        return _OF_MODE[value]
    raise ValueError(_unknown_mode(option, value))


def parse_environment(text: str | None) -> FusionMode | None:
    """The default of the flag, from the text of the environment variable.

    Raises:
        ValueError: the text is not the name of a mode. The message names the variable and the
            choices.
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


def _check_choice(name: str, value: object, literal: object) -> None:
    choices = get_args(literal)
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
"""The options of each mode, made once: every forward with DDP's own reducer reads the flag."""
