"""Fused gradient all-reduces for compiled data-parallel training.

Importing the package adds ``ddp_fusion`` to ``torch._inductor.config``::

    import torch
    import fusion_passes

    torch._inductor.config.ddp_fusion = "concat"  # or "coalesced", "auto", or a FusionConfig
    model = torch.nn.parallel.DistributedDataParallel(model)  # after the flag
    step = torch.compile(train_step)  # or torch.compile(model), with the backward outside

``report()`` returns what it did; ``record_steps()`` before that measures what came of it, and
``python -m fusion_passes.explain SCRIPT`` does both around an unchanged script.
"""

from fusion_passes.config import FusionConfig
from fusion_passes.reducer.rank_errors import RanksDisagreeError
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
from fusion_passes.version import __version__
from fusion_passes.warnings import FusionWarning

# isort: split
# The last of all that remembers something: what it has changed in torch is put back first.
from fusion_passes.install.switch import install_flag

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
    "record_steps",
    "report",
    "reports",
]


def reports() -> tuple[FusionReport, ...]:
    """What was done to each graph with gradient reductions that this process has compiled, oldest
    first.

    One from Inductor's FX graph cache is not among them: ``TORCHINDUCTOR_FORCE_DISABLE_CACHES=1``
    has all compiled.
    """
    return compile_log.reports()


install_flag()
