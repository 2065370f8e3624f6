"""Runs the backwards that reduce gradients under the flag as compiled graphs, and only those."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from fusion_passes.agreement.participant import Participant
from fusion_passes.ddp.absent import begin_reach
from fusion_passes.ddp.aot_backward import aot_backwards
from fusion_passes.ddp.autograd_graph import Ends, ends_of
from fusion_passes.ddp.averaged import NONE_AVERAGED, Averaged
from fusion_passes.ddp.disagreement import shared_errors
from fusion_passes.ddp.engine_calls import EngineCall, Reach, must_be_kept, reach_of
from fusion_passes.ddp.hooks import put_hooks_last, traced_hooks
from fusion_passes.ddp.launch_clock import launch_clock
from fusion_passes.ddp.modules import registry
from fusion_passes.ddp.naming import bucket_names
from fusion_passes.ddp.own_reducer import check_optimizers
from fusion_passes.ddp.rounds import (
    end_backward,
    fail_backward,
    note_unannounced,
    owing,
    rejoining,
    running,
)
from fusion_passes.ddp.sparse_backwards import apart
from fusion_passes.ddp.starts import Starts
from fusion_passes.ddp.traceable import can_be_traced
from fusion_passes.ddp.traced_inputs import with_usual_inputs
from fusion_passes.ddp.turns import Turns
from fusion_passes.ddp.uncompiled import Uncompiled
from fusion_passes.ddp.unfused import (
    warn_averaged_later,
    warn_lacking,
    warn_not_reduced,
    warn_others_reductions,
    warn_threads,
    warn_unfused,
)
from fusion_passes.ddp.unused import BESIDE_FOREIGN, beside_foreign, note_local_use, why_by_hand
from fusion_passes.reporting.backwards import backwards
from fusion_passes.reporting.journal import Journal
from fusion_passes.reporting.records import FusionReport
from fusion_passes.torch_private import compiled_autograd, dynamo_config, is_compiling_graph
from fusion_passes.torch_private.autograd import backward_id, tracing_backwards

CompilerFn = Callable[[torch.fx.GraphModule], Any]


@dataclass
class BackwardRunner:
    """Decides, for each call of the autograd engine, whether it is traced.

    The gradient hooks are only part of a graph if the backward runs under compiled autograd, which
    is on for the whole process or not at all. Here it is on for exactly the calls that reach a
    parameter of a managed module. A call takes the options of the compiled region that was entered
    last before it: the training step that makes it, or the forward, in a usual loop.

    Attributes:
        journal: where graphs that were compiled or loaded are recorded.
        before_traced: called before each backward that is traced.
    """

    journal: Journal
    before_traced: Callable[[], None] = lambda: None
    _turns: Turns = field(default_factory=Turns)
    _region: tuple[Callable[[], CompilerFn], bool | None] | None = None
    _compiler: CompilerFn | None = None
    _starts: Starts = field(default_factory=Starts)
    _uncompiled: Uncompiled = field(default_factory=Uncompiled)
    _unannounced: weakref.WeakKeyDictionary[DistributedDataParallel, set[object]] = field(
        default_factory=weakref.WeakKeyDictionary
    )
    _callbacks: list[Callable[[], None]] = field(default_factory=list)

    @property
    def is_tracing(self) -> bool:
        """Whether a thread runs a traced backward."""
        return self._turns.is_tracing

    def executing(self) -> contextlib.AbstractContextManager[None]:
        """Around the run of a compiled graph in a traced backward."""
        return self._turns.executing()

    def queue(self, callback: Callable[[], None]) -> bool:
        """Take what a hook of a traced backward wants to be called at its end, which the engine
        would forget.

        Returns:
            Whether it was taken: not in any other backward.
        """
        taken = self._turns.is_mine and not traced_hooks.is_reentrant
        if taken:
            self._callbacks.append(callback)
        return taken

    def remember_region(self, rebuild: Callable[[], CompilerFn], dynamic: bool | None) -> None:
        """Note the options of a compiled region that is being entered.

        Args:
            rebuild: makes its compiler anew.
            dynamic: its option of ``torch.compile``.
        """
        if not self.is_tracing and (self._region is None or self._region[0] is not rebuild):
            self._region, self._compiler = (rebuild, dynamic), None

    def forget_region(self) -> None:
        """The flag has changed, which compilers hold a copy of."""
        self._compiler = None
        self._unannounced.clear()

    def reset(self) -> None:
        """Forget what was run."""
        vars(self).update(vars(BackwardRunner(self.journal, self.before_traced)))

    def run(self, engine: Callable[..., Any], outputs: Sequence[Any], *args: Any, **kw: Any) -> Any:
        """Call ``engine`` as ``torch.autograd.graph._engine_run_backward`` would be called.

        Args:
            engine: runs the backward.
            outputs: tensors or gradient edges to start from.
            args: gradients, retain_graph, create_graph, inputs.
            kw: allow_unreachable, accumulate_grad.
        """
        if backward_id() >= 0:  # Inside of another, which ends what this one begins.
            with traced_hooks.reentrant():
                return engine(outputs, *args, **kw)
        if is_compiling_graph():
            return engine(outputs, *args, **kw)
        call = EngineCall.of(args, kw)
        traced_hooks.take()  # What is left of a backward that failed.
        self._uncompiled.why = ""
        known, unreadable = len(self.journal.reports()), self.journal.unreadable
        put_hooks_last()
        ends = ends_of(outputs if call.accumulates and len(registry) else ())
        lacking = begin_reach(ends.leaves) if call.accumulates else []
        reach = reach_of(ends)
        warn_not_reduced(reach.unmanaged)
        if reach.managed:
            self._begin(outputs, ends, call, reach)
        reached = functools.partial(registry.reached_by, ends.leaves)
        can_trace = reach.managed and not (call.creates_graph or reach.waits)
        averaged = self._averaged_by_itself(ends, call) if can_trace else NONE_AVERAGED
        traced = can_trace and not averaged.participants and self._is_traced(call, outputs, reached)
        meets = traced or bool(averaged.participants)
        timing = launch_clock.timing(averaged) if meets else contextlib.nullcontext()
        sharing = shared_errors(reached, owing, fail_backward)
        with timing, running(), rejoining(), sharing:
            with (
                self._averaging(averaged),
                self._running(traced or must_be_kept(call, outputs), reach.waits or can_trace),
                launch_clock.noting(),
            ):
                result = engine(outputs, *args, **kw)
                self._call_back()
            names = self._end(lacking)
        self._note(averaged, call, reached if reach.managed else list, lacking if traced else None)
        backwards.ended()
        if self.journal.unreadable == unreadable:  # Else the journal has said so.
            self._warn(names, self.journal.reports()[known:])
        return result

    def _begin(self, outputs: Sequence[Any], ends: Ends, call: EngineCall, reach: Reach) -> None:
        registry.check_new(check_optimizers)
        bucket_names.follow_profiler()
        self._starts.note(outputs, ends, call.keeps_graph)
        warn_averaged_later(reach.hooked, is_mixed=reach.others)

    def _end(self, lacking: Sequence[Participant]) -> tuple[str, ...]:
        """End a backward; the names of the reductions that were traced in it."""
        names = traced_hooks.take()
        self._note_unannounced(names)
        note_local_use(lacking)
        end_backward()
        warn_lacking(lacking)
        return names

    def _note(
        self,
        averaged: Averaged,
        call: EngineCall,
        reached: Callable[[], list[str]],
        traced: Sequence[Participant] | None,
    ) -> None:
        """Note, for the report, where the gradients of a backward were reduced: ``traced`` has, of
        one that was traced, the modules that may lack gradients."""
        if beside_foreign(averaged.participants):
            backwards.note(averaged.labels, "none", BESIDE_FOREIGN)
        elif averaged.participants:
            backwards.note(averaged.labels, "aot_autograd", outside=averaged.outside)
        elif (names := reached()) and not aot_backwards.stays_local(names):
            labels, why = _labels(names), self._uncompiled.why
            if why:
                self._uncompiled.warn(labels)
            elif traced is None:
                why = "create_graph is set" if call.creates_graph else "it cannot be traced"
            else:
                why = why_by_hand(traced)
            if why:
                backwards.note(labels, "none", why)
            else:
                backwards.note(labels, "compiled_autograd", averaged.why_not)

    def _warn(self, names: Sequence[str], reports: Sequence[FusionReport]) -> None:
        if names:
            warn_unfused(names, reports)
        elif reports:
            warn_others_reductions(reports)

    def _is_traced(
        self, call: EngineCall, outputs: Sequence[Any], reached: Callable[[], Iterable[str]]
    ) -> bool:
        return (
            # A backward that was compiled with its forward may use up what that has saved.
            (call.keeps_graph or not aot_backwards.stays_local(reached()))
            and can_be_traced(outputs)
            and self._would_announce(reached)
        )

    def _averaged_by_itself(self, ends: Ends, call: EngineCall) -> Averaged:
        if call.keeps_graph:
            return Averaged(why_not="it was called with retain_graph=True")
        if call.only_some:
            return Averaged(why_not="it was called with inputs")
        if compiled_autograd().compiled_autograd_enabled and not self.is_tracing:
            return Averaged(why_not="compiled autograd is on for all backwards")
        return aot_backwards.find_averaged(ends)

    @contextlib.contextmanager
    def _averaging(self, averaged: Averaged) -> Iterator[None]:
        if not averaged.participants:
            yield
            return
        with self._turns.averaged() as may:
            if not may:
                warn_threads()
            with aot_backwards.averaging(averaged if may else NONE_AVERAGED):
                yield

    def _note_unannounced(self, names: Iterable[str]) -> None:
        for name in note_unannounced(names):
            ddp = registry.ddp_of(name)
            if ddp is not None:
                self._unannounced.setdefault(ddp, set()).add(self._region and self._region[0])

    def _call_back(self) -> None:
        while self._turns.is_mine and self._callbacks:  # One may queue another.
            self._callbacks.pop(0)()

    def _would_announce(self, reached: Callable[[], Iterable[str]]) -> bool:
        """Whether the graphs of a traced backward say what they launch: not where another backend
        than Inductor has compiled them, for instance. Untraced, they are reduced in buckets, too.
        """
        region = self._region and self._region[0]
        known = [ddp for ddp, regions in self._unannounced.items() if region in regions]
        return not known or {id(ddp) for ddp in known}.isdisjoint(
            id(registry.ddp_of(name)) for name in reached()
        )

    @contextlib.contextmanager
    def _running(self, traced: bool, is_warned: bool) -> Iterator[None]:
        with self._turns.traced() if traced else contextlib.nullcontext(False) as may_trace:
            if may_trace:
                self._callbacks.clear()
                with self._traced():
                    yield
                return
            if traced:
                warn_threads()
            with traced_hooks.untraced(is_warned), self._turns.untraced():
                yield

    @contextlib.contextmanager
    def _traced(self) -> Iterator[None]:
        autograd = compiled_autograd()
        self.before_traced()
        if autograd.compiled_autograd_enabled or autograd.active_disable_ctx:
            yield
            return
        rebuild, dynamic = self._region or (None, False)
        if self._compiler is None:
            self._compiler = with_usual_inputs(rebuild() if rebuild else torch.compile)
        if dynamic is None:
            dynamic = not dynamo_config().assume_static_by_default
        with tracing_backwards(apart(self._uncompiled.or_as_it_is(self._compiler)), dynamic):
            yield


def _labels(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(registry.module(name).label for name in names)
