"""The fields of an entry of the catalogue. Nothing here imports torch, so that listing them is
fast."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal

MODES: Final = ("concat", "coalesced")

Becomes = Literal["equal", "equal, unfused"]


@dataclass(frozen=True)
class Scenario:
    """A training, its options and its expected result, in each dtype that it is trained in.

    Attributes:
        parallelism: how the ranks share the work; a word to select by.
        feature: the feature under test; a word to select by. The name is parallelism and feature.
        target: the function that trains, as ``module:function``; its argument is a
            :class:`testing.scenarios.run.Run`.
        ranks: number of processes.
        modes: modes in which it can be trained: those that have its options.
        dtypes: dtypes of the gradients, or of autocast if the target tests autocast.
        tolerance_eps: largest difference of an element from eager DDP, in eps of its dtype and of
            the largest element of its tensor; 0 for bitwise equality.
        becomes: expected kind: equal to eager DDP and fused, or equal to eager DDP and not all of
            it fused.
        averages: whether any backward is averaged. If each backward is an error of eager DDP's, or
            gives no gradient of DDP's, there is nothing to fuse.
        warns: a part of each warning that each rank gives.
        launches: collectives of DDP's groups in each averaged backward after the first one, at
            whose end buckets are rebuilt by one more; 0 if unspecified.
        keeps_graph: whether a second backward runs through a compiled forward with
            ``retain_graph=True``: torch then needs ``torch._functorch.config.donated_buffer =
            False``, with DDP or without.
        leaves_unwaited: whether a backward fails, so that nobody waits for its collectives.
        options: options of ``FusionConfig`` by name, except mode and graph.
        arguments: arguments of the target by name, except the run; mostly fields of
            :class:`testing.scenarios.loop.Loop`.
        tested: modes in which the check trains it, as ``"concat"`` or, in another dtype than the
            first, ``"concat/bf16"``. Nightly jobs train it in all modes and dtypes.
        each_torch: whether the check also trains it on the oldest and the newest torch, in its
            first dtype.
        newest_torch: the same for a costly scenario, which on the oldest torch only nightly jobs
            train.
        fails_on_oldest: the reason why torch 2.11 cannot train it.
    """

    parallelism: str
    feature: str
    target: str
    ranks: int = 2
    modes: tuple[str, ...] = MODES
    dtypes: tuple[str, ...] = ("fp32",)
    tolerance_eps: float = 0.0
    becomes: Becomes = "equal"
    averages: bool = True
    warns: tuple[str, ...] = ()
    launches: int = 0
    keeps_graph: bool = False
    leaves_unwaited: bool = False
    options: tuple[tuple[str, Any], ...] = ()
    arguments: tuple[tuple[str, Any], ...] = ()
    tested: tuple[str, ...] = ()
    each_torch: bool = False
    newest_torch: bool = False
    fails_on_oldest: str = ""
