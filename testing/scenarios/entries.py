"""What an entry of the catalogue says. Nothing here imports torch: a list must come at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal

MODES: Final = ("concat", "coalesced")

Becomes = Literal["equal", "equal, unfused", "refused"]


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
        becomes: as eager DDP and fused; as eager DDP, but not all of it fused; an error that names
            the flag, on each rank.
        averages: whether any backward is averaged. Where each is eager DDP's error, or gives no
            gradient of DDP's, there is nothing to fuse.
        by_hand: whether gradients must have the same bits as those of the model compiled in the
            same way, without DDP, that are averaged one by one by hand. It shows that what differs
            from eager DDP by a tolerance is what compiled kernels round otherwise, and nothing
            else.
        warns: a part of each text that each rank warns of.
        launches: collectives of DDP's groups in each backward that averages, once its
            buckets are rebuilt; 0 if that is not said.
        keeps_graph: whether a second backward goes through a compiled forward, with
            ``retain_graph=True``: torch wants ``torch._functorch.config.donated_buffer = False``
            there, with DDP or without.
        leaves_unwaited: whether a backward fails, whose collectives nobody waits for then.
        must_fail: eager DDP has nothing to compare with, and each rank must raise an error, on some
            rank one that names ``ddp_fusion`` and this text. Empty: it is to be trained.
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
    by_hand: bool = False
    becomes: Becomes = "equal"
    averages: bool = True
    warns: tuple[str, ...] = ()
    launches: int = 0
    keeps_graph: bool = False
    leaves_unwaited: bool = False
    must_fail: str = ""
    options: tuple[tuple[str, Any], ...] = ()
    arguments: tuple[tuple[str, Any], ...] = ()
    tested: tuple[str, ...] = ()
    each_torch: bool = False
    newest_torch: bool = False
    fails_on_oldest: str = ""
