"""Which parameters an iteration uses: all of them, those that the walk finds
(``find_unused_parameters=True``), or those of the first iteration (``static_graph=True``)."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
from torch import Tensor

from fusion_passes.layout.layout import ParameterNumber
from fusion_passes.reducer.averaged_module import AveragedModule
from fusion_passes.reducer.communication import Wait, nothing
from fusion_passes.reducer.errors import changed_graph
from fusion_passes.reducer.parameters import Parameters
from fusion_passes.torch_private.process_groups import begin_all_reduce


class AllUsed:
    """Every iteration uses all parameters, which is what DDP expects by default.

    Attributes:
        is_found: whether the parameters that each iteration uses have to be found.
        launches_after_backward: whether all buckets are launched after the backward of this
            iteration.
    """

    is_found = False

    @property
    def launches_after_backward(self) -> bool:
        return False

    def begin(self, reached: Collection[ParameterNumber]) -> set[ParameterNumber]:
        """Begin an iteration. Return the parameters that get no gradient in it, as far as this rank
        knows. ``reached``: the parameters that its first backward reaches."""
        del reached
        return set()

    def note(self, numbers: Iterable[ParameterNumber]) -> None:
        """Record that this rank has used these parameters."""

    def count(self, number: ParameterNumber, *, is_first: bool) -> bool:
        """Count an accumulation of a gradient; return whether it is the last one of the iteration.
        ``is_first``: whether it is the first one."""
        del number, is_first
        return True

    def count_stored(self, numbers: Iterable[ParameterNumber]) -> None:
        """Count gradients that a graph has stored, each of which is accumulated once."""

    def is_accumulated_once(self, number: ParameterNumber) -> bool:
        """Whether a gradient is accumulated once in an iteration, as far as is known."""
        del number
        return True

    def launch(self) -> None:
        """Launch the all-reduce of the used-parameter map behind the last bucket, if ranks may have
        used other parameters."""

    def on_any_rank(self) -> set[ParameterNumber] | None:
        """Wait for the used-parameter map, and return the parameters that some rank has used;
        ``None`` if all parameters are used."""
        return None

    def end(self) -> None:
        """End the iteration."""


def used_parameters(module: AveragedModule, parameters: Parameters) -> AllUsed:
    """Which parameters the iterations of a module use, by what DDP was constructed with."""
    if module.ddp.static_graph:
        return StaticGraph(parameters, module)
    return FoundUnused(parameters, module) if module.ddp.find_unused_parameters else AllUsed()


class _Map(AllUsed):
    """Reduces a map of the used parameters over the ranks, ``[number of trained parameters]``."""

    def __init__(self, parameters: Parameters, module: AveragedModule) -> None:
        self._parameters = parameters
        self._module = module
        self._used: set[ParameterNumber] = set()
        self._launched: tuple[Tensor, Wait] | None = None

    def note(self, numbers: Iterable[ParameterNumber]) -> None:
        self._used.update(numbers)

    def launch(self) -> None:
        # As in DDP, which gives delayed parameters zeros at least.
        used_here = self._used | self._parameters.delayed
        values = [int(number in used_here) for number in self._parameters.kinds]
        device = next(iter(self._parameters.kinds.values())).device
        counts = torch.tensor(values, dtype=torch.int32, device=device)
        wait: Wait = nothing
        group = self._module.group
        if group.size() > 1:
            wait = begin_all_reduce(group, counts, torch.distributed.ReduceOp.SUM)
        self._launched = counts, wait

    def _read(self) -> set[ParameterNumber]:
        assert self._launched is not None, "it is launched behind the last bucket"
        pairs = zip(self._parameters.kinds, self._launched[0].tolist(), strict=True)
        return {number for number, count in pairs if count}

    def end(self) -> None:
        self._used.clear()
        self._launched = None


class FoundUnused(_Map):
    """The walk finds the parameters that an iteration does not use, and each iteration reduces a
    map of the used ones. A backward under ``no_sync`` counts too."""

    is_found = True

    def begin(self, reached: Collection[ParameterNumber]) -> set[ParameterNumber]:
        # Also those of outputs that the loss does not use: eager DDP's sink behind all outputs
        # marks them ready in the first backward.
        return set(self._parameters.numbers.difference(reached))

    def on_any_rank(self) -> set[ParameterNumber] | None:
        if self._launched is None:
            return None
        self._launched[1]()
        # Reading the map makes the host wait for the device.
        if len(self._used | self._parameters.delayed) == len(self._parameters.numbers):
            return None
        return self._read()


class StaticGraph(_Map):
    """The first iteration counts how often each gradient is accumulated, and reduces the map of the
    used parameters once. Later iterations must use the same ones as often.

    Raises:
        RefusedGradientError: a parameter is accumulated more often than in the first iteration.
    """

    def __init__(self, parameters: Parameters, module: AveragedModule) -> None:
        super().__init__(parameters, module)
        self._now: dict[ParameterNumber, int] = {}
        self._counts: dict[ParameterNumber, int] | None = None
        self._on_any_rank: set[ParameterNumber] | None = None

    @property
    def launches_after_backward(self) -> bool:
        return self._counts is None

    def begin(self, reached: Collection[ParameterNumber]) -> set[ParameterNumber]:
        del reached
        self._now.clear()
        if self._counts is None:
            return set()
        return set(self._parameters.numbers - self._counts.keys())

    def count(self, number: ParameterNumber, *, is_first: bool) -> bool:
        times = self._now[number] = self._now.get(number, 0) + 1
        if self._counts is None:
            return is_first
        expected = self._counts.get(number, 0)
        if times > expected:
            label = self._module.label
            text = changed_graph(self._parameters, label, number, times, expected)
            self._module.refuse(text)
        return times == expected

    def count_stored(self, numbers: Iterable[ParameterNumber]) -> None:
        for number in numbers:
            self.count(number, is_first=True)

    def is_accumulated_once(self, number: ParameterNumber) -> bool:
        """The walk does not see reentrant checkpointing; the first iteration has counted it."""
        return self._counts is None or self._counts.get(number) == 1

    def keep_counts(self) -> None:
        """Keep the numbers of accumulations, at the end of the first backward."""
        self._counts = dict(self._now)

    def launch(self) -> None:
        if self._on_any_rank is None:
            super().launch()

    def on_any_rank(self) -> set[ParameterNumber] | None:
        if self._launched is not None:
            self._launched[1]()
            self._on_any_rank = self._read()
        return self._on_any_rank
