"""Averages the gradients of a DDP module in buckets, as DDP's C++ reducer does. A gradient reaches
its bucket through a hook on its autograd node, or a compiled backward stores it there.

The words are DDP's. A gradient is *marked ready* (``mark_variable_ready``) once it lies in its
bucket. A bucket is *launched* (``all_reduce_bucket``) once it is full and all earlier buckets are
launched. A round, which DDP calls an iteration, is *finalized* (``finalize_backward``) once all
buckets are launched. As in DDP, the first round fills buckets in the reverse order of the
parameters. At the end of that round, which all ranks reach, the buckets are *rebuilt* in the order
in which rank 0 received the gradients. From then on the layout is fixed, and compiled backwards
store into the buckets. In the mode ``"auto"``, an earlier run may have kept a layout, which is then
fixed when the module is constructed. Each rank may run its own graphs.
"""

from __future__ import annotations

import enum
import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn, Protocol

import torch
from torch import Tensor

from fusion_passes.config import FusionConfig
from fusion_passes.layout.caps import BucketCaps
from fusion_passes.layout.layout import Layout, Offset, ParameterNumber, Piece
from fusion_passes.reducer.assignment import BucketAssignment
from fusion_passes.reducer.communication import Communication
from fusion_passes.reducer.copies import CONVERTED, ELSEWHERE, HOOKED, UNALIGNED, Copies
from fusion_passes.reducer.errors import (
    late_hook,
    refusing,
    repeated_gradients,
    unfinished,
)
from fusion_passes.reducer.hooks import ParameterHooks
from fusion_passes.reducer.launch_queue import LaunchQueue
from fusion_passes.reducer.memory import BucketMemory
from fusion_passes.reducer.outputs import ForwardOutputs
from fusion_passes.reducer.parameters import Parameters
from fusion_passes.reducer.rank_errors import FailureNotes
from fusion_passes.reducer.registered import RegisteredBuckets
from fusion_passes.reducer.used_parameters import AllUsed, FoundUnused, StaticGraph
from fusion_passes.torch_private.autograd import accumulates_plainly, after_backward, backward_id
from fusion_passes.torch_private.ddp import raise_as_ddp

REDUCER: Final = "_ddp_fusion_reducer"
"""Attribute of a managed module: its reducer."""

STATE: Final = "_ddp_fusion_state"
"""Attribute of a managed module: its :class:`State`. A forward writes it and does not read it while
Dynamo traces, so that graphs have no guard on it."""


class State(enum.Enum):
    """A managed module is in one of these states.

    ::

             forward            backward           last gradient
        IDLE ------> EXPECTED -----------> RUNNING ------------> IDLE
                                            |   ^
           error, or some gradients missing |   | another backward
                                            v   |
                                         UNFINISHED -- forward --> RuntimeError

    The module's forward moves it to EXPECTED, outside of ``no_sync`` and with gradients enabled.
    The reducer does everything else: RUNNING before the engine runs (or with the first gradient, if
    the package was not called then), IDLE when it finalizes, and UNFINISHED after the engine has
    run. The thread that called the backward finalizes, on the stream that is current there: in a
    callback at the end of the engine's run, or right after it.
    """

    IDLE = "idle"
    EXPECTED = "expected"
    RUNNING = "running"
    UNFINISHED = "unfinished"


_AVERAGES: Final = (State.EXPECTED, State.RUNNING, State.UNFINISHED)

_ALIGNED_BYTES: Final = 16
"""The alignment that generated code assumes for the memory that an operator returns. A graph that
is compiled for a fixed layout assumes more: :data:`fusion_passes.layout.layout.ALIGNMENT` elements.
"""


class Tuner(Protocol):
    """Compares layouts in the first rounds; :class:`fusion_passes.tuning.tuner.LayoutTuner`."""

    def end_round(self, reducer: Reducer) -> None:
        """Handle the end of a backward, which may have ended a round."""


class Registry(Protocol):
    """All reducers of the process; :class:`fusion_passes.reducer.backward.Reducers` is one."""

    @property
    def has_hooked(self) -> bool:
        """Whether an AccumulateGrad node of any module has hooks of others, or may have some."""

    def take(self, reducer: Reducer) -> None:
        """Register a reducer whose gradient arrived although no known backward reaches it."""

    def why_hooked(self, reducer: Reducer, number: ParameterNumber) -> str:
        """Why an AccumulateGrad node has hooks of others, or may have some, if it has."""


@dataclass
class Round:
    """The state of one iteration: from the first backward after a forward that is averaged to the
    last gradient that the reducer expects. Parameters are given by number.

    Attributes:
        received: parameters whose gradient was received.
        unused: parameters that get no gradient in this round, as far as this rank knows.
        has_marked_unused: whether the unused parameters have been marked ready.
        accumulated_apart: parameters that a graph marked ready, and whose gradient autograd
            accumulates outside the bucket (sums over several graphs, copied gradients); their hook
            lets ``.grad`` be the bucket view.
        copies: how each gradient reached its bucket.
    """

    received: set[ParameterNumber] = field(default_factory=set)
    unused: set[ParameterNumber] = field(default_factory=set)
    has_marked_unused: bool = False
    accumulated_apart: set[ParameterNumber] = field(default_factory=set)
    copies: Copies = field(default_factory=Copies)


@dataclass
class Record:
    """What reports and warnings read of a reducer.

    Attributes:
        copies: how the gradients of the last round reached their buckets.
        steps_told: how many rounds the report has counted.
        stays_local: whether a gradient stayed on this rank since the last backward ended.
        decision: in the mode ``"auto"``, how the buckets were chosen, one sentence each.
        when_freed: the finalizer of the module; ``None`` if there is none.
    """

    copies: Copies = field(default_factory=Copies)
    steps_told: int = 0
    stays_local: bool = False
    decision: tuple[str, ...] = ()
    when_freed: weakref.finalize[..., Any] | None = None

    @property
    def num_stored(self) -> int:
        """How many gradients of the last round compiled backwards have stored in their buckets."""
        return len(self.copies.stored)


class Reducer:
    """Averages the gradients of one DDP module, which has its attribute :data:`STATE` before its
    reducer is made.

    Attributes:
        label: the name of the module in messages, the same on all ranks.
        assignment: which bucket each gradient belongs to.
        memory: the memory of the buckets.
        queue: launches the buckets.
        used: which parameters an iteration uses.
        outputs: which outputs of the last forwards were differentiated.
        hooks: the hooks on the parameters' AccumulateGrad nodes.
        refuse: raises an error about a gradient that DDP does not allow.
        failures: the notes that ranks leave for each other.
        registry: the reducers of the process, once this one is among them.
        backward: the backward that the module takes part in; ``None`` between backwards.
        steps: how many rounds have ended.
        record: what reports and warnings read.
        tuner: in the mode ``"auto"``, changes the layout between rounds until one is chosen.
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
        self.assignment = BucketAssignment(parameters, caps)
        registered = RegisteredBuckets(group, label) if config.memory == "registered" else None
        self.refuse = refusing(ddp)
        self.memory = BucketMemory(parameters, label, registered, self.refuse)
        # A reducer in a reference cycle would outlive its module.
        on_all_launched = weakref.WeakMethod(self._on_all_launched)
        self.queue = LaunchQueue(group, label, communication, self.memory, on_all_launched)
        self.used = AllUsed()
        if ddp.static_graph:
            self.set_static_graph()
        elif ddp.find_unused_parameters:
            self.used = FoundUnused(parameters, group)
        self.outputs = ForwardOutputs()
        self.hooks = ParameterHooks(parameters.all)
        self.failures = FailureNotes(group, label)
        self.registry: Registry | None = None
        self.backward: object = None
        self.steps = 0
        self.record = Record()
        self.tuner: Tuner | None = None
        self._ddp = weakref.ref(ddp)
        self._round: Round | None = None

    def __reduce__(self) -> Any:
        """Copy and pickle as ``None``: a copy of the module gets a reducer of its own."""
        return type(None), ()

    # --- The state -------------------------------------------------------------------------------

    @property
    def ddp(self) -> Any:
        """The module; ``None`` once it is freed."""
        return self._ddp()

    @property
    def name(self) -> str:
        """The name of the module in reports and profiles: the label, and the process group if
        modules on other groups have the same label."""
        return self.queue.name

    @property
    def state(self) -> State:
        ddp = self._ddp()
        return State.IDLE if ddp is None else getattr(ddp, STATE)

    @state.setter
    def state(self, state: State) -> None:
        ddp = self._ddp()
        if ddp is not None:
            setattr(ddp, STATE, state)

    @property
    def is_expecting(self) -> bool:
        """Whether the next gradients are averaged."""
        return self.state in _AVERAGES

    @property
    def gives_memory(self) -> bool:
        """Whether compiled backwards store into the buckets now."""
        is_fixed = self.assignment.is_fixed and not self.used.launches_after_backward
        return is_fixed and self.is_expecting

    @property
    def has_begun(self) -> bool:
        """Whether a gradient of the round was received."""
        now = self._round  # Another thread may end the round meanwhile.
        return now is not None and bool(now.received)

    @property
    def received(self) -> Collection[ParameterNumber]:
        """The parameters whose gradient was received in the round that runs, if one does."""
        return () if self._round is None else self._round.received

    def expect_more(self, entries: Mapping[Any, Collection[int]]) -> bool:
        """Expect another reduction if a backward differentiates the same compiled forwards as an
        earlier one, but only by other outputs; return whether it does."""
        if self.ddp is None or not self.outputs.are_others(entries):
            return False
        self.state = State.EXPECTED
        return True

    def set_static_graph(self) -> None:
        """Have the first iteration find how often each gradient is accumulated."""
        self.used = StaticGraph(self.parameters, self.group, self.label, self.refuse)

    # --- A backward ------------------------------------------------------------------------------

    def begin_backward(self, reached: Mapping[ParameterNumber, str]) -> None:
        """Prepare for a backward before the engine runs.

        Args:
            reached: the parameters that the autograd graph reaches, by number, each with the reason
                why no compiled backward may store its gradient; empty if one may.

        Raises:
            RuntimeError: an earlier backward has left gradients missing, and the forward, which
                Dynamo has traced, could not say so.
        """
        if self._round is not None and self.state is State.EXPECTED:
            self.refuse_unfinished()
        now = self._round or self._begin_round(reached)
        self.state = State.RUNNING
        now.copies.reached.append(reached)
        # Graphs that stored in the last round look at the gradients that they store.
        stored = self.record.copies.stored
        if any(reached.values()):
            stored = {number for number in stored if reached.get(number) == ""}
        left = set(self.parameters.numbers) - now.received
        self.memory.note_existing(left - stored)
        self.memory.unseen = left & stored

    def _begin_round(self, reached: Collection[ParameterNumber]) -> Round:
        now = self._round = Round()
        self.state = State.RUNNING
        now.copies.is_first = not self.assignment.is_fixed
        now.unused = self.used.begin(reached)
        self.memory.begin(self.assignment.layout)
        self.queue.begin(self.assignment.layout)
        return now

    def part_of_bucket(
        self, numbers: Piece, offsets: Sequence[Offset], numel: int, dtype: torch.dtype
    ) -> Tensor | None:
        """Return the part of a bucket, ``[numel]``, in which a graph stores the gradients of these
        parameters, each at its offset in elements.

        Returns ``None`` if the layout places the gradients differently, if the bucket has another
        dtype (the module was converted), if the gradients are not averaged, or if the part is not
        aligned as generated code assumes."""
        if not self.gives_memory or self._round is None:
            return None
        layout = self.assignment.layout
        index, first = layout.places[numbers[0]]
        start, bucket = first - offsets[0], layout.buckets[index]
        places = [(index, start + offset) for offset in offsets]
        lies_so = start >= 0 and places == [layout.places[number] for number in numbers]
        if bucket.dtype != dtype:
            self._round.copies.refuse(numbers, CONVERTED)
            return None
        if not lies_so or start * dtype.itemsize % _ALIGNED_BYTES:
            self._round.copies.refuse(numbers, UNALIGNED if lies_so else ELSEWHERE)
            return None
        with self.queue.lock:
            memory = self.memory.of(bucket)
            # The graph may store on another stream than it was allocated on.
            self.memory.join_streams()
        return memory[start : start + numel]

    def why_not_stored(self, numbers: Piece) -> dict[ParameterNumber, str]:
        """Why no graph may store some of these gradients now, because of hooks, by number."""
        parameters = self.parameters.all
        found = {}
        if not accumulates_plainly(*[parameters[number] for number in numbers]):
            found = {n: HOOKED for n in numbers if not accumulates_plainly(parameters[n])}
        if self.registry is not None and self.registry.has_hooked:
            hooked = ((n, self._why_hooked(n)) for n in numbers if n not in found)
            found |= {number: why for number, why in hooked if why}
        return found

    def _why_hooked(self, number: ParameterNumber) -> str:
        return self.registry.why_hooked(self, number) if self.registry is not None else ""

    def note_no_memory(self, numbers: Collection[ParameterNumber], why: str) -> None:
        """Record why a graph gets no memory of a bucket for these gradients."""
        now = self._round
        if now is not None:
            now.copies.refuse(numbers, why)
            self.memory.note_existing([n for n in numbers if n not in now.received])

    def mark_stored(
        self,
        numbers: Piece,
        *,
        is_sum: bool = False,
        stored_apart: Sequence[Tensor] | None = None,
        copied: Sequence[ParameterNumber] = (),
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
        with self.queue.lock:
            self.used.note(numbers)
            self.used.count_stored(numbers)
            self._refuse_repeated(now, numbers)
            if stored_apart is None:
                now.copies.stored.update(numbers)
            else:
                self.memory.copy_flat(numbers, stored_apart)
            is_apart = is_sum or stored_apart is not None
            (now.accumulated_apart if is_apart else self.hooks.awaited).update(numbers)
            self.memory.add_existing(numbers)
            now.received.update(numbers)
            self._mark_ready(now, numbers)

    def accumulated(self, number: ParameterNumber, *, is_defined: bool = True) -> None:
        """Handle a gradient that autograd has accumulated in ``.grad``; a hook on the
        AccumulateGrad node calls this. The gradient is undefined (``is_defined``) if a compiled
        forward has the parameter as an input and does not use it."""
        now = self._round
        is_apart = now is not None and number in now.accumulated_apart
        if is_apart or number in self.hooks.awaited:  # A graph has marked it ready.
            if self.why_not_stored((number,)):
                self.refuse(late_hook(self.parameters.names[number], self.label))
            if now is not None and is_apart:
                now.accumulated_apart.discard(number)
                self.memory.alias(number)
            self.hooks.awaited.discard(number)
            return
        if is_defined:
            self.used.note((number,))
        if not self.is_expecting:
            ddp = self.ddp
            self.record.stays_local |= ddp is not None and ddp.require_backward_grad_sync
            if is_defined:
                self.queue.communication.note_local(number)
            return
        with self.queue.lock:
            if self.backward is None and self.registry is not None:
                self.registry.take(self)
            now = self._round
            if now is None:
                now = self._begin_round(self.parameters.numbers)
                # Nobody has seen which gradients are new: none is replaced by a view.
                self.memory.note_existing(self.parameters.numbers)
            self._receive(now, number)

    def _receive(self, now: Round, number: ParameterNumber) -> None:
        """Mark a gradient ready that no graph has stored, once it is complete."""
        if number in self.parameters.delayed:
            now.received.add(number)
            return
        if not self.used.count(number, is_first=number not in now.received):
            return
        self._refuse_repeated(now, (number,))
        now.received.add(number)
        self.assignment.observe((number,))
        if self.used.launches_after_backward:
            return
        self.memory.join_streams()
        self._copy_in(number)
        self._mark_ready(now, (number,))

    def _copy_in(self, number: ParameterNumber) -> None:
        """Copy ``.grad`` into the bucket, and let it be the bucket view. If hooks of others behind
        this one read it, it stays where it is: they must see the gradient of this rank."""
        self.memory.copy_in(number)
        if not self._why_hooked(number):
            self.memory.alias(number)

    def _mark_ready(self, now: Round, numbers: Piece) -> None:
        """Mark gradients ready, and launch buckets that are full. As in DDP, the unused parameters
        are marked ready when the first gradient of the round is, with zeros or their existing
        ``.grad``: not earlier, because a backward may launch collectives of its own before its
        first gradient."""
        if not now.has_marked_unused:
            now.has_marked_unused = True
            for number in sorted(now.unused - now.received - self.parameters.delayed):
                self._copy_in(number)
                self.queue.mark_ready((number,))
        self.queue.mark_ready(numbers)
        self.queue.launch_ready()

    def _await_no_hook(self, now: Round) -> None:
        """Await no hook any more: the engine has run."""
        self.hooks.awaited.clear()
        now.accumulated_apart.clear()

    def _missing(self, now: Round) -> set[ParameterNumber]:
        known = now.received | now.unused | self.parameters.delayed
        return set(self.parameters.numbers) - known

    def end_backward(self) -> None:
        """Finalize after the engine has run, if all gradients were received, and rebuild the
        buckets after the first round."""
        self.queue.leave_order()
        now = self._round
        if now is not None:
            self._await_no_hook(now)
            if isinstance(self.used, StaticGraph) and self.used.launches_after_backward:
                self.used.keep_counts()
                for number in self.parameters.numbers:
                    self._copy_in(number)
                self.queue.launch_all()
                now.unused.update(self._missing(now))
            elif not self._missing(now):
                # All others are ready: the delayed gradients are complete, or get zeros.
                for number in self.parameters.delayed:
                    self._copy_in(number)
                    self._mark_ready(now, (number,))
            self.queue.launch_ready()
        if now is not None and now is self._round:
            if self.queue.has_launched_all:
                self.finalize()
            else:
                self._leave_unfinished(has_begun=self.has_begun)
        self.rebuild_after_first()

    def end_unseen_backward(self) -> None:
        """As :meth:`end_backward`, for a backward that was not walked: parameters whose gradient
        was not received are unused."""
        now = self._round
        if now is not None:
            now.copies.is_unseen = True
            if self.used.is_found:
                now.unused, now.has_marked_unused = self._missing(now), False
                self._mark_ready(now, ())
        self.end_backward()

    def end_traced_backward(self) -> None:
        """End the round after the engine has run a traced graph, which has averaged all gradients
        of the module."""
        self.queue.leave_order()
        if self._round is not None:
            self._round.copies.stored = set(self.parameters.numbers)
        self._end_round()

    def fail_backward(self, error: BaseException, *, has_begun: bool = False) -> None:
        """Clean up after the engine has raised an error. If gradients were received, or if a traced
        graph may have launched buckets (``has_begun``), the next forward raises eager DDP's error.
        Raises no error itself."""
        self.queue.leave_order()
        now = self._round
        if now is not None:
            self._await_no_hook(now)
            self.failures.leave(self.steps, f"{type(error).__name__}: {error}")
            has_begun = has_begun or self.has_begun
            self._leave_unfinished(has_begun=has_begun, has_failed=True)

    def _leave_unfinished(self, *, has_begun: bool, has_failed: bool = False) -> None:
        """Keep a round that has begun for another backward, and drop any other. Un-alias ``.grad``
        from the buckets, so that edits between two backwards are not all-reduced. For a launched
        bucket, wait, and leave the average in ``.grad``; for others leave the gradient of this
        rank.

        After an error, this rank does not wait, because other ranks may never launch these buckets,
        and the error may be an out-of-memory error: ``.grad`` is ``None`` if its bucket is
        launched, or if no memory is left to move it to."""
        if not has_begun or self.ddp is None:
            self._drop_round()
            self.state = State.EXPECTED
            return
        self.state = State.UNFINISHED
        for bucket in self.memory.allocated():
            is_launched = self.queue.is_launched(bucket)
            if has_failed and is_launched:
                self.memory.drop(bucket.numbers, bucket)
            elif has_failed:
                self.memory.un_alias_or_drop(bucket)
            else:
                if is_launched:
                    self.queue.wait_for(bucket)
                    elsewhere = self.queue.communication.elsewhere
                    self.memory.drop(elsewhere.intersection(bucket.numbers), bucket)
                self.memory.un_alias(bucket)

    # --- Its end ---------------------------------------------------------------------------------

    def _on_all_launched(self) -> None:
        """Launch the used-parameter map behind the last bucket, as DDP does: all gradients of this
        rank are there, and no bucket of another module comes in between. Finalize at the end of the
        backward, before callbacks that the user queued later."""
        self.used.launch()
        if backward_id() >= 0:
            after_backward(self._finalize_in_backward)

    def _finalize_in_backward(self) -> None:
        now = self._round
        are_accumulated = now is not None and not (self.hooks.awaited or now.accumulated_apart)
        if are_accumulated and self.queue.has_launched_all:
            self.finalize()

    def finalize(self) -> None:
        """Wait for all buckets, and leave the averages in ``.grad``."""
        with self.queue.lock:
            self.memory.join_streams()
        with torch.no_grad():
            used = self.used.on_any_rank()
            for bucket in self.queue.buckets:
                self.queue.wait_for(bucket)
                self.memory.give_back(bucket, used, self.queue.communication.elsewhere)
        self._end_round()

    def _end_round(self) -> None:
        if self._round is not None:
            self.record.copies = self._round.copies
            self.record.copies.unused = self._round.unused
        self._drop_round()
        self.used.end()
        self.queue.communication.end_round()
        self.failures.take_back(self.steps)
        self.steps += 1
        self.state = State.IDLE

    def _drop_round(self) -> None:
        self._round = None
        self.hooks.awaited.clear()
        self.queue.end()
        self.memory.end()

    def rebuild_after_first(self) -> None:
        """Rebuild the buckets if the first round has ended. Here and not in :meth:`finalize`:
        modules that share a group come here in one order on all ranks."""
        if self.steps and not self.assignment.is_fixed:
            self.fix_layout(self.assignment.rebuilt(self.group))
        if self.tuner is not None:
            self.tuner.end_round(self)

    def fix_layout(self, layout: Layout) -> None:
        """Fix the layout, which is the same on all ranks."""
        if self.memory.registered is not None:
            self.memory.registered.prepare(layout)
        self.assignment.layout = self.assignment.graph_layout = layout
        self.assignment.is_fixed = True

    def reduce_zeros(self) -> None:
        """Launch zeros on a rank without inputs (``join``), as the other ranks launch gradients."""
        now = self._begin_round(())
        now.unused = set(self.parameters.numbers)
        for bucket in self.queue.buckets:
            if not bucket.is_sparse:
                self.memory.of(bucket).zero_()
        self.queue.launch_all()
        with torch.no_grad():
            for bucket in self.queue.buckets:
                self.queue.wait_for(bucket)
        self.used.on_any_rank()
        self._end_round()
        self.rebuild_after_first()

    def why_copied(self) -> Mapping[ParameterNumber, str]:
        """Why gradients of the last round were copied into their buckets, by number: a hook copied
        them, or the graph that stored them did. Empty before the first round has ended."""
        return self.record.copies.reasons(self.parameters.kinds) if self.steps else {}

    # --- Errors ----------------------------------------------------------------------------------

    def _refuse_repeated(self, now: Round, numbers: Collection[ParameterNumber]) -> None:
        repeated = now.received.intersection(numbers)
        if now.has_marked_unused:
            # Reentrant checkpointing, for example, which the walk does not see.
            repeated |= now.unused.intersection(numbers)
        if repeated:
            self.refuse(repeated_gradients(self.parameters, self.label, repeated))

    def refuse_unfinished(self) -> NoReturn:
        """Raise the error that a backward has left. Other ranks may wait for buckets that this rank
        cannot launch: leave them a note about the missing gradients. It is left now and not
        earlier, because a round may have several backwards."""
        now, names = self._round, self.parameters.names
        missing = sorted(self._missing(now)) if now is not None else []
        if missing and not self.queue.has_launched_all:
            said = ", ".join(repr(names[number]) for number in missing)
            self.failures.leave(self.steps, f"it has no gradient of {said}")
        rank = self.group.rank()
        text = unfinished(self.ddp, self.parameters, self.label, rank, missing)
        raise_as_ddp(self.ddp, RuntimeError, text)


def reducer_of(ddp: Any) -> Reducer:
    """The reducer of a managed module."""
    reducer: Reducer = ddp.__dict__[REDUCER]
    return reducer
