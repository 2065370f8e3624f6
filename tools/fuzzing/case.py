"""A random training as plain values that can be printed, read, and shrunk."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from pydantic import TypeAdapter

Style = Literal["outside", "inside", "loss", "in place", "inner", "part", "backward"]
Pattern = Literal["plain", "joint", "delayed", "twice", "heads", "together", "named"]
Zero = Literal["none", "kept", "never"]
Clip = Literal["no", "norm", "value"]
Optimizer = Literal["sgd", "momentum", "adamw", "foreach", "adagrad", "rmsprop", "fused"]
Output = Literal["tensor", "tuple", "dict"]
Joined = Literal["serial", "parallel", "turns", "threads"]

Batches = tuple[tuple[tuple[int, ...], ...], ...]
"""Batch sizes: for each step, each rank, each micro-batch."""


@dataclass(frozen=True)
class Part:
    """One model in one DDP module.

    Attributes:
        blocks: names of blocks, in order; distributed over the heads if these are ``split``.
        residual: whether each block's output is added to its input.
        heads: number of outputs of the model.
        split: whether the heads share no parameter.
        output: container in which the outputs are returned.
        traits: changes of the model: see :mod:`fuzzing.models`.
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
    """The fields of a training loop.

    Attributes:
        style: what is compiled: the model (``outside``), a step with its backward (``inside``), the
            model with its loss, the DDP module by its own ``compile``, the model before it is
            wrapped (``inner``), half of its blocks (``part``), or only the backward.
        pattern: order of forwards and backwards: see :mod:`fuzzing.training`.
        batches: batch sizes.
        no_sync: whether all micro-batches but the last are under ``no_sync``.
        some_outputs: whether the loss skips an output, a different one in each step and on each
            rank.
        zero: how gradients are cleared: set to None, to zero, or never.
        clip: gradient clipping.
        scaler: whether a ``GradScaler`` scales the loss.
        autocast: whether forwards run under autocast to bf16.
        evaluates: whether there is an evaluation after each step.
        optimizer: name of the optimizer.
        dynamic: option of ``torch.compile``.
        fullgraph: option of ``torch.compile``.
        kernels: whether Inductor compiles kernels. If not, it calls ATen's operators in graphs that
            the same passes have rewritten, and a case takes a fraction of the time.
    """

    style: Style = "outside"
    pattern: Pattern = "plain"
    batches: Batches = (((4,), (4,)), ((4,), (4,)))
    no_sync: bool = False
    some_outputs: bool = False
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
        seed: seed of parameters and data.
        ranks: number of processes.
        parts: models, each in its DDP module.
        joined: how the modules are combined: one after the other, in parallel, with a step each, in
            turns, or each in its own thread over its own group.
        groups: whether each DDP module has a process group of its own.
        flag: a mode, or the options of a ``FusionConfig``.
        loop: the training loop.
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
        """Number of optimizer steps."""
        return len(self.loop.batches)

    @property
    def shards_optimizer(self) -> bool:
        """Whether the option ``shard_optimizer`` is set."""
        return isinstance(self.flag, dict) and self.flag.get("shard_optimizer", False)


def to_json(case: Case, indent: int | None = None) -> str:
    """Write a case as text."""
    return json.dumps(dataclasses.asdict(case), indent=indent)


def from_json(text: str) -> Case:
    """Read what :func:`to_json` wrote."""
    return TypeAdapter(Case).validate_json(text)


def smaller(case: Case) -> Iterator[Case]:
    """Cases that are smaller in one respect, the largest reductions first. Some can equal the case
    itself."""
    if len(case.parts) > 1:
        for part in case.parts:
            yield replace(case, parts=(part,), joined="serial", groups=False)
    if case.ranks > 2:
        batches = tuple(step[:2] for step in case.loop.batches)
        yield replace(case, ranks=2, loop=replace(case.loop, batches=batches))
    for number, part in enumerate(case.parts):
        for less in _smaller_parts(part):
            yield replace(case, parts=(*case.parts[:number], less, *case.parts[number + 1 :]))
    yield from (replace(case, loop=loop) for loop in _smaller_loops(case.loop))
    if isinstance(case.flag, dict):
        yield replace(case, flag=case.flag["mode"])
        for option in sorted(case.flag.keys() - {"mode"}):
            yield replace(case, flag=_without(case.flag, option))
    if case.joined != "serial":
        yield replace(case, joined="serial")
    if case.groups and case.joined != "threads":  # Collectives of two threads mix in one group.
        yield replace(case, groups=False)


def _smaller_parts(part: Part) -> Iterator[Part]:
    for index in range(len(part.blocks)):
        yield replace(part, blocks=part.blocks[:index] + part.blocks[index + 1 :])
    yield from _with_defaults(part, Part(part.blocks))
    for index in range(len(part.traits)):
        yield replace(part, traits=part.traits[:index] + part.traits[index + 1 :])
    for option in part.ddp:
        yield replace(part, ddp=_without(part.ddp, option))
    for index in range(len(part.blocks)):
        yield replace(part, blocks=(*part.blocks[:index], "dense", *part.blocks[index + 1 :]))


def _smaller_loops(loop: Loop) -> Iterator[Loop]:
    for batches in (
        loop.batches[:1],
        loop.batches[:-1] or loop.batches,
        tuple(tuple(sizes[:1] for sizes in step) for step in loop.batches),
        tuple(tuple((4,) * len(sizes) for sizes in step) for step in loop.batches),
    ):
        yield replace(loop, batches=batches)
    yield from _with_defaults(loop, Loop(batches=loop.batches))


def _with_defaults(value: Any, plain: Any) -> Iterator[Any]:
    """The value with one field set as in ``plain``, for each field that differs."""
    for item in dataclasses.fields(value):
        default = getattr(plain, item.name)
        if getattr(value, item.name) != default:
            yield replace(value, **{item.name: default})


def _without(options: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in options.items() if key != name}
