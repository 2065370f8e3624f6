"""What an entry of the catalogue says. Nothing here imports torch: a list must come at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal

MODES: Final = ("concat", "coalesced")

Becomes = Literal["equal", "equal, unfused"]


@dataclass(frozen=True)
class Scenario:
    """What is trained, how, and what must come of it, in each dtype that it is trained in.

    Attributes:
        parallelism: how the ranks share the work; a word for selections.
        feature: what is tried; a word for selections, and with the parallelism its name.
        target: the function that trains, as ``module:function``; it takes a
            :class:`testing.scenarios.run.Run`.
        ranks: processes.
        modes: in which it is trained: those that have its options.
        dtypes: of the gradients, or of autocast where the target is about that.
        tolerance_eps: what an element may differ by from eager DDP, in eps of its dtype and
            of the largest element of its tensor; 0 for the same bits.
        becomes: as eager DDP and fused; as eager DDP, but not all of it fused.
        averages: whether any backward is averaged. Where each is eager DDP's error, or gives no
            gradient of DDP's, there is nothing to fuse.
        warns: a part of each text that each rank warns of.
        launches: collectives of DDP's groups in each backward that averages, behind the first one,
            at whose end buckets are rebuilt by one more; 0 if that is not said.
        keeps_graph: whether a second backward goes through a compiled forward, with
            ``retain_graph=True``: torch wants ``torch._functorch.config.donated_buffer = False``
            there, with DDP or without.
        leaves_unwaited: whether a backward fails, whose collectives nobody waits for then.
        options: of ``FusionConfig``, by name, beside mode and graph.
        arguments: of the target, by name, beside the run; mostly fields of
            :class:`testing.scenarios.loop.Loop`.
        tested: in which modes a check trains it, as ``"concat"`` or, in another dtype than the
            first, ``"concat/bf16"``. Nightly jobs train it in all modes and dtypes.
        each_torch: whether a check trains it on the oldest and the newest torch too, in its first
            dtype.
        newest_torch: as that, but costly, and left to nightly jobs on the oldest.
        fails_on_oldest: why torch 2.11 cannot train it.
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
