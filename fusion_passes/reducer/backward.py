"""What a backward reaches, and which reducers take part in it.

Before the engine runs, the autograd graph is walked once. It says which parameters get a gradient,
and from how many nodes. One that comes from compiled forwards alone, and that nobody else looks at,
is *final* there: the compiled backward may store it in its bucket and mark it ready. All other
gradients are marked ready by a hook behind their accumulation, as in DDP.
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
"""Whose gradient it is: the reducer, and the parameter's number there."""

_ReachedNumbers: TypeAlias = dict[Reducer, dict[int, str]]
"""See :attr:`RunningBackward.reached`."""


@dataclass(frozen=True)
class _Begun:
    """Memory that a compiled backward was given, in which gradients are not stored yet: at which
    offsets in elements, whether each is a sum, of which other compiled forwards give parts, and
    whether the memory is a bucket's."""

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
    """A compiled forward in the backward that runs. Its tensor inputs have positions, counted from
    0: the autograd node of the forward has an edge for each.

    Attributes:
        owners: whose gradient the one of an input is, by its position.
        final: positions of the inputs whose gradients compiled forwards give, and nothing else.
        contributions: how many compiled forwards give a part of an input's gradient, by position:
            with several of them, it is a sum.
        partial_sums: the parts that compiled backwards have given so far; one dictionary for all
            forwards of the backward that runs.
    """

    owners: Mapping[int, _Gradient]
    final: frozenset[int]
    contributions: Mapping[int, int]
    partial_sums: dict[_Gradient, list[Tensor]]
    _begun: dict[tuple[int, ...], _Begun] = field(default_factory=dict)
    _accumulates: dict[int, bool] = field(default_factory=dict)

    @property
    def accumulates(self) -> bool:
        """Whether the backward that runs this forward's node accumulates its final gradients. The
        node can run twice: in the backward that was walked, and in one inside of it, which a hook
        calls with ``torch.autograd.grad``, whose gradients are no parameter's."""
        backward = backward_id()
        if backward not in self._accumulates:
            edges = running_node().next_functions
            nodes = (edges[position][0] for position in self.final)
            self._accumulates[backward] = all(map(accumulates_in, nodes))
        return self._accumulates[backward]

    def _of(self, positions: Sequence[int]) -> tuple[Reducer, Piece] | None:
        """Whose gradients these are, if they are of one module, final, and sums of as many."""
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
        """As :meth:`Reducer.memory_for_graph`. Of a sum, the part that comes last is stored in the
        bucket, and the others are added there."""
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
        """Whether all other parts of these sums are there."""
        found = {len(self.partial_sums.get((reducer, number), ())) for number in numbers}
        return found == {self.contributions[positions[0]] - 1}

    def mark_stored(
        self, memory: Tensor, positions: Sequence[int], copied: Sequence[int] = (), why: str = ""
    ) -> None:
        """As :func:`mark_ready`, for this forward."""
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
            # Here and not by hooks, behind the graph: ranks with other graphs may store these, and
            # then launch what collectives of the model's own follow.
            reducer.mark_stored(numbers, stored_apart=begun.gradients(memory))
            return
        copied = [self.owners[position][1] for position in copied]
        reducer.mark_stored(numbers, is_sum=begun.is_sum, copied=copied, why=why)


def _add(gradients: Sequence[Tensor], parts: Sequence[Sequence[Tensor]]) -> None:
    """Add to the last part of each sum those before it, in autograd's order. Autograd adds them
    too; ``.grad`` becomes the bucket's place all the same (:meth:`Reducer._replace_new`)."""
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
    """A backward that runs, with all that run inside of it, and how it was called
    (``retain_graph=True``, ``create_graph=True``, ``inputs``).

    Attributes:
        taking_part: the reducers that average in it, in the order in which they launch.
        reached: numbers of the parameters that it reaches, by reducer, each with the reason why its
            gradient is not final where a compiled backward gives it; empty if it is.
        has_others: whether it reaches leaves that not just one of these reducers has.
        is_traced: whether a graph that was traced of it has averaged all gradients.
        why_untraced: why it was not, where that was asked for.
        has_entered_graph: whether the graph that was traced of it runs, or has run.
        has_failed_in_graph: whether that was compiled, and has failed as it ran: it may have
            launched some of its buckets.
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
"""Receives a backward, the names of the modules that it has averaged, and how many of their
gradients were copied into their buckets."""

RunEngine: TypeAlias = Callable[[RunningBackward, Sequence[Any], Callable[[], Any]], Any]
"""Runs a backward of these outputs, by the call of autograd's engine that it is given."""


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
        """Have a module take part of which a gradient has come though the walk has not reached it:
        from a backward inside of a node, as of reentrant checkpointing. It joins the backward that
        runs, if only one does. Else its round ends with the inner backward.

        Where other modules are averaged over the same ranks, its buckets are launched at the end of
        the backward: gradients of such modules may come in another order on each rank."""
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
        """Walk the graph, and prepare the reducers that it reaches. Return the nodes of its
        compiled forwards."""
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
        """The parameters on whose autograd nodes somebody else has hooks, or may have some, by id,
        each with which of the two it is, for the report."""
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
        """Note which parameters of the reducers that average a backward reaches, each with why its
        gradient is not final (``why``: of all). Return whose gradients those are that one
        reducer has, by the parameters' ids."""
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
        """Note whose gradients come from which position of each compiled forward. Return the nodes
        of these forwards."""
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
    """Have modules that share a process group launch one after the other, in an order that no rank
    can see otherwise: the last that was constructed comes first, as do the gradients of what is
    used last."""
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
    """Register a hook on an autograd node, of which torch tells nobody: it may be one that
    accumulates a parameter's gradient, and must see that before it is averaged."""
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
    """Memory in which a compiled backward stores gradients: ``[numel]``, a part of a bucket, or of
    the graph's own."""
    forward = reducers.compiled.get(running_node())
    memory = None
    if forward is not None:
        memory = forward.memory_for_graph(positions, offsets, numel, dtype)
    return torch.empty(numel, dtype=dtype, device=device) if memory is None else memory


def mark_ready(
    memory: Tensor, positions: Sequence[int], copied: Sequence[int] = (), why: str = ""
) -> None:
    """A compiled backward has stored gradients in the memory that it was given; those of ``copied``
    by a copy, for reasons with ``|`` between them."""
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
    """What another rank of these modules has said of its failure, where a collective has failed."""
    if not isinstance(error, Exception):
        return None
    found = (reducer.failures.why_failed(reducer.steps, error) for reducer in taking_part)
    return next(filter(None, found), None)


# --- The walk ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reached:
    """Where an autograd graph ends.

    Attributes:
        edges: the nodes that accumulate gradients, by the id of the tensor, and how many edges end
            there.
        uncompiled: ids of those in which what is not compiled accumulates.
        compiled: for each compiled forward, those among its inputs, with their positions.
        nodes: all that it has, but those that accumulate.
        entries: by which outputs compiled forwards are entered: indices, by node; if that was asked
            for.
    """

    edges: Mapping[int, tuple[Any, int]]
    uncompiled: Collection[int]
    compiled: Mapping[Any, Sequence[tuple[int, Tensor]]]
    nodes: Collection[Any]
    entries: Mapping[Any, Collection[int]] = field(default_factory=dict)


def walk(outputs: Sequence[Any], *, with_entries: bool = False) -> Reached:
    """Find where the graph behind these tensors or gradient edges ends; about a microsecond a
    node."""
    pending = [getattr(o, "grad_fn", None) or getattr(o, "node", None) for o in outputs]
    edges: dict[int, tuple[Any, int]] = {}
    compiled: dict[Any, list[tuple[int, Tensor]]] = {}
    # Where the backward starts at a leaf, no graph gives its gradient.
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
    """Where compiled forwards are entered, from these outputs and from other nodes."""
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
