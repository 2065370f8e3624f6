"""Averages the gradients of a DDP module in buckets, as DDP's C++ reducer does. A gradient reaches
its bucket through a hook on its autograd node, or a compiled backward stores it there.

The words are DDP's. A gradient is *marked ready* (``mark_variable_ready``) once it lies in its
bucket. A bucket is *launched* (``all_reduce_bucket``) once it is full and all earlier buckets are
launched. An iteration is *finalized* (``finalize_backward``) once all buckets are launched. As in
DDP, the first iteration fills buckets in the reverse order of the parameters. At its end, which all
ranks reach, the buckets are *rebuilt* in the order in which rank 0 received the gradients. From
then on the layout is fixed, and compiled backwards store into the buckets. In the mode ``"auto"``,
an earlier run may have kept a layout, which is then fixed when the module is constructed. Each rank
may run its own graphs.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final, NoReturn, Protocol

from fusion_passes.layout.caps import BucketCaps
from fusion_passes.layout.layout import Kinds, Layout, ParameterNumber
from fusion_passes.reducer.assignment import BucketAssignment
from fusion_passes.reducer.averaged_module import AveragedModule, State
from fusion_passes.reducer.communication import Communication
from fusion_passes.reducer.copies import Copies
from fusion_passes.reducer.errors import unfinished
from fusion_passes.reducer.hooks import HooksOfOthers, ParameterHooks
from fusion_passes.reducer.iteration import Iteration
from fusion_passes.reducer.launch_queue import LaunchQueue
from fusion_passes.reducer.memory import BucketMemory
from fusion_passes.reducer.outputs import ForwardOutputs
from fusion_passes.reducer.parameters import Parameters
from fusion_passes.reducer.rank_errors import FailureNotes
from fusion_passes.reducer.registered import RegisteredBuckets
from fusion_passes.reducer.used_parameters import AllUsed, StaticGraph
from fusion_passes.torch_private.autograd import after_backward, backward_id
from fusion_passes.torch_private.ddp import raise_as_ddp

REDUCER: Final = "_ddp_fusion_reducer"
"""Attribute of a managed module: its reducer."""


class Tuner(Protocol):
    """Compares layouts in the first iterations; :class:`fusion_passes.tuning.tuner.LayoutTuner`."""

    def end_iteration(self, reducer: Reducer) -> None:
        """Handle the end of a backward, which may have ended an iteration."""


@dataclass
class ParameterSends:
    """Parameters that owners sent to all ranks after a step of a sharded optimizer.

    Attributes:
        num_bytes: size of the parameters, in bytes.
        begun_s: when the send began, in seconds of ``time.perf_counter``.
        took_s: seconds from then until this rank had waited for the last parameter.
        waited_s: for how many of these seconds this rank waited.
    """

    num_bytes: int
    begun_s: float
    took_s: float = 0.0
    waited_s: float = 0.0


@dataclass
class Record:
    """What reports and warnings read of a reducer.

    Attributes:
        copies: how the gradients of the last iteration reached their buckets.
        steps_told: how many iterations the report has counted.
        stays_local: whether a gradient stayed on this rank since the last backward ended.
        decision: in the mode ``"auto"``, how the buckets were chosen, one sentence each.
        when_freed: the finalizer of the module; ``None`` if there is none.
        sends: when parameters were sent after the last step of a sharded optimizer.
    """

    copies: Copies | None = None
    steps_told: int = 0
    stays_local: bool = False
    decision: tuple[str, ...] = ()
    when_freed: weakref.finalize[..., Any] | None = None
    sends: ParameterSends | None = None

    @property
    def stored(self) -> Collection[ParameterNumber]:
        """The parameters whose gradients compiled backwards stored in the last iteration."""
        return () if self.copies is None else self.copies.stored

    @property
    def num_stored(self) -> int:
        """The number of these gradients."""
        return len(self.stored)

    def why_copied(self, kinds: Kinds) -> Mapping[ParameterNumber, str]:
        """Why gradients of the last iteration were copied into their buckets, by number: a hook
        copied them, or the graph that stored them did. Empty before the first one has ended."""
        return {} if self.copies is None else self.copies.reasons(kinds)


class Reducer:
    """Averages the gradients of one DDP module. :class:`State` draws the states of the module.

    Attributes:
        module: the module. It has its attribute ``STATE`` before its reducer is made.
        parameters: its parameters.
        assignment: which bucket each gradient belongs to.
        memory: the memory of the buckets.
        queue: launches the buckets.
        used: which parameters an iteration uses.
        outputs: which outputs of the last forwards were differentiated.
        hooks: the hooks on the parameters' AccumulateGrad nodes.
        failures: the notes that ranks leave for each other.
        on_unreached: called with the reducer when a gradient arrives although no known backward
            reaches it.
        iteration: the gradients of the iteration that has begun; ``None`` between iterations.
        backward: the backward that the module takes part in; ``None`` between backwards.
        steps: how many iterations have ended.
        record: what reports and warnings read.
        tuner: in the mode ``"auto"``, changes the layout between iterations until one is chosen.
    """

    def __init__(
        self,
        module: AveragedModule,
        parameters: Parameters,
        *,
        caps: BucketCaps,
        communication: Communication,
        used: AllUsed,
        hooks_of_others: HooksOfOthers,
    ) -> None:
        self.module = module
        self.parameters = parameters
        self.assignment = BucketAssignment(parameters, caps)
        group, label = module.group, module.label
        is_registered = module.config.memory == "registered"
        registered = RegisteredBuckets(group, label) if is_registered else None
        self.memory = BucketMemory(parameters, label, registered, module.refuse)
        # A reducer in a reference cycle would outlive its module.
        on_all_launched = weakref.WeakMethod(self._on_all_launched)
        self.queue = LaunchQueue(group, label, communication, self.memory, on_all_launched)
        self.used = used
        self.outputs = ForwardOutputs()
        self.hooks = ParameterHooks(parameters.all, hooks_of_others)
        self.failures = FailureNotes(group, label)
        self.on_unreached: Callable[[Reducer], None] = lambda _: None
        self.iteration: Iteration | None = None
        self.backward: object = None
        self.steps = 0
        self.record = Record()
        self.tuner: Tuner | None = None

    def __reduce__(self) -> Any:
        """Copy and pickle as ``None``: a copy of the module gets a reducer of its own."""
        return type(None), ()

    @property
    def has_begun(self) -> bool:
        """Whether a gradient of the iteration was received."""
        now = self.iteration  # Another thread may end the iteration meanwhile.
        return now is not None and bool(now.received)

    def expect_more(self, entries: Mapping[Any, Collection[int]]) -> bool:
        """Move to EXPECTED, and return True, if a backward enters compiled forwards that an earlier
        one entered, but only by outputs that were not differentiated before."""
        if self.module.ddp is None or not self.outputs.are_others(entries):
            return False
        self.module.state = State.EXPECTED
        return True

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
        if self.iteration is not None and self.module.state is State.EXPECTED:
            self.refuse_unfinished()
        now = self.iteration or self._begin_iteration(reached)
        self.module.state = State.RUNNING
        now.copies.reached.append(reached)
        # A compiled backward that stores a gradient looks at its ``.grad`` itself.
        stored = self.record.stored
        if any(reached.values()):
            stored = {number for number in stored if reached.get(number) == ""}
        self.memory.seen = set(now.received)
        if now.received or len(stored) < len(self.parameters.numbers):
            left = self.parameters.numbers - now.received
            self.memory.note_existing(left.difference(stored))

    def _begin_iteration(self, reached: Collection[ParameterNumber]) -> Iteration:
        self.module.state = State.RUNNING
        self.memory.begin(self.assignment.layout)
        self.queue.begin(self.assignment.layout)
        now = self.iteration = Iteration(
            self.module,
            self.parameters,
            self.assignment,
            self.memory,
            self.queue,
            self.used,
            self.hooks,
            unused=self.used.begin(reached),
            copies=Copies(is_first=not self.assignment.is_fixed),
        )
        return now

    def accumulated(self, number: ParameterNumber, *, is_defined: bool = True) -> None:
        """Handle a gradient that autograd has accumulated in ``.grad``; a hook on the
        AccumulateGrad node calls this. The gradient is undefined (``is_defined``) if a compiled
        forward has the parameter as an input and does not use it."""
        now = self.iteration
        if now is not None and now.has_accumulated(number):
            return
        if is_defined:
            self.used.note((number,))
        if self.module.is_idle:
            ddp = self.module.ddp
            self.record.stays_local |= ddp is not None and ddp.require_backward_grad_sync
            if is_defined:
                self.queue.communication.note_local(number)
            return
        with self.queue.lock:
            if self.backward is None:
                self.on_unreached(self)
            now = self.iteration
            if now is None:
                now = self._begin_iteration(self.parameters.numbers)
                # The backward was not walked: take every ``.grad`` for one that existed before it.
                self.memory.note_existing(self.parameters.numbers)
            now.receive(number)

    def end_backward(self) -> None:
        """Finalize after the engine has run, if all gradients were received, and rebuild the
        buckets after the first iteration."""
        self.queue.leave_order()
        now = self.iteration
        if now is not None:
            now.await_no_hook()
            if isinstance(self.used, StaticGraph) and self.used.launches_after_backward:
                self.used.keep_counts()
                for number in self.parameters.numbers:
                    now.copy_in(number)
                self.queue.launch_all()
                now.unused.update(now.missing)
            elif not now.missing:  # All others are ready.
                now.receive_delayed()
            self.queue.launch_ready()
        if now is not None and now is self.iteration:
            if self.queue.has_launched_all:
                self.finalize()
            else:
                self._leave_unfinished(has_begun=self.has_begun)
        self.rebuild_after_first()

    def end_unseen_backward(self) -> None:
        """As :meth:`end_backward`, for a backward that was not walked: parameters whose gradient
        was not received are unused."""
        now = self.iteration
        if now is not None:
            now.copies.is_unseen = True
            if self.used.is_found:
                now.mark_missing_unused()
        self.end_backward()

    def end_traced_backward(self) -> None:
        """End the iteration after the engine has run a traced graph, which has averaged all
        gradients of the module."""
        self.queue.leave_order()
        if self.iteration is not None:
            self.iteration.copies.stored = set(self.parameters.numbers)
        self._end_iteration()

    def fail_backward(self, error: BaseException, *, has_begun: bool = False) -> None:
        """Clean up after the engine has raised an error. If gradients were received, or if a traced
        graph may have launched buckets (``has_begun``), the next forward raises eager DDP's error.
        Raises no error itself."""
        self.queue.leave_order()
        now = self.iteration
        if now is not None:
            now.await_no_hook()
            self.failures.leave(self.steps, f"{type(error).__name__}: {error}")
            has_begun = has_begun or self.has_begun
            self._leave_unfinished(has_begun=has_begun, has_failed=True)

    def _leave_unfinished(self, *, has_begun: bool, has_failed: bool = False) -> None:
        """Keep an iteration that has begun for another backward, and drop any other. Un-alias
        ``.grad`` from the buckets, so that edits between two backwards are not all-reduced. For a
        launched bucket, wait, and leave the average in ``.grad``; for others leave the gradient of
        this rank.

        After an error, this rank does not wait, because other ranks may never launch these buckets,
        and the error may be an out-of-memory error: ``.grad`` is ``None`` if its bucket is
        launched, or if no memory is left to move it to."""
        if not has_begun or self.module.ddp is None:
            self._drop_iteration()
            self.module.state = State.EXPECTED
            return
        self.module.state = State.UNFINISHED
        with contextlib.suppress(RuntimeError) if has_failed else contextlib.nullcontext():
            self.memory.join_streams()
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

    def refuse_unfinished(self) -> NoReturn:
        """Raise the error that a backward has left. Other ranks may wait for buckets that this rank
        cannot launch: leave them a note about the missing gradients. It is left now and not
        earlier, because an iteration may have several backwards."""
        now, module = self.iteration, self.module
        missing = sorted(now.missing) if now is not None else []
        if missing and not self.queue.has_launched_all:
            said = ", ".join(repr(self.parameters.names[number]) for number in missing)
            self.failures.leave(self.steps, f"it has no gradient of {said}")
        rank = module.group.rank()
        text = unfinished(module.ddp, self.parameters, module.label, rank, missing)
        raise_as_ddp(module.ddp, RuntimeError, text)

    # --- Its end ---------------------------------------------------------------------------------

    def _on_all_launched(self) -> None:
        """Launch the used-parameter map behind the last bucket, as DDP does: all gradients of this
        rank are there, and no bucket of another module comes in between. Finalize at the end of the
        backward, before callbacks that the user queued later."""
        self.used.launch()
        if backward_id() >= 0:
            after_backward(self._finalize_in_backward)

    def _finalize_in_backward(self) -> None:
        now = self.iteration
        if now is not None and not now.awaits_hooks and self.queue.has_launched_all:
            self.finalize()

    def finalize(self) -> None:
        """Wait for all buckets, and leave the averages in ``.grad``."""
        with self.queue.lock:
            self.memory.join_streams()
        used = self.used.on_any_rank()
        for bucket in self.queue.buckets:
            self.queue.wait_for(bucket)
            self.memory.give_back(bucket, used, self.queue.communication.elsewhere)
        self._end_iteration()

    def _end_iteration(self) -> None:
        if self.iteration is not None:
            self.record.copies = self.iteration.copies
            self.record.copies.unused = self.iteration.unused
        self._drop_iteration()
        self.used.end()
        self.queue.communication.end_iteration()
        self.failures.take_back(self.steps)
        self.steps += 1
        self.module.state = State.IDLE

    def _drop_iteration(self) -> None:
        self.iteration = None
        self.hooks.awaited.clear()
        self.queue.end()
        self.memory.end()

    def rebuild_after_first(self) -> None:
        """Rebuild the buckets if the first iteration has ended. Here and not in :meth:`finalize`:
        modules that share a group come here in one order on all ranks."""
        if self.steps and not self.assignment.is_fixed:
            self.fix_layout(self.assignment.rebuilt(self.module.group))
        if self.tuner is not None:
            self.tuner.end_iteration(self)

    def fix_layout(self, layout: Layout) -> None:
        """Fix the layout, which is the same on all ranks."""
        if self.memory.registered is not None:
            self.memory.registered.prepare(layout)
        self.assignment.layout = self.assignment.graph_layout = layout
        self.assignment.is_fixed = True

    def reduce_zeros(self) -> None:
        """Launch zeros on a rank without inputs (``join``), as the other ranks launch gradients."""
        now = self._begin_iteration(())
        now.unused = set(self.parameters.numbers)
        for bucket in self.queue.buckets:
            if not bucket.is_sparse:
                self.memory.of(bucket).zero_()
        self.queue.launch_all()
        for bucket in self.queue.buckets:
            self.queue.wait_for(bucket)
        self.used.on_any_rank()
        self._end_iteration()
        self.rebuild_after_first()


def reducer_of(ddp: Any) -> Reducer:
    """The reducer of a managed module."""
    reducer: Reducer = ddp.__dict__[REDUCER]
    return reducer
