"""Whether NCCL takes two ranks on one GPU, where those that are timed will run."""

from __future__ import annotations

from bench_steps.processes import RowProcesses
from bench_steps.rows import Row
from gpu_checks import results
from gpu_checks.net import place_of
from gpu_checks.shaped import best_network
from gpu_checks.sites import Note, Site
from workloads.ways import PLAIN

ANSWER_S = 20.0


def all_reduce(site: Site, note: Note) -> None:
    """Average over two ranks, and sum.

    Raises:
        RowFailed: a result is wrong; or NCCL's own error.
    """
    with best_network() as network:
        ranks = RowProcesses(Row("way", PLAIN), place_of(site, "tiny_gpt", network))
        try:
            ranks.ask("add_up", timeout_s=ANSWER_S)
        finally:
            ranks.kill()
    note(results.Row("two ranks on one GPU", words=f"{site.backend} reduces them"))
