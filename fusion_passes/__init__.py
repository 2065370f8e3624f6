"""Fused gradient all-reduces for compiled data-parallel training.

Importing the package adds ``ddp_fusion`` to ``torch._inductor.config``::

    import torch
    import fusion_passes

    torch._inductor.config.ddp_fusion = "concat"  # or "coalesced", or a FusionConfig
    model = torch.nn.parallel.DistributedDataParallel(model)  # after the flag
    step = torch.compile(train_step)  # or torch.compile(model), with the backward outside

``reports()`` returns what it did.
"""

from fusion_passes.agreement.rendezvous import RanksDisagreeError
from fusion_passes.config import FusionConfig
from fusion_passes.install.switch import install_flag
from fusion_passes.report.journal import journal
from fusion_passes.report.records import BucketReport, FusionReport, RejectionReport
from fusion_passes.report.table import format_report
from fusion_passes.report.warnings import FusionWarning
from fusion_passes.version import __version__

__all__ = [
    "BucketReport",
    "FusionConfig",
    "FusionReport",
    "FusionWarning",
    "RanksDisagreeError",
    "RejectionReport",
    "__version__",
    "format_report",
    "reports",
]


def reports() -> tuple[FusionReport, ...]:
    """What was done to each compiled graph with gradient reductions in this process, oldest first.

    A graph that came from Inductor's FX graph cache is there too, marked ``from_cache``.
    """
    return journal.reports()


install_flag()
