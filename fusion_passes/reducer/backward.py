"""Finds the parameters that a backward reaches, and the reducers that take part in it.

Before the engine runs, the autograd graph is walked once, to find which parameters get a gradient,
and from how many nodes. If only compiled forwards contribute to a gradient, it is *final* in their
compiled backwards, which may store it in its bucket and mark it ready. A hook on the AccumulateGrad
node marks all other gradients ready, as in DDP.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor, nn

from fusion_passes.layout.layout import Piece
from fusion_passes.reducer.copies import (
    ANOMALY,
    BESIDE,
    CREATES_GRAPH,
    HOOKS_UNKNOWN,
    NODE_HOOKED,
    NOT_COMPILED,
    RENUMBERED,
    SEVERAL,
    SHARED,
    SOME_INPUTS,
)
from fusion_passes.reducer.reducer import Reducer
from fusion_passes.state import Lifetime, process_state
from fusion_passes.torch_private.autograd import (
    AccumulateGrad,
    accumulates_in,
    after_backward,
    backward_id,
    hooks_on_node,
    register_unless_asked,
    registers_hooks,
    running_node,
)
from fusion_passes.torch_private.ddp import has_optimizer_in_backward
from fusion_passes.torch_private.dynamo import is_compiled_forward, is_compiling_graph

_Gradient: TypeAlias = tuple[Reducer, int]
"""The owner of a gradient: the reducer, and the number of the parameter there."""

_ReachedNumbers: TypeAlias = dict[Reducer, dict[int, str]]
"""See :attr:`RunningBackward.reached`."""


@dataclass(frozen=True)
class _Begun:
    """A buffer handed to a running compiled backward and not marked ready yet.

    Attributes:
        reducer: the reducer of the gradients.
        numbers: the parameters.
        offsets: the offset of each gradient, in elements.
        is_sum: whether other compiled forwards contribute to these gradients.
        is_bucket: whether the buffer is a part of a bucket.
    """

    reducer: Reducer
    numbers: Piece
    offsets: Sequence[int]
    is_sum: bool
    is_bucket: bool

    def gradients(self, memory: Tensor) -> list[Tensor]:
        """Each gradient in the memory: ``[numel]``."""
        sizes = (self.reducer.parameters.kinds[number].numel for number in self.numbers)
        return [memory[a : a + size] for a, size in zip(self.offsets, sizes, strict=True)]


@dataclass
class CompiledForward:
    """A compiled forward that the running backward differentiates. A position is the index of a
    tensor among the forward's tensor inputs, which is also the index of its edge in the
    ``next_functions`` of the forward's autograd node.

    Attributes:
        owners: the owner of each input's gradient, by position.
        final: positions of the inputs to whose gradients only compiled forwards contribute.
        contributions: how many compiled forwards contribute to the gradient, by position; if
            several do, the gradient is their sum.
        partial_sums: the parts that compiled backwards have given so far. All compiled forwards of
            one backward share this dictionary.
    """

    owners: Mapping[int, _Gradient]
    final: frozenset[int]
    contributions: Mapping[int, int]
    partial_sums: dict[_Gradient, list[Tensor]]
    _begun: dict[tuple[int, ...], _Begun] = field(default_factory=dict)
    _accumulates: dict[int, bool] = field(default_factory=dict)

    @property
    def accumulates(self) -> bool:
        """Whether the backward that runs the node of this forward accumulates the final gradients
        in ``.grad``. A node can run twice: in the backward that was walked, and in a nested one,
        when a hook calls ``torch.autograd.grad``. The nested backward returns its gradients."""
        backward = backward_id()
        if backward not in self._accumulates:
            edges = running_node().next_functions
            nodes = (edges[position][0] for position in self.final)
            self._accumulates[backward] = all(map(accumulates_in, nodes))
        return self._accumulates[backward]

    def _of(self, positions: Sequence[int]) -> tuple[Reducer, Piece] | None:
        """The reducer and the parameters of these positions, if the gradients belong to one module,
        are final, and have equally many contributions; else ``None``."""
        if not self.final.issuperset(positions):
            return None
        owners = [self.owners[position] for position in positions]
        reducer = owners[0][0]
        if any(owner is not reducer for owner, _ in owners):
            return None
        if len({self.contributions[position] for position in positions}) > 1:
            return None
        return reducer, tuple(number for _, number in owners)

    def memory_for_graph(
        self, positions: Sequence[int], offsets: Sequence[int], numel: int, dtype: torch.dtype
    ) -> Tensor | None:
        """As :meth:`Reducer.memory_for_graph`. If the gradient is a sum, the graph that contributes
        last stores its part in the bucket, and the other parts are added there."""
        if not self.accumulates:
            return None
        found = self._of(positions)
        if found is None:
            are_final = self.final.issuperset(positions)
            for position in self.owners.keys() & positions:
                reducer, number = self.owners[position]
                is_several = are_final and self.contributions[position] > 1
                reducer.note_no_memory((number,), SEVERAL if is_several else BESIDE)
            return None
        reducer, numbers = found
        sizes = [end - start for start, end in itertools.pairwise([*offsets, numel])]
        if sizes != [reducer.parameters.kinds[number].numel for number in numbers]:
            reducer.note_no_memory(numbers, RENUMBERED)
            return None
        # A hook may have been registered since the backward was walked.
        reasons = {number: reducer.why_not_stored(number) for number in numbers}
        if any(reasons.values()):
            for number, why in reasons.items():
                reducer.note_no_memory((number,), why or BESIDE)
            return None
        is_sum = self.contributions[positions[0]] > 1
        memory = None
        if not is_sum or self._is_last(reducer, numbers, positions):
            memory = reducer.memory_for_graph(numbers, offsets, numel, dtype)
        begun = _Begun(reducer, numbers, offsets, is_sum, memory is not None)
        self._begun[tuple(positions)] = begun
        return memory

    def _is_last(self, reducer: Reducer, numbers: Piece, positions: Sequence[int]) -> bool:
        """Whether the other compiled forwards have contributed to these sums."""
        found = {len(self.partial_sums.get((reducer, number), ())) for number in numbers}
        return found == {self.contributions[positions[0]] - 1}

    def mark_stored(
        self, memory: Tensor, positions: Sequence[int], copied: Sequence[int] = (), why: str = ""
    ) -> None:
        """As :func:`mark_ready`, for the compiled backward of this forward."""
        begun = self._begun.pop(tuple(positions), None) if self.accumulates else None
        if begun is None:
            return
        reducer, numbers = begun.reducer, begun.numbers
        reducer.join_streams()
        reducer.observe(numbers)
        if not reducer.gives_memory:
            return
        if begun.is_sum:
            gradients = begun.gradients(memory)
            if not self._is_last(reducer, numbers, positions):
                for number, part in zip(numbers, gradients, strict=True):
                    self.partial_sums.setdefault((reducer, number), []).append(part)
                return
            _add(gradients, [self.partial_sums.pop((reducer, number)) for number in numbers])
        if not begun.is_bucket:
            # Here and not in hooks, which run after the graph: a rank with another graph may store
            # these, and launch the bucket before the model's own collectives that come later.
            reducer.mark_stored(numbers, stored_apart=begun.gradients(memory))
            return
        copied = [self.owners[position][1] for position in copied]
        reducer.mark_stored(numbers, is_sum=begun.is_sum, copied=copied, why=why)


def _add(gradients: Sequence[Tensor], parts: Sequence[Sequence[Tensor]]) -> None:
    """Add the earlier parts of each sum to the last part, in autograd's order. Autograd computes
    the same sum apart from the bucket; :meth:`Reducer._replace_new` sets ``.grad`` to the bucket
    view."""
    first, *others = map(list, zip(*parts, strict=True))
    for part in itertools.chain(first, *others):
        if part.device.type != "cpu":  # It may be of another stream's memory.
            part.record_stream(torch.accelerator.current_stream(part.device))
    with torch.no_grad():
        for other in others:
            torch._foreach_add_(first, other)
        torch._foreach_add_(list(gradients), first)


@dataclass(eq=False)
class RunningBackward:
    """A running backward, with its nested backwards.

    Attributes:
        taking_part: the reducers that average in this backward, in launch order.
        reached: the parameters that this backward reaches, by reducer and number, each with the
            reason why its gradient is not final; empty if it is.
        keeps_graph, creates_graph, only_some: whether it was called with ``retain_graph=True``,
            ``create_graph=True``, ``inputs``.
        has_others: whether it reaches leaves that none, or several, of these reducers own.
        is_traced: whether a graph that compiled autograd traced has averaged all gradients.
        why_untraced: why compiled autograd did not trace this backward, if that was asked for.
        has_entered_graph: whether the traced graph runs or has run.
        has_failed_in_graph: whether the traced graph was compiled and raised an error when it ran;
            it may have launched some buckets.
    """

    taking_part: list[Reducer] = field(default_factory=list)
    reached: _ReachedNumbers = field(default_factory=dict)
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


@dataclass
class Reducers:
    """The reducers of this process.

    Attributes:
        compiled: the compiled forwards of the backwards that run, by autograd node.
        running: the backwards that run, but for those inside of others.
        on_local: called with a module's name when a gradient has stayed on its rank.
        on_rounded: called with a module whose gradients were rounded to the dtype of their buckets.
        on_averaged: called with each backward that has averaged modules.
        on_unowned: called with the tensors that such a backward reaches, and no reducer has.
        on_change: called when there is a reducer more, or one less.
        learn_layout: called with a new module of the mode ``"auto"``.
        report_when_freed: called with a DDP module and its new reducer; returns what ends that.
        version: how often a reducer was added.
    """

    compiled: dict[Any, CompiledForward] = field(default_factory=dict)
    running: list[RunningBackward] = field(default_factory=list)
    run_engine: RunEngine = lambda _, __, engine: engine()
    on_local: Callable[[str], None] = lambda _: None
    on_rounded: Callable[[Reducer], None] = lambda _: None
    on_averaged: OnAveraged = lambda _, __, ___: None
    on_unowned: Callable[[Sequence[Tensor]], None] = lambda _: None
    on_change: Callable[[], None] = lambda: None
    learn_layout: Callable[[Reducer], None] = lambda _: None
    report_when_freed: Callable[[Any, Reducer], Any] = lambda _, __: None
    version: int = 0
    _all: weakref.WeakValueDictionary[int, Reducer] = field(
        default_factory=weakref.WeakValueDictionary
    )
    _hooked: Mapping[int, str] | None = None
    _hooked_by: object = None

    def __len__(self) -> int:
        return len(self._all)

    def add(self, reducer: Reducer) -> None:
        """Have a reducer take part in backwards, until it is freed."""
        self._all[id(reducer)] = reducer
        reducer.on_unseen = self.take
        reducer.why_hooked = self.why_hooked
        self.version += 1
        self._name_all()
        self.forget_hooks()
        weakref.finalize(reducer, self.on_change).atexit = False
        self.on_change()

    def _name_all(self) -> None:
        """Tell modules with one label apart: labels are counted on each group."""
        alive = self.alive()
        labels = [reducer.label for reducer in alive]
        for reducer in alive:
            reducer.name = reducer.label
            if labels.count(reducer.label) > 1:
                reducer.name += f" on group {reducer.group.group_name}"

    def discard(self, reducer: Reducer) -> None:
        self._all.pop(id(reducer), None)
        self.on_change()

    def alive(self) -> list[Reducer]:
        """In the order of their construction."""
        return list(self._all.values())

    def owners(self) -> dict[int, list[_Gradient]]:
        """Whose gradients those of the trained parameters are, by the parameters' ids."""
        found: dict[int, list[_Gradient]] = {}
        for reducer in self.alive():
            parameters = reducer.parameters.all
            for number in reducer.numbers:
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
            nodes = self._begin(run, outputs, *args, **kw)
            result = self.run_engine(run, outputs, lambda: engine(outputs, *args, **kw))
        except BaseException as error:
            said = why_failed(run.taking_part, error)
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
        there is only one. Otherwise its round ends with the nested backward.

        If other modules share its process group, its buckets are launched at the end of the
        backward, because the gradients of such modules may arrive in another order on each rank."""
        if len(self.running) > 1 or not self.running:
            after_backward(reducer.end_backward if self.running else reducer.end_unseen_backward)
            return
        run = reducer.backward = self.running[0]
        reducer.launches_at_end = any(
            each is not reducer and each.group is reducer.group for each in self.alive()
        )
        run.taking_part = [
            r for r in reversed(self.alive()) if r is reducer or r in run.taking_part
        ]

    def _begin(
        self, run: RunningBackward, outputs: Sequence[Any], *args: Any, **kw: Any
    ) -> list[Any]:
        """Walk the autograd graph, and prepare the reducers that it reaches. Return the nodes of
        its compiled forwards."""
        run.keeps_graph = bool(args[1] if len(args) > 1 else kw.get("retain_graph", False))
        idle = [r for r in self.alive() if r.backward is None]
        expecting = {r for r in idle if r.is_expecting}
        others = {r for r in idle if r.entered or r.has_spent_outputs}
        if not expecting and not others:
            return []
        run.creates_graph = bool(args[2] if len(args) > 2 else kw.get("create_graph", False))
        run.only_some = bool(args[3] if len(args) > 3 else kw.get("inputs", False))
        self.find_hooked()  # It may refuse what there is.
        found = walk(outputs, with_entries=run.keeps_graph or bool(others))
        for reducer in expecting | others:
            reducer.spend_outputs(found.nodes, keeps_graph=run.keeps_graph)
        for reducer in expecting:
            if not reducer.has_begun:  # There was another forward.
                reducer.entered.clear()
        expecting |= {r for r in others if r.expect_more(found.entries)}
        why = CREATES_GRAPH if run.creates_graph else SOME_INPUTS if run.only_some else ""
        why = ANOMALY if torch.is_anomaly_enabled() else why
        owner_of = self._reached(run, found, expecting, why)
        nodes = self._add_compiled(found, owner_of, run.reached)
        run.taking_part += [r for r in reversed(self.alive()) if r in run.reached]
        _put_in_order(run.taking_part)
        for reducer in run.taking_part:
            reducer.backward = run
            reducer.begin_backward(run.reached[reducer])
            if run.keeps_graph:
                for node, numbers in found.entries.items():
                    reducer.entered.setdefault(node, set()).update(numbers)
        return nodes

    def find_hooked(self) -> Mapping[int, str]:
        """The parameters whose AccumulateGrad node has hooks of others, or may have some, by id,
        each with a reason for the report that says which of the two it is."""
        if self._hooked is not None and self._hooked_by is registers_hooks():
            return self._hooked
        found, owners = dict[int, str](), self.owners()
        for reducer in self.alive():
            for number, node in reducer.nodes.items():
                parameter = reducer.parameters.all[number]
                why = _in_words(hooks_on_node(node), len(owners[id(parameter)]))
                if why:
                    refuse_optimizer(reducer.parameters.names[number], parameter)
                    found[id(parameter)] = why
        self._hooked, self._hooked_by = found, registers_hooks()
        return found

    def _reached(
        self, run: RunningBackward, found: Reached, expecting: Collection[Reducer], why: str
    ) -> dict[int, _Gradient]:
        """Record the parameters of expecting reducers that a backward reaches, each with the reason
        why its gradient is not final (``why``: the reason for all of them). Return the owners of
        the gradients that belong to exactly one reducer, by the id of the parameter."""
        owner_of: dict[int, _Gradient] = {}
        nobodys: list[Tensor] = []
        all_owners = self.owners()
        for node, count in found.edges.values():
            leaf = node.variable
            every = all_owners.get(id(leaf), ())
            owners = [item for item in every if item[0] in expecting]
            if not every:
                nobodys.append(leaf)
            if owners:
                not_final = why or self._why_not_final(leaf, count, found, len(owners))
                for reducer, number in owners:
                    if reducer.nodes[number] is not node:
                        reducer.hook_behind(number, reducer.callbacks[number])
                    once = reducer.is_accumulated_once(number)
                    run.reached.setdefault(reducer, {})[number] = not_final if once else SEVERAL
            if len(owners) == 1:
                owner_of[id(leaf)] = owners[0]
            else:
                run.has_others = True
        if nobodys:
            self.on_unowned(nobodys)
        return owner_of

    def _why_not_final(self, leaf: Tensor, count: int, found: Reached, num_owners: int) -> str:
        if num_owners > 1:
            return SHARED
        if id(leaf) in found.uncompiled:
            return NOT_COMPILED if count == 1 else SEVERAL
        return ""

    def why_hooked(self, reducer: Reducer, number: int) -> str:
        """That somebody else has hooks on the autograd node of a parameter, or may have some, in
        words for the report; empty if nobody has."""
        parameter = reducer.parameters.all[number]
        if self._hooked is not None and self._hooked_by is registers_hooks():
            return self._hooked.get(id(parameter), "")
        owners = [r for r in self.alive() if any(p is parameter for p in r.parameters.all)]
        return _in_words(hooks_on_node(reducer.nodes[number]), len(owners))

    def forget_hooks(self) -> None:
        """Ask all nodes again which hooks they have: one may have been registered."""
        self._hooked = None

    def _add_compiled(
        self,
        found: Reached,
        owner_of: Mapping[int, _Gradient],
        reached: _ReachedNumbers,
    ) -> list[Any]:
        """Record the owner of the gradient at each position of each compiled forward. Return the
        nodes of these forwards."""
        nodes = []
        partial_sums: dict[_Gradient, list[Tensor]] = {}
        for node, leaves in found.compiled.items():
            contributions = {position: found.edges[id(leaf)][1] for position, leaf in leaves}
            owners = {n: owner_of[id(leaf)] for n, leaf in leaves if id(leaf) in owner_of}
            if owners and node not in self.compiled:
                final = (p for p, (reducer, n) in owners.items() if not reached[reducer][n])
                self.compiled[node] = CompiledForward(
                    owners, frozenset(final), contributions, partial_sums
                )
                nodes.append(node)
        return nodes

    def _end(self, run: RunningBackward) -> None:
        errors: list[BaseException] = []
        for each in run.taking_part:
            each.backward = None
        for each in run.taking_part:
            try:
                if run.is_traced:
                    each.end_traced_backward()
                else:
                    each.end_backward()
            except BaseException as error:  # noqa: BLE001  The others must end too.
                said = why_failed([each], error)
                each.fail_backward(said or error)
                errors.append(said or error)
        if errors:
            raise errors[0]
        self._tell_listeners(run)

    def _tell_listeners(self, run: RunningBackward) -> None:
        averaged = [reducer for reducer in self.alive() if reducer.steps > reducer.steps_told]
        for reducer in averaged:
            reducer.steps_told = reducer.steps
            if reducer.rounded:
                self.on_rounded(reducer)
                reducer.rounded.clear()
        for reducer in self.alive():
            if reducer.stays_local:
                reducer.stays_local = False
                # Of modules over the same weights, one averages for all.
                weights = {id(each.parameters.all[n]) for each in averaged for n in each.numbers}
                if weights.isdisjoint(id(reducer.parameters.all[n]) for n in reducer.numbers):
                    self.on_local(reducer.name)
        if averaged:
            names = [reducer.name for reducer in averaged]
            self.on_averaged(run, names, sum(reducer.num_copied for reducer in averaged))

    def reset(self) -> None:
        """Forget all reducers."""
        for reducer in self.alive():
            reducer.forget()
        given = [name for name in vars(self) if name.startswith("on_")]
        given += ["run_engine", "learn_layout", "report_when_freed"]
        vars(self).update(vars(Reducers()) | {name: getattr(self, name) for name in given})
        self.on_change()


def _in_words(hooks: tuple[int, int] | None, num_owners: int) -> str:
    """What hooks there are on a node that as many reducers have one on; empty if no others."""
    if hooks == (0, num_owners):
        return ""
    return NODE_HOOKED if hooks else HOOKS_UNKNOWN


def _put_in_order(taking_part: Sequence[Reducer]) -> None:
    """Have modules that share a process group launch one after the other, in an order that is the
    same on all ranks: the module that was constructed last launches first, because the gradients of
    layers that are used last come first."""
    last_on: dict[Any, Reducer] = {}
    for reducer in taking_part:
        before = last_on.get(reducer.group)
        if before is not None:
            reducer.follows, before.leads = before, reducer
        last_on[reducer.group] = reducer


reducers: Final = process_state.keep(
    Reducers(),
    "the reducers of DDP modules, and the compiled forwards of the backwards that run",
    Lifetime.MODULE,
    reset=Reducers.reset,
)


def register_on_node(register: Callable[..., Any], hooks: Any, hook: Any) -> Any:
    """Register a hook on an autograd node, in the place of torch's function. The node may be an
    AccumulateGrad node of a managed module, whose hook must see the gradient before it is averaged;
    torch does not report which node has hooks."""
    registered = register_unless_asked(register, hooks, hook)
    reducers.forget_hooks()
    return registered


def memory_of_bucket(
    positions: Sequence[int],
    offsets: Sequence[int],
    numel: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """Return the memory in which a compiled backward stores gradients, ``[numel]``: a part of a
    bucket, or new memory for the graph alone."""
    forward = reducers.compiled.get(running_node())
    memory = None
    if forward is not None:
        memory = forward.memory_for_graph(positions, offsets, numel, dtype)
    return torch.empty(numel, dtype=dtype, device=device) if memory is None else memory


def mark_ready(
    memory: Tensor, positions: Sequence[int], copied: Sequence[int] = (), why: str = ""
) -> None:
    """Notify the reducer that a compiled backward has stored gradients in the memory that it was
    given. It copied those at the positions ``copied``, for the reasons ``why``, joined by ``|``."""
    forward = reducers.compiled.get(running_node())
    if forward is not None:
        forward.mark_stored(memory, positions, copied, why)


def refuse_optimizer(name: str, parameter: nn.Parameter) -> None:
    """Refuse an optimizer that runs in the backward.

    Raises:
        ValueError: the parameter has one; it names the parameter and the remedy.
    """
    if has_optimizer_in_backward(parameter):
        raise ValueError(
            f"_apply_optimizer_in_backward, parameter {name!r}, is not supported while "
            "torch._inductor.config.ddp_fusion is set: the optimizer would run before the "
            "gradient is reduced. Step the optimizer after the backward, or set ddp_fusion = "
            "None before this module is wrapped."
        )


def why_failed(taking_part: Sequence[Reducer], error: BaseException) -> Exception | None:
    """The note that another rank of these modules left about its failure, if the error is that of a
    collective; else ``None``."""
    if not isinstance(error, Exception):
        return None
    found = (reducer.failures.why_failed(reducer.steps, error) for reducer in taking_part)
    return next(filter(None, found), None)


# --- The walk ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reached:
    """The result of a walk over an autograd graph.

    Attributes:
        edges: each AccumulateGrad node and the number of edges that end there, by the id of its
            tensor.
        uncompiled: ids of the tensors to whose gradients nodes contribute that are not compiled
            forwards.
        compiled: for each compiled forward, the leaves among its inputs, with their positions.
        nodes: all nodes but the AccumulateGrad nodes.
        entries: the output indices by which each compiled forward is differentiated, by node; empty
            unless they were asked for.
    """

    edges: Mapping[int, tuple[Any, int]]
    uncompiled: Collection[int]
    compiled: Mapping[Any, Sequence[tuple[int, Tensor]]]
    nodes: Collection[Any]
    entries: Mapping[Any, Collection[int]] = field(default_factory=dict)


def walk(outputs: Sequence[Any], *, with_entries: bool = False) -> Reached:
    """Walk the autograd graph from these tensors or gradient edges to its leaves; about a
    microsecond a node."""
    pending = [getattr(o, "grad_fn", None) or getattr(o, "node", None) for o in outputs]
    edges: dict[int, tuple[Any, int]] = {}
    compiled: dict[Any, list[tuple[int, Tensor]]] = {}
    # If the backward starts at a leaf, no compiled forward contributes to its gradient.
    roots = [node for node in pending if isinstance(node, AccumulateGrad)]
    _count(edges, roots)
    uncompiled = {id(node.variable) for node in roots}
    seen = set()
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaves = []
        for position, (following, _) in enumerate(node.next_functions):
            if isinstance(following, AccumulateGrad):
                leaves.append((position, following))
            elif following is not None:
                pending.append(following)
        if leaves:
            _count(edges, (leaf for _, leaf in leaves))
            if is_compiled_forward(node):
                compiled[node] = [(position, leaf.variable) for position, leaf in leaves]
            else:
                uncompiled.update(id(leaf.variable) for _, leaf in leaves)
    entries = _entries(outputs, seen, compiled) if with_entries else {}
    return Reached(edges, uncompiled, compiled, seen, entries)


def _entries(
    outputs: Sequence[Any], nodes: Iterable[Any], compiled: Collection[Any]
) -> dict[Any, set[int]]:
    """The output indices by which compiled forwards are differentiated, from these outputs and from
    other nodes."""
    roots = (
        (getattr(o, "grad_fn", None) or getattr(o, "node", None), o.output_nr) for o in outputs
    )
    edges = itertools.chain(roots, *(node.next_functions for node in nodes))
    found: dict[Any, set[int]] = {}
    for node, number in edges:
        if node in compiled:
            found.setdefault(node, set()).add(number)
    return found


def _count(edges: dict[int, tuple[Any, int]], nodes: Iterable[Any]) -> None:
    for node in nodes:
        leaf = id(node.variable)
        edges[leaf] = node, edges.get(leaf, (node, 0))[1] + 1
