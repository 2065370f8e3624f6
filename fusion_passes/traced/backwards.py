"""Backwards that compiled autograd traces, of modules whose gradients a reducer averages.

If the user asks for it (``backward_graph="compiled_autograd"``, or compiled autograd that the user
has enabled), a backward becomes one graph together with its hooks. The hook of each gradient is
traced as an all-reduce over a group name that this gradient alone has. The passes fuse these
all-reduces into the buckets of the layout, in its order. Other ranks need not know of that: they
may run any backward, traced or not.

A backward is traced only if its graph can launch all that its modules launch. In any other
backward, compiled backwards and hooks notify the reducer of each gradient, and the report says why
the backward was not traced.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import traceback
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, fx

from fusion_passes.config import FusionConfig
from fusion_passes.layout.layout import ParameterNumber
from fusion_passes.reducer.backward import RunningBackward, reducers
from fusion_passes.reducer.communication import AllReduce
from fusion_passes.reducer.reducer import Reducer
from fusion_passes.reducer.walk import Walker
from fusion_passes.reducer.warnings import warn_once
from fusion_passes.torch_private.dynamo import (
    clear_backward_cache,
    in_one_graph,
    is_error_of_a_compile,
    traces_backwards,
    tracing_backwards,
    tracing_none,
    weak_marks,
)
from fusion_passes.torch_private.process_groups import (
    register_process_group,
    unregister_process_group,
)
from fusion_passes.traced.buckets import ModuleBuckets
from fusion_passes.traced.owners import Owner

FIRST: Final = "it is the first averaged backward, whose gradient order the buckets are rebuilt in"

# --- Names ---------------------------------------------------------------------------------------


@dataclass
class TracedModules:
    """The modules whose gradients graphs reduce, by their group names in graphs: ``0/ddp1`` for the
    second module on process group ``0``, and ``0/ddp1#5`` for the gradient of its parameter 5."""

    _reducers: dict[str, weakref.ref[Reducer]] = field(default_factory=dict)

    def note(self, name: str, reducer: Reducer) -> None:
        """Register a module's group names for its process group, as long as its reducer is
        alive."""
        known = self._reducers.get(name)
        if known is not None and known() is reducer:
            return
        names = [name, *(f"{name}#{number}" for number in reducer.parameters.kinds)]
        if known is not None:
            self._forget(name, known, names)
        # Compiled autograd caches graphs by their autograd nodes and the names in their hooks, and
        # an earlier module may have had these names, on a process group that was destroyed.
        clear_backward_cache()
        reference = self._reducers[name] = weakref.ref(reducer)
        for each in names:
            register_process_group(each, reducer.module.group)
        weakref.finalize(reducer, self._forget, name, reference, names).atexit = False

    def _forget(self, name: str, reference: weakref.ref[Reducer], names: Sequence[str]) -> None:
        if self._reducers.get(name) is not reference:
            return  # Another reducer has the name now.
        del self._reducers[name]
        if torch.distributed.is_initialized():  # Otherwise destroying the groups removed them.
            for each in names:
                unregister_process_group(each)

    def owner_of(self, name: str) -> Owner | None:
        """The owner of a group name; see :data:`fusion_passes.traced.owners.OwnerOf`."""
        base, _, number = name.partition("#")
        reference = self._reducers.get(base)
        reducer = reference() if reference is not None else None
        if reducer is None:
            return None
        index = ParameterNumber(int(number) if number else -1)
        return Owner(
            group_name=base,
            process_group=reducer.module.group.group_name,
            module=reducer.module.label,
            parameter=reducer.parameters.names[index] if number else "",
            number=index,
            strides=tuple(reducer.parameters.strides[index]) if number else None,
        )

    def buckets_of(self, name: str) -> ModuleBuckets:
        """The buckets that a graph has to launch for the module with this group name."""
        reducer = self._reducers[name]()
        assert reducer is not None, "its graph is being compiled"
        communication = reducer.queue.communication
        assert isinstance(communication, AllReduce), "else it is not traced"
        buckets = reducer.assignment.layout.buckets
        return ModuleBuckets(tuple(bucket.numbers for bucket in buckets), communication)

    def identity(self) -> str:
        """Everything that a cached graph depends on, as text. For each gradient, it includes the
        strides and the name in the report."""
        found: list[object] = []
        for name, reference in sorted(self._reducers.items()):
            reducer = reference()
            if reducer is not None:
                found += [self.owner_of(f"{name}#{number}") for number in reducer.parameters.kinds]
                buckets = self.buckets_of(name)
                sent = buckets.communication
                found += [buckets.numbers, sent.backend, sent.divisor(), sent.dtype]
                found.append(sent.scaling_option)
        return repr(found)


traced_modules: Final = TracedModules()
"""The modules whose gradients graphs reduce, by the names that these have for their groups."""


# --- Which backwards are traced ------------------------------------------------------------------


@dataclass
class TracedBackwards:
    """Has compiled autograd trace the backwards that can be traced.

    Attributes:
        options: Inductor's options in the last compile of a forward of a managed module.
        config: options of the modules whose traced backward is one graph, while this graph is being
            compiled or runs; otherwise ``None``.
        given_up: why backwards of a module are no longer traced.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    config: FusionConfig | None = None
    given_up: weakref.WeakKeyDictionary[Reducer, str] = field(
        default_factory=weakref.WeakKeyDictionary
    )
    _run: RunningBackward | None = None
    _threads: set[int] = field(default_factory=set)
    _capturing: threading.RLock = field(default_factory=threading.RLock)

    def run_engine(
        self, run: RunningBackward, outputs: Sequence[Any], engine: Callable[[], Any]
    ) -> Any:
        """Call autograd's engine, and have compiled autograd trace the backward or not."""
        self._threads.add(threading.get_ident())
        is_on = traces_backwards()
        modules = run.taking_part
        is_to_be = (r.module.config.backward_graph == "compiled_autograd" for r in modules)
        is_asked = bool(modules) and (is_on or any(is_to_be))
        run.why_untraced = self._why_untraced(run) if is_asked else ""
        if is_asked and not run.why_untraced:
            for reducer in modules:
                traced_modules.note(reducer.module.name_in_graphs, reducer)
            with self._capturing:
                self._run = run
                try:
                    with tracing_backwards(self._compile):
                        return engine()
                except Exception as error:
                    if run.has_entered_graph:
                        raise
                    # Compiled autograd cannot trace the backward, and nothing of it has run yet.
                    _give_up(run, error)
                finally:
                    self._run = None
        with self._capturing:  # Wait: while another thread traces, it would trace this one.
            pass
        must_be_off = is_on and (modules or _reaches_managed(outputs))
        with tracing_none() if must_be_off else contextlib.nullcontext():
            return engine()

    def _why_untraced(self, run: RunningBackward) -> str:
        """The reason why a backward is not traced; empty if it is."""
        if len(self._threads) > 1:
            return "backwards run in several threads"
        if run.keeps_graph or run.creates_graph or run.only_some:
            return "it was called with retain_graph, create_graph or inputs"
        if run.has_others:
            return "it reaches parameters of no module that was constructed under ddp_fusion"
        if len({reducer.module.group for reducer in run.taking_part}) < len(run.taking_part):
            return "several DistributedDataParallel modules in it share a process group"
        if len({reducer.module.config.mode for reducer in run.taking_part}) > 1:
            return "its modules were constructed with different modes of ddp_fusion"
        hooked = reducers.hooks.found
        parameters = (r.parameters.all[n] for r in run.taking_part for n in run.reached[r])
        of_hooks = (hooked.get(id(parameter), "") for parameter in parameters)
        of_modules = (
            _why_module_untraced(reducer, run.reached[reducer]) for reducer in run.taking_part
        )
        return next(filter(None, itertools.chain(of_hooks, of_modules)), "")

    def _compile(self, traced: fx.GraphModule) -> Callable[..., Any]:
        """Compile the graph of a traced backward. If it cannot be compiled, run the graph as it is:
        the hooks in it then run one by one."""
        # With these two options on, a graph with collectives is not compiled.
        off = {"triton.cudagraphs": False, "fallback_by_default": False}
        compiled = torch.compile(traced, options={**self.options, **off}, dynamic=False)
        why = ""  # The reason why the graph could not be compiled.

        def run(inputs: list[Tensor], *arguments: Any) -> Any:
            nonlocal why
            running = self._run
            assert running is not None, "it runs"
            running.has_entered_graph = True
            if not why:
                try:
                    with self._running(running), weak_marks(inputs):
                        result = compiled(inputs, *arguments)
                except Exception as error:
                    raised = _raised_in(traced, error)
                    is_of_compile = raised is None and is_error_of_a_compile(error)
                    running.has_failed_in_graph = not is_of_compile
                    if raised is not None:
                        raise raised from None
                    if not is_of_compile:
                        raise
                    why = _give_up(running, error)
                else:
                    # False if Dynamo ran the graph uncompiled, as it can be configured to.
                    running.is_traced = not any(r.has_begun for r in running.taking_part)
                    return result
            with self._running(running):
                return traced.forward(inputs, *arguments)

        return run

    @contextlib.contextmanager
    def _running(self, run: RunningBackward) -> Iterator[None]:
        """Set ``config`` and release the lock while the graph of a backward runs: compiled autograd
        is off then, so other threads may go on."""
        self._capturing.release()
        self.config = run.taking_part[0].module.config
        try:
            with in_one_graph():
                yield
        finally:
            self.config = None
            self._capturing.acquire()


def _give_up(run: RunningBackward, error: Exception) -> str:
    """Trace no more backwards of these modules. Return the reason, in one line."""
    run.why_untraced = f"torch cannot compile it as one graph: {_in_a_line(error)}"
    for reducer in run.taking_part:
        traced_backwards.given_up[reducer] = run.why_untraced
    labels = ", ".join(reducer.module.label for reducer in run.taking_part)
    warn_once(
        f"untraced {labels}",
        f"Compiled autograd was requested but does not trace backwards of {labels}: torch cannot "
        f"compile them as one graph: {_in_a_line(error)}. Compiled backwards and hooks fill the "
        "same buckets instead.",
    )
    return run.why_untraced


def _why_module_untraced(reducer: Reducer, reached: Collection[ParameterNumber]) -> str:
    """The reason why a module's gradients cannot be reduced in a traced graph; empty if they
    can."""
    communication, kinds = reducer.queue.communication, reducer.parameters.kinds
    given_up = traced_backwards.given_up.get(reducer, "")
    reasons = {
        given_up: bool(given_up),
        FIRST: not reducer.assignment.is_fixed,
        '"auto" still compares layouts': reducer.tuner is not None,
        "a communication hook all-reduces its buckets": not isinstance(communication, AllReduce),
        "each gradient goes to the rank that owns its parameter": (
            reducer.module.config.shard_optimizer
        ),
        "join divides its gradients by the number of ranks that still have inputs": (
            isinstance(communication, AllReduce) and communication.count_ranks is not None
        ),
        "find_unused_parameters=True makes ranks exchange which parameters they used": (
            reducer.used.is_found
        ),
        "it has sparse gradients": any(kind.is_sparse for kind in kinds.values()),
        "it has complex gradients": any(kind.dtype.is_complex for kind in kinds.values()),
        "delay_all_reduce_named_params delays gradients, which may accumulate several times": any(
            kind.is_delayed for kind in kinds.values()
        ),
        "it does not reach every parameter of a module": (
            set(reached) != reducer.parameters.numbers or reducer.has_begun
        ),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def _reaches_managed(outputs: Sequence[Any]) -> bool:
    return not reducers.gradients().keys().isdisjoint(Walker().walk(outputs).edges())


def _raised_in(traced: fx.GraphModule, error: BaseException) -> BaseException | None:
    """The error that a part of a traced backward raised as it ran; ``None`` if no part has run. A
    part that has run must not run twice. Dynamo compiles the first part before any part runs. An
    error of Dynamo can hide the first error: Dynamo breaks the graph where ``GraphModule`` looks at
    the traceback of the first error (torch 2.11 to 2.14)."""
    code = traced.forward.__code__
    found: BaseException | None = error
    while found is not None:
        frames = traceback.walk_tb(found.__traceback__)
        if any(frame.f_code.co_filename == code.co_filename for frame, _ in frames):
            return found
        found = found.__context__
    return None


def _in_a_line(error: Exception) -> str:
    """The text of a compile error in one line, without its advice."""
    error = getattr(error, "inner_exception", error)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    explained = [line for line in lines if line.startswith("Explanation:")]
    text = (explained or lines or [type(error).__name__])[0]
    return f"{type(error).__name__}: {text.removeprefix('Explanation: ')[:240]}"


traced_backwards: Final = TracedBackwards()
"""Which backward is being traced, and how those before were compiled."""
