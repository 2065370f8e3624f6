"""Which gradients of an iteration were copied into their buckets, and why no compiled backward
stored them there."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from fusion_passes.layout.layout import Kinds, ParameterNumber

FIRST: Final = "this was the first averaged backward, at whose end the buckets are rebuilt"
NOT_COMPILED: Final = "the forward that reads the parameter is not compiled"
SEVERAL: Final = (
    "several graph nodes contribute to this gradient, so autograd sums it outside the compiled "
    'backward; backward_graph="compiled_autograd" can store it'
)
HOOKED: Final = "a hook of yours on the parameter must see this gradient first"
NODE_HOOKED: Final = "a hook of yours on the parameter's autograd node must see this gradient first"
HOOKS_UNKNOWN: Final = (
    "the hooks on the parameter's autograd node are not known: something has replaced "
    "torch.autograd.function._HookMixin._register_hook"
)
CREATES_GRAPH: Final = "the backward was called with create_graph=True"
ANOMALY: Final = "torch.autograd.detect_anomaly checks each gradient of this rank"
SOME_INPUTS: Final = "the backward was called with inputs="
SHARED: Final = "several DistributedDataParallel modules average it"
BESIDE: Final = "it is written in one piece with a gradient that has to be copied"
OTHER_PIECES: Final = (
    "this graph was compiled before the buckets were rebuilt, and groups gradients differently: it "
    "is stored after a recompile"
)
RENUMBERED: Final = (
    "its compiled backward returns a gradient of another size at this input: AOTAutograd numbered "
    "the inputs differently than Dynamo"
)
CONVERTED: Final = "the parameter had another dtype when DistributedDataParallel was constructed"
UNALIGNED: Final = "its offset in the bucket is not aligned as generated code requires"
COMPLEX: Final = (
    "it is complex and does not begin its bucket: Inductor does not lower views of complex "
    "tensors, and would return the start of the bucket"
)
SPARSE: Final = "it is sparse: its rows are all-reduced by themselves"
DELAYED: Final = "delay_all_reduce_named_params delays its all-reduce to the end of the backward"
INNER: Final = "it comes from a nested backward, for example reentrant checkpointing"
UNSEEN: Final = (
    "its backward was not started by torch.autograd.backward, or something has replaced "
    "torch.autograd.graph._engine_run_backward"
)
UNUSED: Final = "the parameter is unused on this rank in this iteration"
NOT_STORED: Final = (
    "its compiled backward does not store it: its size is symbolic, its shape or dtype differs "
    "from the parameter's, Inductor did not compile it, or it was compiled before "
    "DistributedDataParallel was constructed"
)


@dataclass
class Copies:
    """How the gradients of one iteration came into their buckets, by parameter number. It holds
    neither gradients nor a graph, so it outlives the iteration.

    Attributes:
        stored: numbers of the parameters whose gradients a compiled backward stored.
        reached: for each backward of the iteration, the parameters that it reaches, each with the
            reason why no graph may store its gradient; empty if one may.
        refused: by number, why a graph got no bucket memory for a gradient that it could store.
        unused: numbers of the parameters that get no gradient.
        in_graphs: for each store of a compiled backward that may copy gradients to their places,
            their numbers and a reason for each, joined by ``|``; empty if it does not copy.
        is_first: whether the buckets were not rebuilt yet.
        is_unseen: whether the package was not called when the backward began.
    """

    stored: set[ParameterNumber] = field(default_factory=set)
    reached: list[Mapping[ParameterNumber, str]] = field(default_factory=list)
    refused: dict[ParameterNumber, str] = field(default_factory=dict)
    unused: Collection[ParameterNumber] = ()
    in_graphs: list[tuple[Sequence[ParameterNumber], str]] = field(default_factory=list)
    is_first: bool = False
    is_unseen: bool = False

    def note_no_memory(self, numbers: Iterable[ParameterNumber], why: str) -> None:
        """Note why a graph gets no bucket memory for these gradients."""
        self.refused.update(dict.fromkeys(numbers, why))

    def reasons(self, kinds: Kinds) -> dict[ParameterNumber, str]:
        """The reason why each copied gradient was copied, by parameter number."""
        in_graph: dict[ParameterNumber, str] = {}
        for copied, reasons in self.in_graphs:
            in_graph |= zip(copied, reasons.split("|"), strict=True)
        reached: dict[ParameterNumber, str] = {}
        for numbers in self.reached:
            reached |= {number: why for number, why in numbers.items() if not reached.get(number)}

        def why(number: ParameterNumber) -> str:
            if number in self.stored:
                return in_graph.get(number, "")
            if kinds[number].is_sparse or kinds[number].is_delayed:
                return SPARSE if kinds[number].is_sparse else DELAYED
            if self.is_first:
                return FIRST
            if number in self.unused:
                return UNUSED
            if number not in reached:
                return UNSEEN if self.is_unseen else INNER
            return reached[number] or self.refused.get(number, NOT_STORED)

        found = {number: why(number) for number in kinds}
        return {number: reason for number, reason in found.items() if reason}
