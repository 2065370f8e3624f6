"""The effects of the flag in this process, as plain values that can be printed, compared and
stored: the results of ``fusion_passes.report()`` and ``fusion_passes.reports()``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

from fusion_passes.reporting.timeline import BucketTimes, StepTimes, Timeline, write_page

SCHEMA: Final = "fusion_passes.report/7"
"""Name and version of the JSON. A new field does not change the version; a field that is removed,
or changes its meaning, does."""


@dataclass(frozen=True)
class BucketReport:
    """One bucket: gradients that a step reduces with one collective for DDP, and what was done with
    them.

    Attributes:
        module: DDP module, by its number in the order of construction on its process group, and
            class.
        group: name of the process group.
        dtype: dtype of the gradients, as torch names it.
        num_bytes: size of the gradients, in bytes; sparse gradients count with all of their rows.
        sent_bytes: bytes that are sent: fewer than ``num_bytes`` in a smaller dtype; sparse
            gradients count with all of their rows.
        scaling: how the gradients are scaled: a
            :data:`fusion_passes.traced.buckets.ScalingMethod`, ``"hook"`` by a communication
            hook, or ``"rows"`` for sparse gradients, whose rows each rank divides itself.
        parameters: names of the parameters whose gradients the bucket holds, in the order in which
            the gradients lie there.
        copied: (parameter name, reason) of each gradient that a hook or the compiled backward
            copies into the bucket, because the kernel that produces it does not store it there. A
            module's bucket has those of the last step.
        waited: where a traced graph waits for the result, and why there; empty for a module's
            bucket.
        overlapped: number of library kernels (matrix products, convolutions, attention) that run
            between launch and wait in a traced graph; 0 for a module's bucket.
        following: number of library kernels that follow the launch in a traced graph; if it exceeds
            ``overlapped``, a node reads the result before the end. 0 for a module's bucket.
        name: name in profiles and timelines: ``DDP 0 (Net) bucket 3``; empty for a traced graph's
            bucket, which is one of its module's buckets.
        times: when the bucket was on its way in recorded steps, on this rank; ``None`` if no
            recorded step sent it, and for a traced graph's bucket.
    """

    module: str
    group: str
    dtype: str
    num_bytes: int
    sent_bytes: int
    scaling: str
    parameters: tuple[str, ...]
    copied: tuple[tuple[str, str], ...] = ()
    waited: str = ""
    overlapped: int = 0
    following: int = 0
    name: str = ""
    times: BucketTimes | None = None


@dataclass(frozen=True)
class SentParameters:
    """Parameters that owners sent to all ranks after a step of a sharded optimizer.

    Attributes:
        num_bytes: size of the parameters, in bytes.
        took_s: seconds from the end of the step's compute until this rank had waited for the last
            parameter that it received.
        waited_s: for how many of these seconds the host waited; the rest was hidden.
    """

    num_bytes: int
    took_s: float
    waited_s: float


@dataclass(frozen=True)
class ModuleReport:
    """A DDP module whose gradients a reducer averages.

    Attributes:
        name: number in the order of construction on its process group, and class: ``DDP 0 (Net)``.
        group: name of its process group.
        group_size: number of ranks in the process group.
        backend: backend that sends the buckets: ``"gloo"``, ``"nccl"``.
        mode: how a bucket is sent: ``"concat"``, ``"coalesced"``, or ``"hook"`` (by a communication
            hook).
        hook: name of the communication hook; empty if there is none.
        steps: number of steps whose gradients the reducer has averaged.
        gradients: number of gradients that are averaged in a step.
        stored: number of gradients that compiled backwards stored in their buckets in the last
            step, some of them by a copy. The copied gradients, and those that were not stored, are
            listed with the reason in ``copied`` of their bucket.
        decision: why these buckets were chosen, in the mode ``"auto"``; one sentence per item.
        memory: memory of the buckets: ``"plain"``, or how it is registered with NCCL.
        buckets: buckets, in launch order; empty before the first step has ended, because the
            buckets are rebuilt at its end.
        shard_optimizer: whether gradients go to the owners of their parameters alone.
        sent_parameters: with ``shard_optimizer``, the parameters that owners sent after the last
            step whose parameters this rank has waited for; ``None`` before.
    """

    name: str
    group: str
    group_size: int
    backend: str
    mode: str
    hook: str
    steps: int
    gradients: int
    stored: int
    decision: tuple[str, ...]
    memory: str
    buckets: tuple[BucketReport, ...]
    shard_optimizer: bool = False
    sent_parameters: SentParameters | None = None


@dataclass(frozen=True)
class RejectionReport:
    """A collective that was left as it is.

    Attributes:
        collective: name of its node in the graph, and its operator.
        reason: why it was left as it is.
    """

    collective: str
    reason: str


@dataclass(frozen=True)
class FusionReport:
    """The effects of the passes on one graph that compiled autograd traced.

    Attributes:
        mode: how buckets are reduced.
        collectives_before: number of launches in the graph as it was traced, DDP's and others.
        collectives_after: number of launches in the graph as it runs.
        buckets: buckets, in launch order.
        rejections: launches that are not DDP's, in graph order.
        digest: hash that is equal for equal plans, on every rank.
        compiled: number of graphs with this plan that the process has compiled, if this report
            stands for all of them.
    """

    mode: str
    collectives_before: int
    collectives_after: int
    buckets: tuple[BucketReport, ...]
    rejections: tuple[RejectionReport, ...]
    digest: str
    compiled: int = 1


ReducedIn: TypeAlias = Literal["reducer", "compiled_autograd"]


@dataclass(frozen=True)
class BackwardReport:
    """Backwards whose gradients were reduced in the same way.

    Attributes:
        modules: DDP modules, each by its number in the order of construction on its process group,
            and class.
        reduced_in: ``"reducer"``: a reducer reduced the gradients while the backward ran;
            ``"compiled_autograd"``: a graph that compiled autograd traced of the whole backward
            reduced them.
        because: reason why the backward was not traced although that was asked for; otherwise
            empty.
        count: number of these backwards.
        copied: number of gradients that hooks copied into their buckets in each backward: all of
            them in the first backward, and later those that no compiled backward can store there.
    """

    modules: tuple[str, ...]
    reduced_in: ReducedIn
    because: str
    count: int
    copied: int


@dataclass(frozen=True)
class Totals:
    """Sums over all modules, and what was measured.

    Attributes:
        gradients: number of gradients that a step averages in buckets.
        launches: number of buckets that a step launches for them, one collective each.
        num_bytes: size of the gradients in buckets, in bytes.
        sent_bytes: bytes that are sent for them.
        copied_gradients: number of gradients that were copied into their bucket in the last step.
        steps: times of the recorded steps, on this rank; ``None`` if no steps were recorded.
        overlap: share of the network's time that compute hides; ``None`` if no steps were recorded,
            or nothing was sent.
        plain_step_s: seconds of a step before the recording, without a profiler; ``None`` if no
            steps were recorded.
    """

    gradients: int
    launches: int
    num_bytes: int
    sent_bytes: int
    copied_gradients: int
    steps: StepTimes | None
    overlap: float | None
    plain_step_s: float | None


@dataclass(frozen=True)
class Report:
    """The effects of the flag in this process, and what was measured.

    Attributes:
        schema: :data:`SCHEMA`.
        versions: versions of ``fusion_passes``, ``torch`` and ``python``.
        rank: number of this rank; ``None`` without process groups.
        world_size: number of ranks; ``None`` without process groups.
        flag: options that are set now, by name; ``None`` if the flag is off.
        warnings: warnings that the process has issued.
        advice: one line on what is worth trying; empty if there is none.
        modules: DDP modules that exist now and that reducers average, in the order of their
            construction; if none is left, the modules that were freed last.
        graphs: graphs that compiled autograd traced, as ``fusion_passes.reports()`` has them, but
            one per plan, in the order in which the first graph of each plan was compiled.
        backwards: how gradients were reduced, and why in this way.
        totals: sums, and what was measured.
        timeline: steps that were recorded last: of all ranks on rank 0, of this rank on others;
            ``None`` if there are none. Not part of the JSON.
    """

    schema: str
    versions: Mapping[str, str]
    rank: int | None
    world_size: int | None
    flag: Mapping[str, Any] | None
    warnings: tuple[str, ...]
    advice: str
    modules: tuple[ModuleReport, ...]
    graphs: tuple[FusionReport, ...]
    backwards: tuple[BackwardReport, ...]
    totals: Totals
    timeline: Timeline | None = field(repr=False, compare=False)

    def to_json(self, *, indent: int | None = 2) -> str:
        """The report as JSON; ``docs/report.schema.json`` describes it."""
        data = {name: value for name, value in vars(self).items() if name != "timeline"}
        return json.dumps(data, default=asdict, indent=indent)

    def write_timeline(self, path: str | Path) -> None:
        """Write the recorded steps as a page for any browser: one file that loads nothing.

        Raises:
            ValueError: no steps were recorded on this rank.
        """
        if self.timeline is None:
            raise ValueError(
                "A timeline needs steps that were recorded, and there are none on this rank. Call "
                "fusion_passes.record_steps() before them."
            )
        write_page(self.timeline, path)

    def scalars(self) -> dict[str, float]:
        """Numbers to log beside the loss, by names that TensorBoard groups under ``ddp_fusion``.
        Numbers that were not measured are missing."""
        totals = self.totals
        known: dict[str, float | None] = {
            "gradients": totals.gradients,
            "launches": totals.launches,
            "sent_mib": totals.sent_bytes / 2**20,
            "copied_gradients": totals.copied_gradients,
            "overlap": totals.overlap,
            "warnings": len(self.warnings),
        }
        if totals.steps is not None:
            known |= asdict(totals.steps)
        return {f"ddp_fusion/{name}": value for name, value in known.items() if value is not None}
