"""What the flag has done in this process, as plain values that can be printed, compared and stored:
what ``fusion_passes.report()`` and ``fusion_passes.reports()`` return."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

from fusion_passes.reporting.timeline import BucketTimes, StepTimes, Timeline, write_page

SCHEMA: Final = "fusion_passes.report/6"
"""Name and version of the JSON. A field that comes makes no new version; one that goes, or means
something else, does."""


@dataclass(frozen=True)
class BucketReport:
    """One bucket: what a step launches for DDP by one collective, and what became of it.

    Attributes:
        module: the DDP module, by number of construction on its group and by class.
        group: name of the process group.
        dtype: of the gradients, as in torch.
        num_bytes: size of the gradients.
        sent_bytes: what is sent: less than ``num_bytes`` in a smaller dtype. Of sparse gradients
            both are those of all rows.
        scaling: how its gradients are scaled: :data:`fusion_passes.traced.scaling.ScalingMethod`,
            or ``"hook"`` by a communication hook, or ``"rows"`` for sparse ones, of which each rank
            divides its rows.
        parameters: names of the parameters whose gradients it holds, in the order in which they
            lie.
        copied: for each gradient that is copied into the bucket, by a hook or by the compiled
            backward, instead of stored there by the kernel that produces it: the parameter's name,
            and why. Of a module's bucket that is so for the last step.
        waited: where in a traced graph the result is waited for, and why there; empty for a
            module's bucket. Likewise the next two.
        overlapped: library kernels (matrix products, convolutions, attention) that run between
            launch and wait.
        following: library kernels that follow the launch: where more than ``overlapped``,
            something in the graph reads the result before the end.
        planned_s: when ``"auto"`` expects the network to begin and to be done with it, in seconds
            from the start of the backward; ``None`` in other modes.
        name: in profiles and timelines: ``DDP 0 (Net) bucket 3``; empty for a traced graph's
            bucket, which is one of its module's. Likewise the next two.
        times: when it was on its way in recorded steps, of this rank; ``None`` where none were
            recorded.
        predicted_s: when ``"auto"`` expected the network to begin and to be done with it, by the
            clock of those steps; ``None`` in other modes.
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
    planned_s: tuple[float, float] | None = None
    name: str = ""
    times: BucketTimes | None = None
    predicted_s: tuple[float, float] | None = None


@dataclass(frozen=True)
class ModuleReport:
    """A DDP module whose gradients a reducer averages.

    Attributes:
        name: by number of construction on its group and by class: ``DDP 0 (Net)``.
        group: name of its process group.
        group_size: ranks of that.
        backend: that sends there: ``"gloo"``, ``"nccl"``.
        mode: how a bucket is sent: ``"concat"``, ``"coalesced"``, or ``"hook"``, by a communication
            hook.
        hook: name of that hook; empty if there is none.
        steps: how many it has averaged.
        gradients: how many are averaged in a step.
        stored: how many of them compiled backwards have stored in their buckets in the last step,
            some by a copy. These and the others are among ``copied`` of their bucket, with the
            reason.
        decision: in the mode ``"auto"``, why these buckets were chosen; one sentence each.
        memory: of its buckets: ``"plain"``, or what NCCL was told of it.
        buckets: in the order of their launches; none before the first step has ended, since they
            are rebuilt there.
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


@dataclass(frozen=True)
class RejectionReport:
    """A collective that was left as it is.

    Attributes:
        collective: its node in the graph, and its operator.
        reason: why it was.
    """

    collective: str
    reason: str


@dataclass(frozen=True)
class FusionReport:
    """What was done to one graph that compiled autograd has traced.

    Attributes:
        mode: how buckets are reduced.
        collectives_before: launches in the graph as it was traced, others than DDP's included.
        collectives_after: launches in the graph as it runs.
        buckets: in the order of their launches.
        rejections: the launches that are not DDP's, in graph order.
        digest: equal for equal plans, on every rank.
        compiled: how many graphs with this plan the process has compiled, where it stands for all
            of them.
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
        modules: the DDP modules, by number of construction on their group and by class.
        reduced_in: ``"reducer"``: by a reducer, while the backward ran; ``"compiled_autograd"``: in
            a graph that compiled autograd has traced from the whole backward.
        because: where the latter was asked for, why it was not traced; else empty.
        count: how many there were.
        copied: how many gradients of each were copied into their buckets, by hooks: all in the
            first backward, and then those that no compiled backward can store there.
    """

    modules: tuple[str, ...]
    reduced_in: ReducedIn
    because: str
    count: int
    copied: int


@dataclass(frozen=True)
class Totals:
    """Sums over what is used, and what was measured.

    Attributes:
        gradients: how many a step has that are averaged in buckets, of all modules.
        launches: how many buckets it launches for them, by one collective each.
        num_bytes: of the gradients in buckets.
        sent_bytes: of what is sent for them.
        copied_gradients: how many gradients were copied into their bucket in the last step.
        steps: times of recorded steps, of this rank; ``None`` where none were recorded.
        overlap: share of the time of the network that is hidden by compute; ``None`` likewise, and
            where nothing was sent.
        plain_step_s: seconds of a step before the recording, without a profiler; ``None`` likewise.
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
    """What the flag has done in this process, and what came of it.

    Attributes:
        schema: :data:`SCHEMA`.
        versions: of ``fusion_passes``, ``torch`` and ``python``.
        rank: this rank; ``None`` without process groups.
        world_size: number of ranks; likewise.
        flag: the options that are set now, by name; ``None`` where the flag is off.
        warnings: what the process has warned of.
        advice: one line on what is worth trying; empty if there is none.
        modules: the DDP modules that are there now and that reducers average, in the order of their
            construction; where none is left, those that were freed last.
        graphs: of compiled autograd, as ``fusion_passes.reports()`` has them, but one for each
            plan, in the order in which the first was compiled.
        backwards: how gradients were reduced, and why so.
        totals: sums, and what was measured.
        timeline: the steps that were recorded last, of all ranks on rank 0; ``None`` if there are
            none. It is no part of the JSON.
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
        """Write the recorded steps as a page that any browser shows: one file that loads nothing.

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
        Those that were not measured are missing."""
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
