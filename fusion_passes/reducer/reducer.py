"""Averages the gradients of a DDP module in buckets, as DDP's C++ reducer does. A gradient reaches
its bucket through a hook on its autograd node, or a compiled backward stores it there.

The words are DDP's. A gradient is *marked ready* (``mark_variable_ready``) once it lies in its
bucket. A bucket is *launched* (``all_reduce_bucket``) once it is full and all earlier buckets are
launched. A round, which DDP calls an iteration, is *finalized* (``finalize_backward``) once all
buckets are launched. As in DDP, the first round fills buckets in the reverse order of the
parameters. At the end of that round, which all ranks reach, the buckets are *rebuilt* in the order
in which rank 0 received the gradients. From then on the layout is fixed, and compiled backwards
store into the buckets. In the mode ``"auto"``, an earlier run may have measured the layout, which
is then fixed when the module is constructed. Each rank may run its own graphs.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import torch
from torch import Tensor, nn

from fusion_passes.config import FusionConfig
from fusion_passes.layout.caps import BucketCaps
from fusion_passes.layout.layout import (
    Bucket,
    GradientKind,
    Layout,
    Piece,
    decode,
    encode,
    lay_out,
    plan_layout,
)
from fusion_passes.reducer.communication import (
    AllReduce,
    Communication,
    Wait,
    average_sparse,
    nothing,
)
from fusion_passes.reducer.copies import (
    CONVERTED,
    ELSEWHERE,
    HOOKED,
    NODE_HOOKED,
    UNALIGNED,
    Copies,
)
from fusion_passes.reducer.memory import RegisteredBuckets
from fusion_passes.reducer.rank_errors import FailureNotes
from fusion_passes.torch_private.autograd import (
    accumulates_plainly,
    after_backward,
    backward_id,
    hook_behind_accumulation,
    sequence_number,
    tensor_in,
)
from fusion_passes.torch_private.ddp import raise_as_ddp
from fusion_passes.torch_private.process_groups import begin_all_reduce, broadcast_first
from fusion_passes.torch_private.profiling import is_profiling, named_in_profile

# Attributes of a managed module: its reducer; whether the reducer averages the next gradients;
# whether the last forward ran under ``no_sync``; and the error that the next forward raises because
# a backward left parameters without a gradient, or ``None``.
REDUCER: Final = "_ddp_fusion_reducer"
EXPECTED: Final = "_ddp_fusion_expected"
LOCAL: Final = "_ddp_fusion_local"
UNFINISHED: Final = "_ddp_fusion_unfinished"

FORGOTTEN: Final = (
    "This DistributedDataParallel module was constructed before fusion_passes was reset, which has "
    "forgotten it, and with it how its gradients are reduced. Construct it anew."
)

_ALIGNED_BYTES: Final = 16
"""The alignment that generated code assumes for the memory that an operator returns. A graph that
is compiled for a fixed layout assumes more: :data:`fusion_passes.layout.layout.ALIGNMENT` elements.
"""


class RefusedGradientError(RuntimeError):
    """This rank received a gradient that DDP does not allow. DDP's reducer raises a
    RuntimeError."""


@dataclass(frozen=True)
class Parameters:
    """The parameters of a module.

    Attributes:
        all: the parameters, in DDP's order, which gives each its number.
        names: the name of each parameter.
        strides: the dense strides in which the gradient of each parameter is sent.
        kinds: the kind of each parameter that requires a gradient, by number.
    """

    all: Sequence[nn.Parameter]
    names: Sequence[str]
    strides: Sequence[tuple[int, ...]]
    kinds: Mapping[int, GradientKind]


class Clock(Protocol):
    """Measures in some rounds when gradients are marked ready; ``ReadyClock`` implements it."""

    is_running: bool

    def begin_round(self) -> None: ...

    def note_ready(self, numbers: Sequence[int]) -> None: ...

    def end_round(self) -> bool: ...


@dataclass
class Round:
    """The state of one iteration: from the first backward after a forward that is averaged to the
    last gradient that the reducer expects. Parameters are given by number.

    Attributes:
        pending: how many gradients each bucket still lacks, by bucket index.
        memory: the memory of each bucket that has been allocated, by bucket index.
        waits: the functions that wait for the launched buckets, in launch order.
        received: parameters whose gradient was received.
        unused: parameters that get no gradient in this round, as far as this rank knows.
        existing: the ``.grad`` that a parameter had before the backward.
        awaiting_hook: parameters that a graph marked ready and whose hook has not run yet.
        accumulated_apart: parameters whose ``.grad`` does not alias the bucket yet (sums over
            several graphs, copied gradients); the bucket view replaces it.
        sparse: the gradients of the sparse buckets.
        sends_used: whether the ranks reduce the used-parameter map.
        used: the used-parameter map, ``[number of trained parameters]``, and the function that
            waits for its all-reduce; ``None`` before the last bucket is launched.
        counts: with a static graph, how often each gradient was accumulated.
        copies: how each gradient reached its bucket.
        marked_unused: whether the unused parameters have been marked ready.
        streams: the stream that marked a gradient ready last, by accelerator.
    """

    pending: list[int] = field(default_factory=list)
    memory: dict[int, Tensor] = field(default_factory=dict)
    waits: list[Wait] = field(default_factory=list)
    received: set[int] = field(default_factory=set)
    unused: set[int] = field(default_factory=set)
    existing: dict[int, Tensor] = field(default_factory=dict)
    awaiting_hook: set[int] = field(default_factory=set)
    accumulated_apart: set[int] = field(default_factory=set)
    sparse: dict[int, Tensor] = field(default_factory=dict)
    sends_used: bool = False
    used: tuple[Tensor, Wait] | None = None
    counts: dict[int, int] = field(default_factory=dict)
    copies: Copies = field(default_factory=Copies)
    marked_unused: bool = False
    streams: dict[torch.device, torch.Stream] = field(default_factory=dict)


@dataclass
class ForwardOutputs:
    """The outputs of one forward.

    Attributes:
        numbers: the sequence numbers of their autograd nodes, which are unique in a thread.
        thread: the thread of the forward.
        is_spent: whether a backward without ``retain_graph`` reached one of them.
    """

    numbers: frozenset[int]
    thread: int
    is_spent: bool = False


class Reducer:
    """Averages the gradients of one DDP module. The module has its attributes :data:`EXPECTED` and
    :data:`UNFINISHED` before its reducer is made.

    Attributes:
        label: the name of the module in messages, the same on all ranks.
        name: the name in reports and profiles: the label, and the process group if modules on
            other groups have the same label.
        caps: the caps of the buckets.
        piece_caps: the caps of the pieces that a graph stores together if it is compiled before the
            layout is fixed.
        has_rebuilt_buckets: whether the layout is fixed, so that compiled backwards store into it.
        follows, leads: the previous and the next module in the launch order of the modules that
            share this process group in this backward.
        backward: the backward that the module takes part in; ``None`` between backwards.
        launches_at_end: whether all buckets are launched at the end of the backward, because the
            walk did not find the module and other modules share its process group.
        stays_local: whether a gradient stayed on this rank since the last backward ended.
        entered: the output indices by which compiled forwards were differentiated with
            ``retain_graph=True`` since the last forward, by autograd node.
        nodes: the AccumulateGrad node of each parameter, by number. A node keeps its hooks only as
            long as somebody keeps the node.
        hooks: the handles of the hooks on these nodes.
        callbacks: the functions that these hooks call, by number.
        rounded: parameters whose gradient was of a wider dtype than its bucket in the last round,
            and was rounded.
        when_freed: the finalizer of the module; ``None`` if there is none.
        steps: how many rounds have ended.
        steps_told: how many of them the report has counted.
        on_unseen: called when a gradient arrives and no known backward reaches the module.
        why_hooked: returns why an AccumulateGrad node, by number, has hooks of others, or may have
            some; the empty string if it has none.
        copies: how the gradients of the last round reached their buckets.
        registered: the buckets' memory that NCCL has registered; ``None`` if each round allocates
            memory of its own, which is freed with the last gradient in it.
        why_untraced: why compiled autograd no longer traces backwards of this module; empty if it
            may.
        clock: in the mode ``"auto"``, measures when gradients are marked ready, if no earlier run
            has measured it.
        decision: in the mode ``"auto"``, how the buckets were chosen and what is expected of them,
            one sentence each.
        predicted: the expected start and end of each bucket's all-reduce, in nanoseconds from the
            start of the backward, by bucket index. Empty if nothing is predicted.
    """

    def __init__(
        self,
        ddp: Any,
        parameters: Parameters,
        *,
        group: Any,
        label: str,
        config: FusionConfig,
        caps: BucketCaps,
        communication: Communication,
    ) -> None:
        self.parameters = parameters
        self.group = group
        self.label = label
        self.config = config
        self.caps = self.piece_caps = caps
        self.communication = communication
        is_registered = config.memory == "registered"
        self.registered = RegisteredBuckets(group, label) if is_registered else None
        self.find_unused: bool = ddp.find_unused_parameters
        self.is_static = bool(ddp.static_graph)
        # DDP's own first order is that of the parameters, in reverse.
        self.layout = plan_layout(
            [(number,) for number in reversed(list(parameters.kinds))], parameters.kinds, caps
        )
        self.has_rebuilt_buckets = False
        self.follows: Reducer | None = None
        self.leads: Reducer | None = None
        self.backward: object = None
        self.launches_at_end = False
        self.stays_local = False
        self.entered: weakref.WeakKeyDictionary[Any, set[int]] = weakref.WeakKeyDictionary()
        self.nodes: dict[int, Any] = {}
        self.hooks: list[Any] = []
        self.callbacks: dict[int, Callable[..., None]] = {}
        self.rounded: set[int] = set()
        self.when_freed: weakref.finalize[..., Any] | None = None
        self.steps = self.steps_told = 0
        self.on_unseen: Callable[[Reducer], None] = lambda _: None
        self.why_hooked: Callable[[Reducer, int], str] = lambda _, __: NODE_HOOKED
        self.copies = Copies()
        self.name = label
        self.why_untraced = ""
        self.clock: Clock | None = None
        self.decision: tuple[str, ...] = ()
        self.predicted: Mapping[int, tuple[int, int]] = {}
        self.failures = FailureNotes(group, label)
        self._ddp = weakref.ref(ddp)
        self._round: Round | None = None
        self._observed: list[Piece] = []
        self._used: set[int] = set()
        self._outputs: list[ForwardOutputs] = []
        self._static_counts: dict[int, int] | None = None
        self._static_used: set[int] | None = None
        self._delayed = {n for n, kind in parameters.kinds.items() if kind.is_delayed}
        self._is_forgotten = False
        # As in DDP: autograd has a thread for each accelerator.
        self._lock = threading.RLock()
        devices = {kind.device for kind in parameters.kinds.values()}
        self._accelerators = [device for device in devices if device.type != "cpu"]

    def __reduce__(self) -> Any:
        """Copy and pickle as ``None``: a copy of the module gets a reducer of its own."""
        return type(None), ()

    # --- The module's state ----------------------------------------------------------------------

    @property
    def ddp(self) -> Any:
        """The module; ``None`` once it is freed."""
        return self._ddp()

    @property
    def is_expecting(self) -> bool:
        """Whether the next gradients are averaged."""
        ddp = self._ddp()
        return ddp is not None and getattr(ddp, EXPECTED)

    def expect_more(self, entries: Mapping[Any, Collection[int]]) -> bool:
        """Expect another reduction if a backward differentiates the same compiled forwards as an
        earlier one, but only by other outputs; return whether it does.

        ``entries`` has the output indices by autograd node. Eager DDP has not received the
        gradients of these outputs yet. The earlier backward of the compiled forward gave zeros for
        them, so averaging ``.grad`` once more gives the right result."""
        ddp = self._ddp()
        if ddp is None or not entries:
            return False
        for node, outputs in entries.items():
            known = self.entered.get(node)
            if known is None or not known.isdisjoint(outputs):
                return False
        setattr(ddp, EXPECTED, True)
        return True

    def note_outputs(self, nodes: Iterable[Any]) -> None:
        """Record the autograd nodes of the outputs of a forward; only with
        ``find_unused_parameters=True``."""
        if self.has_spent_outputs:
            self._outputs.clear()
        numbers = frozenset(map(sequence_number, nodes))
        self._outputs.append(ForwardOutputs(numbers, threading.get_ident()))

    @property
    def has_spent_outputs(self) -> bool:
        """Whether a backward without ``retain_graph`` reached outputs of the last forward."""
        return any(outputs.is_spent for outputs in self._outputs)

    def spend_outputs(self, nodes: Iterable[Any], *, keeps_graph: bool) -> None:
        """Record that a backward reaches these nodes.

        Raises:
            RefusedGradientError: the backward reaches outputs that an earlier backward without
                ``retain_graph`` reached. In eager DDP all outputs of a forward share one autograd
                node, so that the first backward reaches, and frees, the graph of all outputs.
        """
        if not self._outputs:
            return
        thread, numbers = threading.get_ident(), set(map(sequence_number, nodes))
        for outputs in self._outputs:
            if outputs.thread != thread or outputs.numbers.isdisjoint(numbers):
                continue
            if outputs.is_spent:
                self._refuse_second()
            outputs.is_spent = not keeps_graph

    @property
    def reduces_at_end(self) -> bool:
        """Whether all buckets are reduced after the backward: the first iteration of a static graph
        counts how often each gradient is accumulated."""
        return self.is_static and self._static_counts is None

    def is_accumulated_once(self, number: int) -> bool:
        """Whether a gradient is accumulated once in a round, as far as is known. The walk does not
        see reentrant checkpointing, but the first iteration of a static graph has counted; a
        delayed gradient may be accumulated several times."""
        is_once = self._static_counts is None or self._static_counts.get(number) == 1
        return is_once and number not in self._delayed

    @property
    def gives_memory(self) -> bool:
        """Whether compiled backwards store into the buckets now."""
        return self.has_rebuilt_buckets and not self.reduces_at_end and self.is_expecting

    @property
    def numbers(self) -> Collection[int]:
        """The numbers of the parameters that require a gradient."""
        return self.parameters.kinds.keys()

    @property
    def num_stored(self) -> int:
        """How many gradients of the last round compiled backwards have stored in their buckets."""
        return len(self.copies.stored)

    @property
    def num_copied(self) -> int:
        """How many gradients of the last round no graph has stored in their bucket."""
        return len(self.numbers) - self.num_stored

    def why_copied(self) -> Mapping[int, str]:
        """Why gradients of the last round were copied into their buckets, by number: a hook copied
        them, or the graph that stored them did. Empty before the first round has ended."""
        return self.copies.reasons(self.parameters.kinds) if self.steps else {}

    def bucket_name(self, index: int) -> str:
        """A bucket in reports and profiles: ``DDP 0 (Net) bucket 3``."""
        return f"{self.name} bucket {index}"

    @property
    def hooked_buckets(self) -> list[int]:
        """The indices of the buckets that a communication hook is called with."""
        return [b.index for b in self.layout.buckets if b.numel and not b.is_sparse]

    @property
    def has_launched_all(self) -> bool:
        """Whether no bucket of the round is left."""
        now = self._round
        return now is None or len(now.waits) == len(self.layout.buckets)

    def forget(self) -> None:
        """Refuse further training of the module, because no backward would be averaged any more."""
        self._is_forgotten = True
        self.release_memory()
        if self.ddp is not None:
            setattr(self.ddp, UNFINISHED, FORGOTTEN)

    def hook_behind(self, number: int, callback: Callable[..., None]) -> None:
        """Have autograd call a function when it has accumulated a gradient. A parameter that is
        converted to another dtype gets another node, without hooks: this is called once more."""
        parameter = self.parameters.all[number]
        self.nodes[number], handle = hook_behind_accumulation(parameter, callback)
        self.hooks.append(handle)
        self.callbacks[number] = callback

    # --- A backward ------------------------------------------------------------------------------

    def begin_backward(self, reached: Mapping[int, str]) -> None:
        """Prepare for a backward before the engine runs.

        Args:
            reached: the parameters that the autograd graph reaches, by number, each with the reason
                why no compiled backward may store its gradient; empty if one may.
        """
        now = self._round or self._begin_round(reached)
        now.copies.reached.append(reached)
        for number in self.numbers:
            if number not in now.received:
                self._note_existing(now, number)

    def _note_existing(self, now: Round, number: int) -> None:
        gradient = self.parameters.all[number].grad
        if gradient is not None:
            now.existing[number] = gradient
        else:  # It may have been there before an earlier backward of the round.
            now.existing.pop(number, None)

    def _begin_round(self, reached: Collection[int]) -> Round:
        now = self._round = Round([len(bucket.numbers) for bucket in self.layout.buckets])
        now.copies.is_first = not self.has_rebuilt_buckets
        if self.is_static and self._static_counts is not None:
            now.unused = set(self.numbers) - self._static_counts.keys()
        elif self.find_unused and not self.is_static:
            now.sends_used = True
            # Also those of outputs that the loss does not use: eager DDP's sink behind all outputs
            # marks them ready in the first backward.
            now.unused = set(self.numbers).difference(reached)
        if self.clock is not None:
            self.clock.begin_round()
        return now

    def _mark_unused(self, now: Round) -> None:
        """Mark the unused parameters ready, with zeros or their existing ``.grad``. As in DDP, this
        happens when the first gradient of the round is marked ready. It must not happen earlier,
        because a backward may launch collectives of its own before its first gradient."""
        if now.marked_unused:
            return
        now.marked_unused = True
        for number in sorted(now.unused - now.received - self._delayed):
            self._copy_in(now, number)
            self._mark_ready(now, (number,))

    def memory_for_graph(
        self, numbers: Piece, offsets: Sequence[int], numel: int, dtype: torch.dtype
    ) -> Tensor | None:
        """Return the part of a bucket, ``[numel]``, in which a graph stores the gradients of these
        parameters, each at its offset in elements.

        Returns ``None`` if the layout places the gradients differently, if the bucket has another
        dtype (the module was converted), if the gradients are not averaged, or if the part is not
        aligned as generated code assumes."""
        if not self.gives_memory or self._round is None:
            return None
        places = self.layout.places
        index, first = places[numbers[0]]
        start = first - offsets[0]
        bucket = self.layout.buckets[index]
        lies_so = start >= 0 and all(
            places[n] == (index, start + offset) for n, offset in zip(numbers, offsets, strict=True)
        )
        if bucket.dtype != dtype:
            self._round.copies.refuse(numbers, CONVERTED)
            return None
        if not lies_so or start * dtype.itemsize % _ALIGNED_BYTES:
            self._round.copies.refuse(numbers, UNALIGNED if lies_so else ELSEWHERE)
            return None
        with self._lock:
            memory = self._memory_of(self._round, bucket)
            self.join_streams()  # The graph may store on another stream than it was allocated on.
        return memory[start : start + numel]

    def mark_stored(
        self,
        numbers: Piece,
        *,
        is_sum: bool = False,
        stored_apart: Sequence[Tensor] | None = None,
        copied: Sequence[int] = (),
        why: str = "",
    ) -> None:
        """Mark gradients ready that a graph has stored in the memory that it was given.

        Args:
            numbers: the parameters.
            is_sum: whether other graphs contributed to these gradients; the sum is stored already.
            stored_apart: the gradients, ``[numel]`` each, if the graph was given memory of its own;
                they are copied into the bucket.
            copied: those of the numbers whose gradient the graph may have copied to its place.
            why: the reasons for these copies, joined by ``|``; an empty one if the gradient was not
                copied.
        """
        now = self._round
        assert now is not None, "it was given memory in this round"
        if copied:
            now.copies.in_graphs.append((copied, why))
        with self._lock:
            self._refuse_repeated(now, numbers)
            if self.find_unused or self.is_static:
                self._used.update(numbers)
            if self.is_static:
                for number in numbers:
                    self._count_accumulation(now, number)
            if stored_apart is None:
                now.copies.stored.update(numbers)
            else:
                self._copy_flat(now, numbers, stored_apart)
            if is_sum or stored_apart is not None:
                now.accumulated_apart.update(numbers)
            for number in numbers:
                self._note_existing(now, number)  # A hook may have changed it meanwhile.
            existing = [number for number in numbers if number in now.existing]
            if existing:  # The all-reduce averages the existing gradients too.
                places = [self._place(now, number) for number in existing]
                torch._foreach_add_(places, [now.existing[n].detach() for n in existing])
            now.received.update(numbers)
            now.awaiting_hook.update(numbers)
            self._mark_ready(now, numbers)

    def _copy_flat(self, now: Round, numbers: Piece, gradients: Sequence[Tensor]) -> None:
        places = []
        for number in numbers:
            index, offset = self.layout.places[number]
            memory = self._memory_of(now, self.layout.buckets[index])
            places.append(memory[offset : offset + self.parameters.kinds[number].numel])
            self._note_rounded(number, gradients[0].dtype)
        with torch.no_grad():
            torch._foreach_copy_(places, list(gradients))

    def _note_rounded(self, number: int, dtype: torch.dtype) -> None:
        sent_as = self.parameters.kinds[number].dtype
        if dtype != sent_as and torch.promote_types(dtype, sent_as) != sent_as:
            self.rounded.add(number)

    def note_no_memory(self, numbers: Collection[int], why: str) -> None:
        """Record why a graph gets no memory of a bucket for these gradients."""
        if self._round is not None:
            self._round.copies.refuse(numbers, why)

    def observe(self, numbers: Piece) -> None:
        """Record, in the first round, that these gradients arrived next, and together."""
        if not self.has_rebuilt_buckets and self.is_expecting and self._round is not None:
            known = {n for piece in self._observed for n in piece}
            if known.isdisjoint(numbers):
                self._observed.append(tuple(numbers))

    def accumulated(self, number: int, *, is_defined: bool = True) -> None:
        """Handle a gradient that autograd has accumulated in ``.grad``; a hook on the
        AccumulateGrad node calls this. The gradient is undefined (``is_defined``) if a compiled
        forward has the parameter as an input and does not use it."""
        if self._is_forgotten:
            raise RefusedGradientError(FORGOTTEN)
        if is_defined and (self.find_unused or self.is_static):
            self._used.add(number)
        if not self.is_expecting:
            ddp = self._ddp()
            if ddp is not None and ddp.require_backward_grad_sync and not getattr(ddp, LOCAL):
                self.stays_local = True
            return
        now = self._round
        if now is not None and number in now.awaiting_hook:  # A graph has stored it.
            now.awaiting_hook.discard(number)
            self._refuse_late_hook(number)
            if number in now.accumulated_apart:
                self._replace_new(now, number)
            return
        with self._lock:
            if self.backward is None:
                self.on_unseen(self)
            now = self._round
            if now is None:
                now = self._begin_round(self.numbers)
                # Which gradients are new, nobody has seen: none is exchanged for a view.
                for each in self.numbers:
                    self._note_existing(now, each)
            self._add_accumulated(now, number)

    def _add_accumulated(self, now: Round, number: int) -> None:
        if number in self._delayed:
            now.received.add(number)
            return
        if self.is_static and not self._count_accumulation(now, number):
            return
        self._refuse_repeated(now, (number,))
        now.received.add(number)
        self.observe((number,))
        if self.reduces_at_end:
            return
        self.join_streams()
        self._copy_in(now, number)
        self._mark_ready(now, (number,))

    def end_backward(self) -> None:
        """Finalize after the engine has run, if all gradients were received, and rebuild the
        buckets after the first round."""
        self.follows = self.leads = None
        self.launches_at_end = False
        now = self._round
        if now is not None:
            now.awaiting_hook.clear()
            if self.reduces_at_end:
                self._end_first_static(now)
            else:
                self._mark_delayed(now)
                self.launch_ready()
        if now is not None and now is self._round:
            if self.has_launched_all:
                self.finalize()
            else:
                self._leave_unfinished(now)
        self.rebuild_after_first()

    def end_unseen_backward(self) -> None:
        """As :meth:`end_backward`, for a backward that was not walked: parameters whose gradient
        was not received are unused."""
        now = self._round
        if now is not None:
            now.copies.is_unseen = True
            if now.sends_used:
                now.unused, now.marked_unused = self._missing(now), False
                self._mark_unused(now)
        self.end_backward()

    def _mark_delayed(self, now: Round) -> None:
        """Mark the delayed gradients ready once all others of the round are: with the gradient that
        the backward has accumulated, in one or several parts, or with zeros."""
        if not self._missing(now):
            for number in self._delayed:
                self._copy_in(now, number)
                self._mark_ready(now, (number,))

    def _missing(self, now: Round) -> set[int]:
        return set(self.numbers) - now.received - now.unused - self._delayed

    @property
    def has_begun(self) -> bool:
        """Whether a gradient of the round was received."""
        now = self._round  # Another thread may end the round meanwhile.
        return now is not None and bool(now.received)

    def end_traced_backward(self) -> None:
        """End the round after the engine has run a traced graph, which has averaged all gradients
        of the module."""
        self.follows = self.leads = None
        if self._round is not None:
            self._round.copies.stored = set(self.numbers)
        self._end_round()

    def fail_backward(self, error: BaseException, *, has_begun: bool = False) -> None:
        """Clean up after the engine has raised an error. If gradients were received, or if a traced
        graph may have launched buckets (``has_begun``), the next forward raises eager DDP's error.
        Raises no error itself."""
        self.follows = self.leads = None
        self.launches_at_end = False
        now = self._round
        if now is not None:
            now.awaiting_hook.clear()
            self.failures.leave(self.steps, f"{type(error).__name__}: {error}")
            self._leave_failed(now, has_begun=has_begun)

    # --- Buckets ---------------------------------------------------------------------------------

    def _memory_of(self, now: Round, bucket: Bucket) -> Tensor:
        memory = now.memory.get(bucket.index)
        if memory is None:
            memory = self.registered.of(bucket) if self.registered is not None else None
            if memory is None:
                memory = torch.empty(bucket.numel, dtype=bucket.dtype, device=bucket.device)
            else:  # Gradients of earlier rounds, which accumulate further, may lie there.
                self._move_out(bucket, memory)
            now.memory[bucket.index] = memory
        return memory

    def release_memory(self) -> None:
        """Give up the registered memory: no bucket is launched any more."""
        if self.registered is not None:
            self.registered.release()

    def _move_out(self, bucket: Bucket, memory: Tensor) -> None:
        """Move gradients out of a bucket's memory, into memory of their own."""
        for parameter in self._in_bucket(bucket, memory):
            assert parameter.grad is not None, "it lies there"
            parameter.grad.data = parameter.grad.clone()

    def _in_bucket(self, bucket: Bucket, memory: Tensor) -> Iterator[nn.Parameter]:
        """The parameters whose gradients lie in a bucket's memory."""
        addresses = range(memory.data_ptr(), memory.data_ptr() + memory.nbytes)
        for number in bucket.numbers:
            parameter = self.parameters.all[number]
            gradient = parameter.grad
            if gradient is None or type(gradient) is not Tensor:
                continue
            if gradient.layout is torch.strided and gradient.data_ptr() in addresses:
                yield parameter

    def _place(self, now: Round, number: int) -> Tensor:
        """The place of a gradient in its bucket, in the parameter's shape. Autograd does not see it
        as a view: ``.grad.detach_()``, which programs call before ``.grad.zero_()``, fails on a
        view."""
        index, offset = self.layout.places[number]
        memory = self._memory_of(now, self.layout.buckets[index])
        shape, strides = self.parameters.all[number].shape, self.parameters.strides[number]
        return tensor_in(memory, shape, strides, offset)

    def _copy_in(self, now: Round, number: int) -> None:
        """Copy ``.grad`` into the bucket. If the gradient is new in this round, ``.grad`` then
        becomes the bucket view, which frees the memory of the copy's source."""
        parameter = self.parameters.all[number]
        gradient = parameter.grad
        if self.parameters.kinds[number].is_sparse:
            if gradient is not None:
                now.sparse[number] = gradient
            return
        with torch.no_grad():
            place = self._place(now, number)
            if gradient is None:
                place.zero_()
                return
            if gradient.layout is not torch.strided:
                raise_as_ddp(
                    self.ddp,
                    RefusedGradientError,
                    f"{self.parameters.names[number]} of {self.label} has a gradient of layout "
                    f"{gradient.layout}, which DDP reduces for nn.Embedding(sparse=True) and "
                    "nn.EmbeddingBag(sparse=True) only, as they were when it was constructed.",
                )
            self._note_rounded(number, gradient.dtype)
            place.copy_(gradient)
        # What hooks behind this one read is of this rank: it stays where it is.
        if not self.why_hooked(self, number):
            self._replace_new(now, number)

    def _replace_new(self, now: Round, number: int) -> None:
        """Let ``.grad`` be the bucket view, if the gradient is new in this round. It is left alone
        if its strides differ from those of the bucket view, because the parameter's strides changed
        after DDP was constructed: an optimizer may iterate over both by address."""
        parameter = self.parameters.all[number]
        gradient = parameter.grad
        is_plain = (
            type(gradient) is Tensor
            and not gradient.requires_grad
            and gradient.dtype == self.parameters.kinds[number].dtype
            and _same_strides(gradient, self.parameters.strides[number])
        )
        if is_plain and number not in now.existing:
            parameter.grad = self._place(now, number)

    def _mark_ready(self, now: Round, numbers: Piece) -> None:
        if self.clock is not None:
            self.clock.note_ready(numbers)
        self._mark_unused(now)
        for number in numbers:
            now.pending[self.layout.places[number][0]] -= 1
        self.launch_ready()

    def launch_ready(self) -> None:
        """Launch the buckets that are full and whose predecessors are launched, in order."""
        with self._lock:
            now, layout = self._round, self.layout
            if now is None:
                return
            self.join_streams()
            if self.launches_at_end:
                return
            if self.follows is not None and not self.follows.has_launched_all:
                return
            if self.clock is not None and self.clock.is_running and any(now.pending):
                return  # What is sent meanwhile would take from the compute that is measured.
            before = len(now.waits)
            while len(now.waits) < len(layout.buckets) and not now.pending[len(now.waits)]:
                now.waits.append(self._launch(now, layout.buckets[len(now.waits)]))
            if not before < len(now.waits) == len(layout.buckets):
                return
            self._launch_used(now)
            if backward_id() >= 0:
                # Before those that follow: two modules may have the same weights, and the first
                # still reads the local gradients.
                after_backward(self._finalize_in_backward)
            if self.leads is not None:
                self.leads.launch_ready()

    def join_streams(self) -> None:
        """Have the current stream wait for the streams that stored gradients in this round.
        Autograd runs a node on the stream of its forward, so gradients of one bucket may come from
        several streams. The callback that finalizes runs on the stream that called the backward."""
        with self._lock:
            now = self._round
            if now is None:
                return
            for device in self._accelerators:
                current, last = torch.accelerator.current_stream(device), now.streams.get(device)
                now.streams[device] = current
                if last is None or last == current:
                    continue
                current.wait_stream(last)
                for memory in now.memory.values():
                    if memory.device == device:
                        memory.record_stream(current)

    def _launch(self, now: Round, bucket: Bucket) -> Wait:
        """Launch the all-reduce of a bucket. In a profile it has the bucket's name."""
        name = self.bucket_name(bucket.index) if is_profiling() else ""
        if bucket.is_sparse:
            return self._launch_sparse(now, bucket.numbers[0], name)
        if not bucket.numel:
            return lambda: None
        memory = self._memory_of(now, bucket)
        with torch.no_grad():
            wait = self.communication.launch(bucket, memory, name)
        return named_in_profile(wait, f"{name} wait") if name else wait

    def _launch_sparse(self, now: Round, number: int, name: str) -> Wait:
        parameter = self.parameters.all[number]
        gradient = now.sparse.get(number)
        if gradient is None:
            size = tuple(parameter.shape)
            indices = torch.empty((1, 0), dtype=torch.int64, device=parameter.device)
            values = torch.empty((0, *size[1:]), dtype=parameter.dtype, device=parameter.device)
            gradient = torch.sparse_coo_tensor(indices, values, size)
        assert isinstance(self.communication, AllReduce), "no hook is given sparse gradients"
        divisor = self.communication.divisor()
        with torch.no_grad():
            now.sparse[number] = average_sparse(self.group, gradient.detach(), divisor, name)
        return lambda: None

    # --- The first round -------------------------------------------------------------------------

    def _end_first_static(self, now: Round) -> None:
        """Launch all buckets after the first iteration of a static graph, which has counted how
        often each gradient is accumulated."""
        self._static_counts = dict(now.counts)
        now.sends_used = self._static_used is None
        now.pending = [0] * len(self.layout.buckets)
        for bucket in self.layout.buckets:
            for number in bucket.numbers:
                self._copy_in(now, number)
            now.waits.append(self._launch(now, bucket))
        self._launch_used(now)
        now.unused.update(self._missing(now))

    def rebuild_after_first(self) -> None:
        """Rebuild the buckets if the first round has ended. Here and not in :meth:`finalize`:
        modules that share a group come here in one order on all ranks."""
        if self.steps and not self.has_rebuilt_buckets:
            self.rebuild_buckets()

    def rebuild_buckets(self) -> None:
        """Agree on the layout: rank 0 lays the buckets out by the order in which it has seen
        gradients come, and broadcasts them as they are. All ranks call this."""
        seen = {number for piece in self._observed for number in piece}
        rest = [(number,) for number in reversed(list(self.numbers)) if number not in seen]
        kinds = self.parameters.kinds
        layout = plan_layout([*self._observed, *rest], kinds, self.caps)
        if self.group.size() > 1:
            numbers = encode(bucket.numbers for bucket in layout.buckets)
            device = next(iter(kinds.values())).device
            sent = torch.tensor(numbers, dtype=torch.int64, device=device)
            broadcast_first(self.group, sent)
            layout = lay_out([[numbers] for numbers in decode(sent.tolist())], kinds)
        self.fix_layout(layout)
        self._observed.clear()

    def fix_layout(self, layout: Layout) -> None:
        """Fix the layout, which is the same on all ranks."""
        if self.registered is not None:
            self.registered.prepare(layout)
        self.layout = layout
        self.has_rebuilt_buckets = True

    # --- Its end ---------------------------------------------------------------------------------

    def _finalize_in_backward(self) -> None:
        """Finalize at the end of the backward, before callbacks that the user queued later."""
        now = self._round
        if now is not None and not now.awaiting_hook and self.has_launched_all:
            self.finalize()

    def finalize(self) -> None:
        """Wait for all buckets, and leave the averages in ``.grad``."""
        now, layout = self._round, self.layout
        assert now is not None, "a round ends"
        self.join_streams()
        with torch.no_grad():
            used = self._used_anywhere(now)
            for bucket, wait in zip(layout.buckets, now.waits, strict=True):
                wait()
                self._give_back(now, bucket, used)
        self._end_round()

    def _launch_used(self, now: Round) -> None:
        """Launch the all-reduce of the used-parameter map behind the last bucket, as DDP does: all
        gradients of this rank are there, and no bucket of another module comes in between."""
        if not now.sends_used:
            return
        used_here = self._used | self._delayed  # As in DDP, which gives these zeros at least.
        values = [int(number in used_here) for number in self.numbers]
        device = next(iter(self.parameters.kinds.values())).device
        counts = torch.tensor(values, dtype=torch.int32, device=device)
        wait: Wait = nothing
        if self.group.size() > 1:
            wait = begin_all_reduce(self.group, counts, torch.distributed.ReduceOp.SUM)
        now.used = counts, wait

    def _used_anywhere(self, now: Round) -> set[int] | None:
        """Numbers of the parameters that some rank has used; ``None`` where all are. A backward
        under ``no_sync`` counts too. The map is read, for which the host waits for the device, only
        where this rank has not used all parameters."""
        if now.used is None:
            return self._static_used
        counts, wait = now.used
        wait()
        if not self.is_static and len(self._used | self._delayed) == len(self.numbers):
            return None
        pairs = zip(self.numbers, counts.tolist(), strict=True)
        used = {number for number, count in pairs if count}
        if self.is_static:
            self._static_used = used
        return used

    def _give_back(self, now: Round, bucket: Bucket, used: set[int] | None) -> None:
        """Leave ``.grad`` as eager DDP does. A new gradient aliases the bucket already: autograd
        kept the view that the graph returned, or :meth:`_replace_new` set it. The average is copied
        into a ``.grad`` that existed before the backward. If this rank has no gradient, ``.grad``
        becomes the bucket view. Parameters that no rank used keep their ``.grad``."""
        memory = now.memory.get(bucket.index)
        gradients, averages = [], []
        for number, offset in zip(bucket.numbers, bucket.offsets, strict=True):
            if used is not None and number not in used:
                continue
            parameter = self.parameters.all[number]
            if bucket.is_sparse:
                parameter.grad = now.sparse[number]
                continue
            gradient = parameter.grad
            if memory is None:  # It is empty.
                continue
            if gradient is None:
                parameter.grad = self._place(now, number)
            elif gradient.data_ptr() != memory.data_ptr() + offset * memory.itemsize:
                gradients.append(gradient)
                averages.append(self._place(now, number))
        if gradients:
            torch._foreach_copy_(gradients, averages)

    def _end_round(self) -> None:
        if self._round is not None:
            self.copies = self._round.copies
            self.copies.unused = self._round.unused
        if self.clock is not None and self.clock.end_round():
            self.clock = None
        self._round = None
        self._used.clear()
        self.failures.take_back(self.steps)
        self.steps += 1
        ddp = self._ddp()
        if ddp is not None:
            setattr(ddp, EXPECTED, False)
            setattr(ddp, UNFINISHED, None)

    # --- Ranks without inputs --------------------------------------------------------------------

    def reduce_zeros(self) -> None:
        """Launch zeros on a rank without inputs (``join``), as the other ranks launch gradients."""
        now = self._round = Round()
        now.sends_used = self._static_used is None if self.is_static else self.find_unused
        now.unused = set(self.numbers)
        for bucket in self.layout.buckets:
            if not bucket.is_sparse:
                self._memory_of(now, bucket).zero_()
            now.waits.append(self._launch(now, bucket))
        with torch.no_grad():
            self._launch_used(now)
            for wait in now.waits:
                wait()
        self._used_anywhere(now)
        self._end_round()
        self.rebuild_after_first()

    # --- Errors ----------------------------------------------------------------------------------

    def _count_accumulation(self, now: Round, number: int) -> bool:
        """Count an accumulation of a static graph; return whether it is the last of the round."""
        now.counts[number] = now.counts.get(number, 0) + 1
        if self._static_counts is None:
            return number not in now.received
        times = self._static_counts.get(number, 0)
        if now.counts[number] > times:
            error = (
                "Your training graph has changed in this iteration, e.g., one parameter is unused "
                "in first iteration, but then got used in the second iteration. this is not "
                f"compatible with static_graph set to True: {self.label} has used "
                f"{self.parameters.names[number]} {now.counts[number]} times now, and {times} in "
                "its first iteration. Construct DistributedDataParallel without static_graph=True."
            )
            setattr(self._ddp(), UNFINISHED, error)
            raise_as_ddp(self.ddp, RefusedGradientError, error)
        return now.counts[number] == times

    def _refuse_repeated(self, now: Round, numbers: Collection[int]) -> None:
        repeated = now.received.intersection(numbers)
        if now.marked_unused and not self.is_static:
            # Reentrant checkpointing, for example, which the walk does not see.
            repeated |= now.unused.intersection(numbers)
        if repeated:
            names = ", ".join(self.parameters.names[number] for number in sorted(repeated))
            raise_as_ddp(
                self.ddp,
                RefusedGradientError,
                "Expected to mark a variable ready only once. Since the last forward of "
                f"{self.label}, gradients of {names} have come twice, and those of others not "
                "yet. Let every parameter take part in the first backward, freeze it before "
                "DistributedDataParallel is constructed, or give DistributedDataParallel "
                "find_unused_parameters=True.",
            )

    def why_not_stored(self, number: int) -> str:
        """Why no graph may store a gradient now, because of hooks; empty if one may."""
        if not accumulates_plainly(self.parameters.all[number]):
            return HOOKED
        return self.why_hooked(self, number)

    def _refuse_late_hook(self, number: int) -> None:
        """Refuse a hook that was registered after a graph has marked the gradient ready, and before
        autograd has accumulated it: the hook would not change what is sent."""
        if self.why_not_stored(number):
            raise_as_ddp(
                self.ddp,
                RefusedGradientError,
                f"A hook was registered on {self.parameters.names[number]} of {self.label} while "
                "the backward that gives its gradient ran, after that was stored in its bucket: "
                "the hook would not change what is sent. Register it before the backward.",
            )

    def _refuse_second(self) -> None:
        raise_as_ddp(
            self.ddp,
            RefusedGradientError,
            f"A second backward reaches outputs of one forward of {self.label}, which was "
            "constructed with find_unused_parameters=True: the first backward has reduced all "
            "gradients, those that were still to come as unused. Call one backward of the sum of "
            "the losses, call the first one with retain_graph=True if gradients of the second one "
            "are to stay on their rank, or leave find_unused_parameters out: an iteration may have "
            "several backwards then.",
        )

    def _note_unfinished(self, now: Round, *, has_begun: bool) -> bool:
        """Set the error of the next forward, if the round has begun; else drop the round. Return
        whether there are gradients to leave."""
        ddp = self._ddp()
        if ddp is None:
            return False
        if not has_begun:
            self._round = None
            return False
        setattr(ddp, UNFINISHED, self._unfinished(ddp, sorted(self._missing(now))))
        return True

    def _leave_unfinished(self, now: Round) -> None:
        """Keep a round that has begun for another backward. Un-alias ``.grad`` from the bucket, so
        that edits between two backwards are not all-reduced. For a launched bucket, wait, and leave
        the average in ``.grad``; for others leave the gradient of this rank."""
        if not self._note_unfinished(now, has_begun=self.has_begun):
            return
        for index, memory in now.memory.items():
            if index < len(now.waits):
                now.waits[index]()
                now.waits[index] = nothing
            self._move_out(self.layout.buckets[index], memory)

    def _leave_failed(self, now: Round, *, has_begun: bool) -> None:
        """As :meth:`_leave_unfinished`, after an error. This rank does not wait, because other
        ranks may never launch these buckets, and the error may be an out-of-memory error: ``.grad``
        is ``None`` if its bucket is launched, or if no memory is left to move it to."""
        if not self._note_unfinished(now, has_begun=has_begun or self.has_begun):
            return
        for index, memory in now.memory.items():
            bucket = self.layout.buckets[index]
            if index >= len(now.waits):
                try:
                    self._move_out(bucket, memory)
                except RuntimeError:  # The first error is the one to be raised.
                    pass
                else:
                    continue
            for parameter in self._in_bucket(bucket, memory):
                parameter.grad = None

    def leave_note_of_missing(self) -> None:
        """Leave a note about the missing gradients, for ranks that wait for buckets that this rank
        cannot launch. It is left in the next forward, because a round may have several backwards.
        """
        now = self._round
        missing = self._missing(now) if now is not None else ()
        if missing and not self.has_launched_all:
            names = ", ".join(repr(self.parameters.names[number]) for number in sorted(missing))
            self.failures.leave(self.steps, f"it has no gradient of {names}")

    def _unfinished(self, ddp: Any, missing: Sequence[int]) -> str:
        names = self.parameters.names
        kept = {id(parameter) for parameter in ddp.module.parameters()}
        swapped = [names[n] for n in missing if id(self.parameters.all[n]) not in kept]
        remedy = (
            f" {', '.join(swapped)} of the model is another parameter than when {self.label} was "
            "constructed: construct DistributedDataParallel after the last change of the model."
            if swapped
            else " Let every parameter take part in the loss, freeze it before "
            "DistributedDataParallel is constructed, or give DistributedDataParallel "
            "find_unused_parameters=True."
        )
        rank = self.group.rank()
        return (
            "Expected to have finished reduction in the prior iteration before starting a new one. "
            f"This error indicates that {self.label} has parameters that were not used in "
            f"producing loss.{remedy}\nParameters which did not receive grad for rank {rank}: "
            f"{', '.join(names[n] for n in missing)}\nParameter indices which did not receive grad "
            f"for rank {rank}: {' '.join(map(str, missing))}"
        )


def _same_strides(tensor: Tensor, strides: Sequence[int]) -> bool:
    sizes = zip(tensor.shape, tensor.stride(), strides, strict=True)
    return all(size == 1 or own == other for size, own, other in sizes)


def reducer_of(ddp: Any) -> Reducer:
    """The reducer of a managed module."""
    reducer: Reducer = ddp.__dict__[REDUCER]
    return reducer
