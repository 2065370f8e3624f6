"""Draws a case from its seed: the same one in every process, independent of Python's hash seed.

The models of ``FAMILY`` consecutive seeds are the same, and so are most of their compiled kernels,
because most of a case's time is compilation.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any, get_args

from fusion_passes.config import ScalingOption
from fuzzing.blocks import BLOCKS
from fuzzing.case import Batches, Case, Joined, Loop, Optimizer, Part, Pattern, Style, Zero

FAMILY = 3

STYLE_WEIGHTS: dict[Style, int] = {
    "outside": 8,
    "inside": 6,
    "loss": 2,
    "in place": 1,
    "inner": 2,
    "part": 2,
    "backward": 4,
}
PATTERN_WEIGHTS: dict[Pattern, int] = {
    "plain": 12,
    "joint": 2,
    "delayed": 1,
    "twice": 1,
    "heads": 2,
    "together": 1,
    "named": 1,
}
TRAITS = {
    "frozen": 4,
    "tied": 4,
    "hooked after": 3,
    "other ranks": 4,
    "eval": 1,
    "unused": 1,
    "swapped after": 1,
}
"""Probability of each trait, in percent."""

BREAKING = ("disabled", "graph_break", "read_value", "rnn", "gru", "lstm", "reentrant", "_disabled")
"""Parts of names of blocks that cannot be compiled into one graph."""

HOOKS = ("allreduce_hook", "fp16_compress_hook")
"""Communication hooks; eager DDP refuses the one for bf16 on Gloo."""


def draw(seed: int, *, shard_optimizer: bool = False) -> Case:
    """The case of a seed; or the same models in almost the same loop with the option
    ``shard_optimizer``."""
    models, random = Random(f"models {seed // FAMILY}"), Random(f"loop {seed}")
    parts = tuple(_model(models) for _ in range(_pick(models, {1: 9, 2: 2})))
    parts = tuple(_wrapped(random, part) for part in parts)
    ranks = _pick(random, {2: 12, 3: 1, 4: 1})
    joined: Joined = random.choice(("serial", "parallel", "turns")) if len(parts) > 1 else "serial"
    groups = random.random() < 0.5 and len(parts) > 1
    # Drawn separately, so that seeds keep the cases that they had before there were threads.
    if joined == "turns" and Random(f"threads {seed}").random() < 0.5:
        joined, groups = "threads", True
        # Torch's compressing hooks mistake a compile in any thread for one of their own, and fail.
        parts = tuple(
            replace(part, hook=None) if part.hook == "fp16_compress_hook" else part
            for part in parts
        )
    case = Case(
        seed=seed,
        parts=parts,
        loop=_loop(random, parts, ranks),
        ranks=ranks,
        joined=joined,
        groups=groups,
        flag=_flag(random),
    )
    case = _using_some(case, Random(f"outputs {seed}"))
    case = _averaging(case, Random(f"averages {seed}"))
    return _sharding(case, Random(f"optimizers {seed}")) if shard_optimizer else case


def _sharding(case: Case, random: Random) -> Case:
    """Divide the optimizer by the ranks, without the options that it refuses. Draw any optimizer
    and more clipping, which depend on who has which gradient."""
    options = case.flag if isinstance(case.flag, dict) else {}
    kept = {name: value for name, value in options.items() if name != "scaling"}
    optimizer = random.choice(get_args(Optimizer))
    clip = _pick(random, {"no": 3, "norm": 3, "value": 1})
    if any("ignored" in part.blocks for part in case.parts) and clip == "norm":
        clip = "no"  # Such gradients make the norms, and with DDP the parameters, differ by rank.
    loop = replace(
        case.loop,
        optimizer=optimizer,
        clip=clip,
        scaler=case.loop.scaler or random.random() < 0.1,
    )
    option = random.choice((True, "overlap"))
    return replace(case, flag=kept | {"mode": "concat", "shard_optimizer": option}, loop=loop)


def _using_some(case: Case, random: Random) -> Case:
    """Let the loss skip outputs in some cases with several outputs. ``random`` has a seed of its
    own, as for threads."""
    names = [name for part in case.parts for name in (*part.ddp, *part.traits, *part.blocks)]
    # Eager DDP passes None to hooks for skipped outputs, and the graph of a static one changes.
    is_plain = case.loop.pattern == "plain" and not any(
        word in name for name in names for word in ("hook", "static_graph")
    )
    if max(part.heads for part in case.parts) == 1 or not is_plain or random.random() < 0.7:
        return case
    # Otherwise ranks wait for each other's gradients, with eager DDP too.
    allowing = {"find_unused_parameters": True}
    parts = tuple(replace(part, ddp=part.ddp | allowing) for part in case.parts)
    return replace(case, parts=parts, loop=replace(case.loop, some_outputs=True))


def _averaging(case: Case, random: Random) -> Case:
    """Give models collectives of their own, in some cases whose ranks run equally many forwards and
    backwards. ``random`` has a seed of its own, as for threads."""
    loop = case.loop
    is_even = all(len(set(map(len, ranks))) == 1 for ranks in loop.batches)
    if not is_even or loop.some_outputs or case.joined == "threads" or random.random() < 0.85:
        return case
    parts = tuple(replace(part, traits=(*part.traits, "averages")) for part in case.parts)
    return replace(case, parts=parts)


def _pick(random: Random, weights: dict[Any, int]) -> Any:
    return random.choices(list(weights), list(weights.values()))[0]


def _model(random: Random) -> Part:
    heads = _pick(random, {1: 6, 2: 2, 3: 1})
    names = random.choices(sorted(BLOCKS), k=random.randint(max(1, heads), 4))
    return Part(
        blocks=tuple(names),
        residual=random.random() < 0.5,
        heads=heads,
        split=heads > 1 and random.random() < 0.6,
        output=random.choice(("tuple", "dict")) if heads > 1 else "tensor",
        traits=tuple(name for name, percent in TRAITS.items() if random.random() * 100 < percent),
    )


def _wrapped(random: Random, part: Part) -> Part:
    options: dict[str, Any] = {}
    if random.random() < 0.35:
        options["bucket_cap_mb"] = random.choice((0.0001, 0.001, 0.01, 25))
    for name, percent in (
        ("static_graph", 8),
        ("gradient_as_bucket_view", 10),
        ("find_unused_parameters", 5),
    ):
        if random.random() * 100 < percent:
            options[name] = True
    if random.random() < 0.1:
        options["broadcast_buffers"] = False
    return replace(
        part,
        ddp=options,
        hook=random.choice(HOOKS) if random.random() < 0.08 else None,
        subclass=random.random() < 0.06,
    )


def _flag(random: Random) -> str | dict[str, Any]:
    mode = random.choice(("concat", "coalesced"))
    if random.random() < 0.6:
        return mode
    flag: dict[str, Any] = {"mode": mode}
    for name in ("bucket_cap_mb", "first_bucket_cap_mb"):
        if random.random() < 0.4:
            flag[name] = random.choice((0.0001, 0.0005, 0.002, 0.05, 1.0))
    if random.random() < 0.6:
        flag["scaling"] = random.choice(get_args(ScalingOption))
    if random.random() < 0.2:
        flag["reduce_dtype"] = random.choice(("bf16", "fp16"))
    return flag


def _loop(random: Random, parts: tuple[Part, ...], ranks: int) -> Loop:
    pattern = _pick(random, PATTERN_WEIGHTS)
    if pattern in ("heads", "together") and max(part.heads for part in parts) == 1:
        pattern = "plain"
    style = _pick(random, STYLE_WEIGHTS)
    zero: Zero = _pick(random, {"none": 6, "kept": 2, "never": 2})
    breaks = any(word in name for part in parts for name in part.blocks for word in BREAKING)
    batches = _batches(random, ranks, several=pattern in ("joint", "delayed"))
    return Loop(
        style=style,
        pattern=pattern,
        batches=batches,
        no_sync=random.random() < 0.7,
        zero=zero,
        clip=_pick(random, {"no": 8, "norm": 1, "value": 1}),
        scaler=random.random() < 0.08,
        autocast=random.random() < 0.1,
        evaluates=random.random() < 0.15,
        optimizer=random.choice(("sgd", "momentum", "adamw", "foreach")),
        dynamic=_pick(random, {None: 6, True: 1, False: 1}),
        fullgraph=style in ("outside", "loss") and not breaks and random.random() < 0.15,
        kernels=random.random() < 0.5,
    )


def _batches(random: Random, ranks: int, *, several: bool) -> Batches:
    """Batch sizes that may differ between steps, ranks and micro-batches."""
    steps = _pick(random, {2: 6, 3: 3, 4: 1})
    many = 2 if several else _pick(random, {1: 6, 2: 3, 3: 1})
    # Ranks run equally many synchronized backwards, so numbers of backwards differ under no_sync
    # only.
    uneven = many > 1 and not several and random.random() < 0.4
    kind = _pick(random, {"same": 5, "steps": 2, "all": 3})
    by_step = [random.choice((1, 2, 4)) if kind == "steps" else 4 for _ in range(steps)]
    return tuple(
        tuple(
            tuple(
                random.choice((1, 2, 4)) if kind == "all" else by_step[step]
                for _ in range(random.randint(1, many) if uneven else many)
            )
            for _ in range(ranks)
        )
        for step in range(steps)
    )
