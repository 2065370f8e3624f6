"""What a random training is, as plain values that can be printed and read again."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

Style = Literal["outside", "inside", "loss", "in place", "inner", "part", "backward"]
STYLES: tuple[Style, ...] = get_args(Style)

Pattern = Literal["plain", "joint", "delayed", "twice", "heads", "together", "named"]
PATTERNS: tuple[Pattern, ...] = get_args(Pattern)

Zero = Literal["none", "kept", "never"]
Clip = Literal["no", "norm", "value"]
Optimizer = Literal["sgd", "momentum", "adamw", "foreach"]
Output = Literal["tensor", "tuple", "dict"]
Joined = Literal["serial", "parallel", "turns", "threads"]


@dataclass(frozen=True)
class Part:
    """One model in one DDP module.

    Attributes:
        blocks: names of blocks, in order; dealt out to the heads where these are ``split``.
        residual: whether each block's output is added to its input.
        heads: how many outputs the model has.
        split: whether the heads have no parameter in common.
        output: in what the outputs are returned.
        traits: what is done to the model: see :mod:`fuzzing.models`.
        ddp: options of ``DistributedDataParallel``.
        hook: a communication hook of torch's ``default_hooks``, by name.
        subclass: whether it is a subclass of ``DistributedDataParallel`` with a forward.
    """

    blocks: tuple[str, ...]
    residual: bool = False
    heads: int = 1
    split: bool = False
    output: Output = "tensor"
    traits: tuple[str, ...] = ()
    ddp: dict[str, Any] = field(default_factory=dict)
    hook: str | None = None
    subclass: bool = False


@dataclass(frozen=True)
class Loop:
    """How the training loop is written.

    Attributes:
        style: what is compiled: the model (``outside``), a step with its backward (``inside``), the
            model with its loss, the DDP module by its own ``compile``, the model before it is
            wrapped (``inner``), half of its blocks (``part``), or nothing but the backward.
        pattern: which backwards follow which forwards: see :mod:`fuzzing.training`.
        batches: sizes of the batches of each step, of each rank, of each micro-batch.
        no_sync: whether all micro-batches but the last are under ``no_sync``.
        zero: how gradients are dropped: set to None, to zero, or never.
        clip: gradient clipping.
        scaler: whether a ``GradScaler`` scales the loss.
        autocast: whether forwards run under autocast to bf16.
        evaluates: whether there is an evaluation after each step.
        optimizer: which.
        dynamic: option of ``torch.compile``.
        fullgraph: option of ``torch.compile``.
        kernels: whether Inductor compiles kernels; else it calls ATen's operators, in graphs that
            have been through the same passes, and a case takes a fraction of the time.
    """

    style: Style = "outside"
    pattern: Pattern = "plain"
    batches: tuple[tuple[tuple[int, ...], ...], ...] = (((4,), (4,)), ((4,), (4,)))
    no_sync: bool = False
    zero: Zero = "none"
    clip: Clip = "no"
    scaler: bool = False
    autocast: bool = False
    evaluates: bool = False
    optimizer: Optimizer = "sgd"
    dynamic: bool | None = None
    fullgraph: bool = False
    kernels: bool = True


@dataclass(frozen=True)
class Case:
    """A training.

    Attributes:
        seed: of parameters and data.
        ranks: number of processes.
        parts: models, each in its DDP module.
        joined: one after the other, beside each other, with a step each, in turns, or each in a
            thread of its own, over a group of its own.
        groups: whether each DDP module has a process group of its own.
        flag: a mode, or the options of a ``FusionConfig``.
        loop: how they are trained.
    """

    seed: int
    parts: tuple[Part, ...]
    loop: Loop = Loop()
    ranks: int = 2
    joined: Joined = "serial"
    groups: bool = False
    flag: str | dict[str, Any] = "concat"

    @property
    def steps(self) -> int:
        """How many steps of the optimizer there are."""
        return len(self.loop.batches)


def to_json(case: Case, indent: int | None = None) -> str:
    """Write a case as text."""
    return json.dumps(dataclasses.asdict(case), indent=indent)


def from_json(text: str) -> Case:
    """Read what :func:`to_json` wrote."""
    values = json.loads(text)
    loop, parts = values.pop("loop"), values.pop("parts")
    loop["batches"] = tuple(tuple(tuple(sizes) for sizes in step) for step in loop["batches"])
    for part in parts:
        part["blocks"], part["traits"] = tuple(part["blocks"]), tuple(part["traits"])
    return Case(loop=Loop(**loop), parts=tuple(Part(**part) for part in parts), **values)
