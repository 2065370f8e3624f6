"""The names of buckets in a profile.

Under a profiler, the name that fused graphs have for a module's group stands for one that says
which bucket it launches (:class:`fusion_passes.torch_private.profiling.NamedGroup`). Otherwise it
stands for the group itself, so that a step without a profiler runs what it always does.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from fusion_passes.agreement.launches import Collective
from fusion_passes.agreement.protocol import LaunchCounter, participants
from fusion_passes.ddp.modules import registry
from fusion_passes.reporting.records import RowsReport
from fusion_passes.state import Lifetime, process_state
from fusion_passes.torch_private import register_process_group, unregister_process_group
from fusion_passes.torch_private.profiling import NamedGroup, has_named_group, is_profiling


class _Launches:
    """The launches of a module, as they come.

    Args:
        module: the module's name for its group.
    """

    def __init__(self, module: str) -> None:
        self._counter = LaunchCounter(module)

    def next_name(self) -> str:
        """The bucket that is launched next: ``DDP 0 (Net) bucket 3``, counted in the round."""
        module, number = self._counter.module, self._counter.next()
        now = participants[module]
        before = now.agreed[: max(now.position - 1, 0)]
        return _name(module, number + sum(len(item.buckets) for item in before))


class BucketNames:
    """Which modules' buckets have names in a profile now."""

    def __init__(self) -> None:
        self._named: dict[str, NamedGroup] = {}

    def follow_profiler(self) -> None:
        """Give the buckets names if this thread is profiled, and take them away if it is not.
        Called before each backward."""
        if is_profiling():
            for ddp in registry.modules():
                name = registry.module_of(ddp).group_name
                if not participants[name].is_local and not has_named_group(name):
                    group = NamedGroup(registry.group_of(ddp), _Launches(name).next_name)
                    self._named[name] = group  # torch's table of names does not keep it.
                    unregister_process_group(name)
                    register_process_group(name, group)
        elif self._named:
            self.reset()

    def reset(self) -> None:
        """Take all names away."""
        for name in self._named:
            if name in participants and not participants[name].is_local:
                registry.rejoin(name)
        self._named.clear()


def named_buckets() -> dict[str, tuple[str, ...]]:
    """The parameters of each bucket that the ranks have agreed on, by the bucket's name in a
    profile."""
    found: dict[str, tuple[str, ...]] = {}
    for ddp in registry.modules():
        module = registry.module_of(ddp)
        for name, _, item in launched_buckets(module.group_name):
            found[name] = tuple(module.sent[index] for index in item.parameters)
    return found


def launched_buckets(module: str) -> Iterator[tuple[str, str, Collective]]:
    """The name, the mode and the collective of each bucket of a module that the ranks have agreed
    on, in the order of their launches.

    Args:
        module: the module's name for its group.
    """
    lists = participants[module].history.get("", [])
    items = [(launches.mode, item) for launches in lists for item in launches.buckets]
    for number, (mode, item) in enumerate(items):
        yield _name(module, number), mode, item


def named_rows() -> tuple[RowsReport, ...]:
    """The sparse gradients that the ranks average as rows, for each module that has any."""
    modules = [registry.module_of(ddp) for ddp in registry.modules()]
    return tuple(
        RowsReport(
            rows_name(module.group_name),
            module.label,
            module.process_group,
            tuple(module.parameters[number] for number in sorted(module.sparse)),
        )
        for module in modules
        if module.sparse
    )


def rows_name(module: str) -> str:
    """``DDP 0 (Net) rows``: what gathers the rows of a module's sparse gradients."""
    return f"{_label(module)} rows"


def _name(module: str, number: int) -> str:
    """``DDP 0 (Net) bucket 3``."""
    return f"{_label(module)} bucket {number}"


def _label(module: str) -> str:
    """``DDP 0 (Net)``, with the group where modules of several have that label."""
    mine = registry.module(module)
    labels = [registry.module_of(ddp).label for ddp in registry.modules()]
    group = f" on group {mine.process_group}" if labels.count(mine.label) > 1 else ""
    return f"{mine.label}{group}"


bucket_names: Final = process_state.keep(
    BucketNames(),
    "the process groups that name buckets, while a profiler records",
    Lifetime.PROCESS,
    reset=BucketNames.reset,
)
