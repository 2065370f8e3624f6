"""Fused gradient all-reduces for compiled data-parallel training.

Importing the package adds ``ddp_fusion`` to ``torch._inductor.config``::

    import torch
    import fusion_passes

    torch._inductor.config.ddp_fusion = "concat"  # or "coalesced", "auto", or a FusionConfig
    model = torch.nn.parallel.DistributedDataParallel(model)  # after the flag
    step = torch.compile(train_step)  # or torch.compile(model), with the backward outside

``report()`` returns what the package did. ``record_steps()``, called earlier, measures some steps
for the report. ``python -m fusion_passes.explain SCRIPT`` does both for an unchanged script.
"""

from fusion_passes.config import FusionConfig, __version__
from fusion_passes.install.switch import install_flag
from fusion_passes.reducer.rank_errors import RanksDisagreeError
from fusion_passes.reducer.warnings import FusionWarning
from fusion_passes.reporting.graphs import compile_log
from fusion_passes.reporting.recording import Recording, record_steps
from fusion_passes.reporting.records import (
    BucketReport,
    FusionReport,
    ModuleReport,
    RejectionReport,
    Report,
)
from fusion_passes.reporting.report import report
from fusion_passes.reporting.table import format_report
from fusion_passes.reporting.timeline import Timeline
from fusion_passes.sharded.checkpoints import full_optimizer_state_dict

__all__ = [
    "BucketReport",
    "FusionConfig",
    "FusionReport",
    "FusionWarning",
    "ModuleReport",
    "RanksDisagreeError",
    "Recording",
    "RejectionReport",
    "Report",
    "Timeline",
    "__version__",
    "format_report",
    "full_optimizer_state_dict",
    "record_steps",
    "report",
    "reports",
]


def reports() -> tuple[FusionReport, ...]:
    """One report for each graph with gradient reductions that this process has compiled, oldest
    first. These are graphs that compiled autograd has traced.

    Graphs from Inductor's FX graph cache have no report here: with
    ``TORCHINDUCTOR_FORCE_DISABLE_CACHES=1``, all graphs are compiled.
    """
    return compile_log.reports()


install_flag()
