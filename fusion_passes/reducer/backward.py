"""Finds the parameters that a backward reaches, and the reducers that take part in it.

Before the engine runs, the autograd graph is walked once, to find which parameters get a gradient,
and from how many nodes. If only compiled forwards contribute to a gradient, it is *final* in their
compiled backwards, which may store it in its bucket and mark it ready. A hook on the AccumulateGrad
node marks all other gradients ready, as in DDP.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor, nn

from fusion_passes.layout.layout import ParameterNumber
from fusion_passes.reducer.communication import AllReduce
from fusion_passes.reducer.compiled_forward import CompiledForward, Destinations, Gradient
from fusion_passes.reducer.copies import (
    ANOMALY,
    CREATES_GRAPH,
    NOT_COMPILED,
    SEVERAL,
    SHARED,
    SOME_INPUTS,
)
from fusion_passes.reducer.errors import second_backward
from fusion_passes.reducer.hooks import HooksOfOthers
from fusion_passes.reducer.parameters import Parameters
from fusion_passes.reducer.reducer import Reducer
from fusion_passes.reducer.walk import Reached, Walker
from fusion_passes.torch_private.autograd import (
    after_backward,
    backward_id,
    is_of_module_hooks,
    register_unless_asked,
)
from fusion_passes.torch_private.dynamo import is_compiling_graph

ReachedNumbers: TypeAlias = dict[Reducer, dict[ParameterNumber, str]]
"""See :attr:`Route.reached`."""


@dataclass
class Route:
    """Where the gradients of a backward go.

    Attributes:
        reached: the parameters of expecting reducers that the backward reaches, by reducer and
            number, each with the reason why its gradient is not final; empty if it is.
        destinations: of each compiled forward, in the order of the walk.
        has_others: whether it reaches leaves that none, or several, of these reducers average.
        unowned: the leaves that it reaches and no reducer averages.
    """

    reached: ReachedNumbers = field(default_factory=dict)
    destinations: list[Destinations] = field(default_factory=list)
    has_others: bool = False
    unowned: list[Tensor] = field(default_factory=list)


_MOST_ROUTES: Final = 256


@dataclass(eq=False)
class RunningBackward:
    """A running backward, with its nested backwards.

    Attributes:
        taking_part: the reducers that average in this backward, in launch order.
        reached: see :attr:`Route.reached`.
        keeps_graph, creates_graph, only_some: whether it was called with ``retain_graph=True``,
            ``create_graph=True``, ``inputs``.
        has_others: see :attr:`Route.has_others`.
        is_traced: whether a graph that compiled autograd traced has averaged all gradients.
        why_untraced: why compiled autograd did not trace this backward, if that was asked for.
        has_entered_graph: whether the traced graph runs or has run.
        has_failed_in_graph: whether the traced graph was compiled and raised an error when it ran;
            it may have launched some buckets.
    """

    taking_part: list[Reducer] = field(default_factory=list)
    reached: ReachedNumbers = field(default_factory=dict)
    keeps_graph: bool = False
    creates_graph: bool = False
    only_some: bool = False
    has_others: bool = False
    is_traced: bool = False
    why_untraced: str = ""
    has_entered_graph: bool = False
    has_failed_in_graph: bool = False


OnAveraged: TypeAlias = Callable[[RunningBackward, Sequence[str], int], None]
"""Receives a backward, the names of the modules that it averaged, and the number of gradients that
were copied into their buckets."""

RunEngine: TypeAlias = Callable[[RunningBackward, Sequence[Any], Callable[[], Any]], Any]
"""Runs a backward from these outputs by calling autograd's engine, which it is given."""

Shard: TypeAlias = Callable[[str, Parameters, AllReduce], tuple[Parameters, AllReduce]]
"""See :attr:`Slices.shard`."""


@dataclass(frozen=True)
class Slices:
    """The functions of the package's slices that the core calls without importing them.

    Attributes:
        run_engine: runs a backward, and may trace it.
        on_local: called with a module when a gradient has stayed on its rank.
        on_rounded: called with a module whose gradients were rounded to the dtype of their buckets.
        on_averaged: called with each backward that has averaged modules.
        on_unowned: called with the tensors that such a backward reaches, and no reducer has.
        on_change: called when a reducer is added or removed.
        on_backward: called before each backward that accumulates gradients.
        shard: called with the label, the parameters and the communication of a new DDP module with
            the option ``shard_optimizer``; returns what takes the place of the last two.
        wait_in_forward: called with a DDP module and its new reducer, before its first forward.
        learn_layout: called with a new module of the mode ``"auto"``.
        report_when_freed: called with a DDP module and its new reducer; returns the finalizer.
    """

    run_engine: RunEngine = lambda _, __, engine: engine()
    on_local: Callable[[Reducer], None] = lambda _: None
    on_rounded: Callable[[Reducer], None] = lambda _: None
    on_averaged: OnAveraged = lambda _, __, ___: None
    on_unowned: Callable[[Sequence[Tensor]], None] = lambda _: None
    on_change: Callable[[], None] = lambda: None
    on_backward: Callable[[], None] = lambda: None
    shard: Shard = lambda _, parameters, communication: (parameters, communication)
    wait_in_forward: Callable[[Any, Reducer], None] = lambda _, __: None
    learn_layout: Callable[[Reducer], None] = lambda _: None
    report_when_freed: Callable[[Any, Reducer], Any] = lambda _, __: None


@dataclass
class Reducers:
    """The reducers of this process.

    Attributes:
        compiled: the compiled forwards of the backwards that run, by autograd node.
        running: the backwards that run, but for those inside of others.
        slices: what the slices add.
        version: how often a reducer was added.
        hooks: the hooks of others.
    """

    compiled: dict[Any, CompiledForward] = field(default_factory=dict)
    running: list[RunningBackward] = field(default_factory=list)
    slices: Slices = field(default_factory=Slices)
    version: int = 0
    hooks: HooksOfOthers = field(init=False)
    _all: list[weakref.ref[Reducer]] = field(default_factory=list)
    _walker: Walker = field(default_factory=Walker)
    _routes: dict[tuple[Any, ...], Route] = field(default_factory=dict)
    _unseen: dict[int, set[int]] = field(default_factory=dict)
    """The ids of the reducers that take part in a backward that was not walked, by backward."""

    def __post_init__(self) -> None:
        self.hooks = HooksOfOthers(self._nodes, self._parameters)

    def __len__(self) -> int:
        return len(self.alive())

    def add(self, reducer: Reducer) -> None:
        """Have a reducer take part in backwards, until it is freed."""
        self._all.append(weakref.ref(reducer))
        reducer.on_unreached = self.take
        self.version += 1
        self.forget_routes()
        # Routes keep reducers, and walks keep parameters.
        weakref.finalize(reducer.module.ddp, self.forget_routes).atexit = False
        self._name_all()
        self.hooks.forget()
        weakref.finalize(reducer, self._note_freed).atexit = False
        self.slices.on_change()

    def _name_all(self) -> None:
        """Tell modules with one label apart: labels are counted on each group."""
        alive = self.alive()
        labels = [reducer.module.label for reducer in alive]
        for reducer, label in zip(alive, labels, strict=True):
            reducer.queue.name = label
            if labels.count(label) > 1:
                reducer.queue.name += f" on group {reducer.module.group.group_name}"

    def discard(self, reducer: Reducer) -> None:
        self._all = [ref for ref in self._all if ref() is not reducer]
        self.forget_routes()
        self.slices.on_change()

    def _note_freed(self) -> None:
        self._all = [ref for ref in self._all if ref() is not None]
        self.slices.on_change()

    def alive(self) -> list[Reducer]:
        """In the order of their construction."""
        found = [ref() for ref in self._all]
        return [reducer for reducer in found if reducer is not None]

    def gradients(self) -> dict[int, list[Gradient]]:
        """The gradients that reducers average, by the ids of the parameters: a parameter may belong
        to several modules."""
        found: dict[int, list[Gradient]] = {}
        for reducer in self.alive():
            parameters = reducer.parameters.all
            for number in reducer.parameters.numbers:
                found.setdefault(id(parameters[number]), []).append((reducer, number))
        return found

    def run(self, engine: Callable[..., Any], outputs: Sequence[Any], *args: Any, **kw: Any) -> Any:
        """Take the place of ``torch.autograd.graph._engine_run_backward``, called with itself: from
        these outputs (tensors or gradient edges), and with gradients, retain_graph, create_graph,
        inputs; allow_unreachable, accumulate_grad."""
        if not kw.get("accumulate_grad") or backward_id() >= 0 or is_compiling_graph():
            return engine(outputs, *args, **kw)
        run = RunningBackward()
        self.running.append(run)
        nodes: list[Any] = []
        try:
            self.slices.on_backward()
            nodes = self._begin(run, outputs, *args, **kw)
            result = self.slices.run_engine(run, outputs, lambda: engine(outputs, *args, **kw))
        except BaseException as error:
            said = note_of_other_rank(run.taking_part, error)
            for reducer in run.taking_part:
                reducer.backward = None
            for reducer in run.taking_part:
                reducer.fail_backward(said or error, has_begun=run.has_failed_in_graph)
            # The error may have come when all was averaged: then the other ranks rebuild theirs.
            for reducer in run.taking_part:
                with contextlib.suppress(RuntimeError):
                    reducer.rebuild_after_first()
            if said is not None:
                raise said from error
            raise
        finally:
            self.running.remove(run)
            for node in nodes:
                self.compiled.pop(node, None)
        self._end(run)
        return result

    def take(self, reducer: Reducer) -> None:
        """Register a reducer whose gradient arrived although the walk did not reach it, for example
        from a nested backward (reentrant checkpointing). The reducer joins the running backward if
        there is only one. Otherwise its iteration ends with the nested backward.

        If other modules share its process group, its buckets are launched at the end of the
        backward, because the gradients of such modules may arrive in another order on each rank."""
        reducer.queue.is_at_end = any(
            each is not reducer and each.module.group is reducer.module.group
            for each in self.alive()
        )
        if not self.running:
            backward = backward_id()
            if backward not in self._unseen:
                after_backward(functools.partial(self._end_unseen, backward))
            self._unseen.setdefault(backward, set()).add(id(reducer))
            return
        if len(self.running) > 1:
            after_backward(reducer.end_backward)
            return
        run = reducer.backward = self.running[0]
        run.taking_part = [
            r for r in reversed(self.alive()) if r is reducer or r in run.taking_part
        ]

    def _end_unseen(self, backward: int) -> None:
        """End a backward that was not walked, in the launch order of the modules."""
        took_part = self._unseen.pop(backward)
        for reducer in reversed(self.alive()):
            if id(reducer) in took_part:
                reducer.end_unseen_backward()

    def _begin(
        self, run: RunningBackward, outputs: Sequence[Any], *args: Any, **kw: Any
    ) -> list[Any]:
        """Walk the autograd graph, and prepare the reducers that it reaches. Return the nodes of
        its compiled forwards."""
        run.keeps_graph = bool(args[1] if len(args) > 1 else kw.get("retain_graph", False))
        idle = [r for r in self.alive() if r.backward is None]
        expecting = {r for r in idle if not r.module.is_idle}
        others = {r for r in idle if r.outputs.entered or r.outputs.has_spent}
        if not expecting and not others:
            return []
        run.creates_graph = bool(args[2] if len(args) > 2 else kw.get("create_graph", False))
        run.only_some = bool(args[3] if len(args) > 3 else kw.get("inputs", False))
        self.hooks.refresh()
        found = self._walker.walk(outputs, with_entries=run.keeps_graph or bool(others))
        for reducer in expecting | others:
            if reducer.outputs.spend(found.nodes, keeps_graph=run.keeps_graph):
                text = second_backward(reducer.module.label)
                reducer.failures.leave(reducer.steps, text)
                reducer.module.refuse(text)
        for reducer in expecting:
            if not reducer.has_begun:  # There was another forward.
                reducer.outputs.entered.clear()
        expecting |= {r for r in others if r.expect_more(found.entries)}
        why = CREATES_GRAPH if run.creates_graph else SOME_INPUTS if run.only_some else ""
        why = ANOMALY if torch.is_anomaly_enabled() else why
        route = self._route(found, expecting, why)
        run.reached, run.has_others = route.reached, route.has_others
        run.taking_part += [r for r in reversed(self.alive()) if r in run.reached]
        _put_in_order(run.taking_part)
        for reducer in run.taking_part:
            reducer.backward = run
            reducer.begin_backward(run.reached[reducer])
            if run.keeps_graph:
                reducer.outputs.enter(found.entries)
        return self._add_compiled(found.compiled, route)  # Last: a reducer may refuse the backward.

    def _parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of all modules that require a gradient."""
        return itertools.chain(*(reducer.parameters.trained for reducer in self.alive()))

    def _nodes(self) -> Iterator[tuple[str, nn.Parameter, Any, int]]:
        """Name, AccumulateGrad node and number of reducers of each parameter of each module."""
        averaged = self.gradients()
        for reducer in self.alive():
            known = reducer.parameters
            for number, node in reducer.hooks.nodes.items():
                parameter = known.all[number]
                yield known.names[number], parameter, node, len(averaged[id(parameter)])

    def _route(self, found: Reached, expecting: Collection[Reducer], why: str) -> Route:
        """The route of a backward. If it reaches the same parameters as an earlier backward, from
        the same compiled forwards, it is that one's."""
        static = tuple(r.used.launches_after_backward for r in expecting)
        key = (*found.compiled.values(), *found.uncompiled, *expecting, static, why)
        route = self._routes.get(key)
        if route is None:
            route = self._find_route(found, expecting, why)
            # A leaf that no reducer owns may be an input, another one in each step.
            if not (found.uncompiled and route.unowned):
                if len(self._routes) >= _MOST_ROUTES:
                    self._routes.clear()
                self._routes[key] = route
        if route.unowned:
            self.slices.on_unowned(route.unowned)
        return route

    def _find_route(self, found: Reached, expecting: Collection[Reducer], why: str) -> Route:
        """Find the route of a backward. ``why``: the reason why no gradient is final, if any."""
        route, gradient_of = Route(), dict[int, Gradient]()
        all_gradients, edges = self.gradients(), found.edges()
        uncompiled = {id(node.variable) for node in found.uncompiled}
        for node, count in edges.values():
            leaf = node.variable
            every = all_gradients.get(id(leaf), ())
            averaged = [item for item in every if item[0] in expecting]
            if not every:
                route.unowned.append(leaf)
            not_final = why
            if len(averaged) > 1:
                not_final = not_final or SHARED
            elif id(leaf) in uncompiled:
                not_final = not_final or (NOT_COMPILED if count == 1 else SEVERAL)
            for reducer, number in averaged:
                reducer.hooks.follow(number, node)
                once = reducer.used.is_accumulated_once(number)
                once = once and number not in reducer.parameters.delayed
                route.reached.setdefault(reducer, {})[number] = not_final if once else SEVERAL
            if len(averaged) == 1:
                gradient_of[id(leaf)] = averaged[0]
            else:
                route.has_others = True
        for leaves in found.compiled.values():
            pairs = zip(leaves.positions, leaves.nodes, strict=True)
            nodes = {p: node for p, node in pairs if id(node.variable) in gradient_of}
            gradients = {p: gradient_of[id(node.variable)] for p, node in nodes.items()}
            final = [p for p, (reducer, n) in gradients.items() if not route.reached[reducer][n]]
            route.destinations.append(
                Destinations(
                    gradients,
                    frozenset(final),
                    {p: edges[id(node.variable)][1] for p, node in nodes.items()},
                    [nodes[p] for p in final],
                )
            )
        return route

    def _add_compiled(self, compiled: Iterable[Any], route: Route) -> list[Any]:
        """Record where the compiled forwards with these nodes store. Return these nodes."""
        nodes = []
        partial_sums: dict[Gradient, list[Tensor]] = {}
        for node, destinations in zip(compiled, route.destinations, strict=True):
            if destinations.gradients and node not in self.compiled:
                self.compiled[node] = CompiledForward(destinations, partial_sums)
                nodes.append(node)
        return nodes

    def forget_routes(self) -> None:
        """Forget routes and what walks have seen: a module was added or freed."""
        self._routes.clear()
        self._walker.forget()

    def _end(self, run: RunningBackward) -> None:
        first: BaseException | None = None
        for each in run.taking_part:
            each.backward = None
        for each in run.taking_part:
            try:
                if run.is_traced:
                    each.end_traced_backward()
                else:
                    each.end_backward()
            except BaseException as error:  # noqa: BLE001  The others must end too.
                said = note_of_other_rank([each], error)
                if said is not None:
                    said.__cause__ = error
                each.fail_backward(said or error)
                first = first or said or error
        if first is not None:
            raise first
        self._tell_listeners(run)

    def _tell_listeners(self, run: RunningBackward) -> None:
        averaged = [r for r in self.alive() if r.steps > r.record.steps_told]
        for reducer in averaged:
            reducer.record.steps_told = reducer.steps
            if reducer.memory.rounded:
                self.slices.on_rounded(reducer)
                reducer.memory.rounded.clear()
        for reducer in self.alive():
            if reducer.record.stays_local:
                reducer.record.stays_local = False
                # Of modules over the same weights, one averages for all.
                weights = {id(weight) for each in averaged for weight in each.parameters.trained}
                if weights.isdisjoint(map(id, reducer.parameters.trained)):
                    self.slices.on_local(reducer)
        if averaged:
            names = [reducer.queue.name for reducer in averaged]
            copied = (len(r.parameters.numbers) - r.record.num_stored for r in averaged)
            self.slices.on_averaged(run, names, sum(copied))


def _put_in_order(taking_part: Sequence[Reducer]) -> None:
    """Have modules that share a process group launch one after the other, in an order that is the
    same on all ranks: the module that was constructed last launches first, because the gradients of
    layers that are used last come first."""
    last_on: dict[Any, Reducer] = {}
    for reducer in taking_part:
        before = last_on.get(reducer.module.group)
        if before is not None:
            reducer.queue.previous, before.queue.next = before.queue, reducer.queue
        last_on[reducer.module.group] = reducer


reducers: Final = Reducers()
"""The reducers of DDP modules, and the compiled forwards of the backwards that run."""


def register_on_node(register: Callable[..., Any], hooks: Any, hook: Any) -> Any:
    """Register a hook on an autograd node, in the place of torch's function. The node may be an
    AccumulateGrad node of a managed module, whose hook must see the gradient before it is averaged;
    torch does not report which node has hooks."""
    registered = register_unless_asked(register, hooks, hook)
    if not is_of_module_hooks(hook):
        reducers.hooks.forget()
    return registered


def note_of_other_rank(taking_part: Sequence[Reducer], error: BaseException) -> Exception | None:
    """The note that another rank of these modules left about its failure, if the error is that of a
    collective; else ``None``."""
    if not isinstance(error, Exception):
        return None
    found = (reducer.failures.why_failed(reducer.steps, error) for reducer in taking_part)
    return next(filter(None, found), None)
