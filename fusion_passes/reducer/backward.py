"""What a backward reaches, and which reducers take part in it.

Before the engine runs, the autograd graph is walked once. It says which parameters get a gradient,
and from how many places: one that comes from a single compiled forward, and that nobody else looks
at, is *final* there, and the compiled backward may store it in its bucket and mark it ready. All
other gradients are marked ready by a hook behind their accumulation, as in DDP.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from fusion_passes.reducer.layout import Piece
from fusion_passes.reducer.reducer import Reducer
from fusion_passes.state import Lifetime, process_state
from fusion_passes.torch_private import is_compiled_forward, is_compiling_graph
from fusion_passes.torch_private.autograd import (
    AccumulateGrad,
    accumulates_plainly,
    after_backward,
    backward_id,
    hooks_on_node,
    running_node,
    sequence_number,
)

_ACCUMULATES: Final = "accumulate_grad"


@dataclass
class Region:
    """A compiled forward in the backward that runs.

    Attributes:
        owners: for each place among the inputs of the forward, whose gradient it is: the reducer,
            and the parameter's number there.
        final: the places whose gradients are final.
    """

    owners: Mapping[int, tuple[Reducer, int]]
    final: frozenset[int]
    _stored: dict[Piece, tuple[Reducer, Piece]] = field(default_factory=dict)

    def _of(self, places: Sequence[int]) -> tuple[Reducer, Piece] | None:
        """Whose gradients these are, if they are of one module, and final."""
        if not self.final.issuperset(places):
            return None
        owners = [self.owners[place] for place in places]
        reducer = owners[0][0]
        if any(owner is not reducer for owner, _ in owners):
            return None
        return reducer, tuple(number for _, number in owners)

    def memory(self, places: Sequence[int], offsets: Sequence[int], numel: int) -> Tensor | None:
        """See :meth:`fusion_passes.reducer.reducer.Reducer.memory`."""
        found = self._of(places)
        if found is None:
            return None
        reducer, numbers = found
        memory = reducer.memory(numbers, offsets, numel)
        if memory is not None:
            self._stored[tuple(places)] = found
        return memory

    def mark_ready(self, places: Sequence[int]) -> None:
        """A compiled backward has stored these gradients."""
        stored = self._stored.pop(tuple(places), None)
        if stored is not None:
            reducer, numbers = stored
            reducer.mark_ready(numbers)
        elif (found := self._of(places)) is not None:
            reducer, numbers = found
            reducer.observe(numbers)


@dataclass(eq=False)
class Run:
    """A backward that runs, with all that run inside of it.

    Attributes:
        taking_part: the reducers that average in it, in the order in which they launch.
    """

    taking_part: list[Reducer]


@dataclass
class Reducers:
    """The reducers of this process.

    Attributes:
        regions: of the backwards that run, by autograd node.
        running: the backwards that run, but for those inside of others.
        on_local: called with a module's label when a gradient has stayed on its rank.
        on_averaged: called with the labels of the modules that a backward has averaged, and how
            many of their gradients were copied into their buckets.
        on_unowned: called with the tensors that such a backward reaches, and no reducer has.
        version: how often one was added.
    """

    regions: dict[Any, Region] = field(default_factory=dict)
    running: list[Run] = field(default_factory=list)
    on_local: Callable[[str], None] = lambda _: None
    on_averaged: Callable[[Sequence[str], int], None] = lambda _, __: None
    on_unowned: Callable[[Sequence[Tensor]], None] = lambda _: None
    version: int = 0
    _all: list[weakref.ref[Reducer]] = field(default_factory=list)
    _hooked: frozenset[int] | None = None
    _owners: dict[int, list[tuple[weakref.ref[Reducer], int]]] | None = None

    def __len__(self) -> int:
        return len(self._all)

    def add(self, reducer: Reducer) -> None:
        """Have a reducer take part in backwards, until it is freed."""
        self._all.append(weakref.ref(reducer, self._forget))
        reducer.on_unseen = self.take
        self.version += 1
        self.forget_hooks()
        self._owners = None

    def discard(self, reducer: Reducer) -> None:
        self._all = [ref for ref in self._all if ref() is not reducer]
        self._owners = None

    def _forget(self, gone: weakref.ref[Reducer]) -> None:
        self._all = [ref for ref in self._all if ref is not gone]
        self._owners = None

    def alive(self) -> list[Reducer]:
        """In the order of their construction."""
        return [reducer for ref in self._all if (reducer := ref()) is not None]

    def owners_of(self, parameter: Tensor) -> list[tuple[Reducer, int]]:
        """The reducers of a parameter's gradient, and its number in each."""
        found = self._owners
        if found is None:
            found = {}
            for reducer in self.alive():
                for number in reducer.numbers:
                    key = id(reducer.parameters.all[number])
                    found.setdefault(key, []).append((weakref.ref(reducer), number))
            self._owners = found
        known = [(ref(), number) for ref, number in found.get(id(parameter), ())]
        return [(owner, number) for owner, number in known if owner is not None]

    def run(self, engine: Callable[..., Any], outputs: Sequence[Any], *args: Any, **kw: Any) -> Any:
        """Call ``engine`` as ``torch.autograd.graph._engine_run_backward`` would be called.

        Args:
            engine: runs the backward.
            outputs: tensors or gradient edges to start from.
            args: gradients, retain_graph, create_graph, inputs.
            kw: allow_unreachable, accumulate_grad.
        """
        if not kw.get(_ACCUMULATES) or backward_id() >= 0 or is_compiling_graph():
            return engine(outputs, *args, **kw)
        run = Run([])
        self.running.append(run)
        nodes: list[Any] = []
        try:
            nodes = self._begin(run, outputs, *args, **kw)
            result = engine(outputs, *args, **kw)
        except BaseException as error:
            said = why_failed(run.taking_part, error)
            for reducer in run.taking_part:
                reducer.backward = None
                reducer.fail_backward(said or error)
            if said is not None:
                raise said from error
            raise
        finally:
            self.running.remove(run)
            for node in nodes:
                self.regions.pop(node, None)
        self._end(run.taking_part)
        return result

    def take(self, reducer: Reducer) -> None:
        """A gradient has come of a module that the walk has not reached: from a backward inside of
        a node, as of reentrant checkpointing. It takes part in the backward that runs, if that is
        one alone; otherwise its round ends with the inner backward."""
        if len(self.running) == 1:
            reducer.backward = self.running[0]
            self.running[0].taking_part.append(reducer)
        else:
            after_backward(reducer.end_backward)

    def _begin(self, run: Run, outputs: Sequence[Any], *args: Any, **kw: Any) -> list[Any]:
        """Walk the graph, and prepare the reducers that it reaches; the nodes of its regions."""
        keeps_graph = bool(args[1] if len(args) > 1 else kw.get("retain_graph", False))
        idle = [r for r in self.alive() if r.backward is None]
        expecting = {r for r in idle if r.is_expecting}
        others = {r for r in idle if r.entered}
        if not expecting and not others:
            return []
        creates_graph = bool(args[2] if len(args) > 2 else kw.get("create_graph", False))
        only_some = bool(args[3] if len(args) > 3 else kw.get("inputs", False))
        found = walk(outputs, with_entries=keeps_graph or bool(others))
        expecting |= {r for r in others if r.expects_more(found.entries)}
        reached: dict[Reducer, set[int]] = {}
        owner_of: dict[int, tuple[Reducer, int]] = {}
        final: set[int] = set()
        unowned: list[Tensor] = []
        for leaf, count in found.edges.values():
            owners = [item for item in self.owners_of(leaf) if item[0] in expecting]
            for reducer, number in owners:
                reached.setdefault(reducer, set()).add(number)
            if not owners and not self.owners_of(leaf):
                unowned.append(leaf)
            if len(owners) == 1:
                owner_of[id(leaf)] = owners[0]
                if count == 1 and not creates_graph and not only_some and self._is_plain(leaf):
                    final.add(id(leaf))
        if unowned:
            self.on_unowned(unowned)
        nodes = self._add_regions(found, owner_of, final)
        run.taking_part += [r for r in reversed(self.alive()) if r in reached]
        _put_in_order(run.taking_part)
        for reducer in run.taking_part:
            reducer.backward = run
            reducer.begin_backward(reached[reducer])
            if keeps_graph:
                reducer.entered |= found.entries
        return nodes

    def _is_plain(self, leaf: Tensor) -> bool:
        """Whether nobody but a reducer looks at a gradient before it is averaged."""
        if self._hooked is None:
            self._hooked = frozenset(
                id(reducer.parameters.all[number])
                for reducer in self.alive()
                for number, node in reducer.nodes.items()
                if hooks_on_node(node) != (0, len(self.owners_of(reducer.parameters.all[number])))
            )
        return id(leaf) not in self._hooked and accumulates_plainly(leaf)

    def forget_hooks(self) -> None:
        """Ask all nodes again which hooks they have: one may have been registered."""
        self._hooked = None

    def _add_regions(
        self,
        found: Reached,
        owner_of: Mapping[int, tuple[Reducer, int]],
        final: Collection[int],
    ) -> list[Any]:
        """Note whose gradients come from which place of each compiled forward; their nodes."""
        nodes = []
        for node, leaves in found.compiled.items():
            owners = {p: owner_of[id(leaf)] for p, leaf in leaves if id(leaf) in owner_of}
            if owners and node not in self.regions:
                places = frozenset(p for p, leaf in leaves if id(leaf) in final)
                self.regions[node] = Region(owners, places)
                nodes.append(node)
        return nodes

    def _end(self, taking_part: Sequence[Reducer]) -> None:
        errors: list[BaseException] = []
        for each in taking_part:
            each.backward = None
            try:
                each.end_backward()
            except BaseException as error:  # noqa: BLE001  The others must end too.
                said = why_failed([each], error)
                each.fail_backward(said or error)
                errors.append(said or error)
        if errors:
            raise errors[0]
        self._tell()

    def _tell(self) -> None:
        averaged, copied = [], 0
        for reducer in self.alive():
            if reducer.stays_local:
                reducer.stays_local = False
                self.on_local(reducer.label)
            if reducer.steps > reducer.steps_told:
                reducer.steps_told = reducer.steps
                averaged.append(reducer.label)
                copied += reducer.num_copied
        if averaged:
            self.on_averaged(averaged, copied)

    def tell(
        self,
        *,
        on_local: Callable[[str], None],
        on_unowned: Callable[[Sequence[Tensor]], None],
        on_averaged: Callable[[Sequence[str], int], None],
    ) -> None:
        """Have these called from now on; see the attributes."""
        self.on_local, self.on_unowned, self.on_averaged = on_local, on_unowned, on_averaged

    def reset(self) -> None:
        """Forget all reducers."""
        for reducer in self.alive():
            reducer.forget()
        told = self.on_local, self.on_averaged, self.on_unowned
        vars(self).update(vars(Reducers()))
        self.on_local, self.on_averaged, self.on_unowned = told


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


def memory_of_bucket(
    places: Sequence[int],
    offsets: Sequence[int],
    numel: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """Memory in which a compiled backward stores gradients: ``[numel]``, a part of a bucket, or of
    the graph's own."""
    region = reducers.regions.get(running_node())
    memory = region.memory(places, offsets, numel) if region is not None else None
    return torch.empty(numel, dtype=dtype, device=device) if memory is None else memory


def mark_ready(places: Sequence[int]) -> None:
    """A compiled backward has stored the gradients of these places of its forward's inputs."""
    region = reducers.regions.get(running_node())
    if region is not None:
        region.mark_ready(places)


def why_failed(taking_part: Sequence[Reducer], error: BaseException) -> Exception | None:
    """What another rank of these modules has said of its failure, where a collective has failed."""
    if not isinstance(error, Exception):
        return None
    found = (reducer.words.why_failed(reducer.steps, error) for reducer in taking_part)
    return next(filter(None, found), None)


# --- The walk ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reached:
    """Where an autograd graph ends.

    Attributes:
        edges: the tensors in which gradients are accumulated, and how many edges end there, by id;
            those of what is not compiled count twice.
        compiled: for each compiled forward, those among its inputs, with their places.
        entries: where compiled forwards are entered: the number of the node, and of the output; if
            that was asked for.
    """

    edges: Mapping[int, tuple[Tensor, int]]
    compiled: Mapping[Any, Sequence[tuple[int, Tensor]]]
    entries: frozenset[tuple[int, int]] = frozenset()


def walk(outputs: Sequence[Any], *, with_entries: bool = False) -> Reached:
    """Find where the graph behind these tensors or gradient edges ends; about a microsecond a
    node.

    Args:
        outputs: tensors or gradient edges.
        with_entries: whether it is noted where compiled forwards are entered.
    """
    pending = [getattr(o, "grad_fn", None) or getattr(o, "node", None) for o in outputs]
    edges: dict[int, tuple[Tensor, int]] = {}
    compiled: dict[Any, list[tuple[int, Tensor]]] = {}
    # Where the backward starts at a leaf, no graph gives its gradient.
    _count(edges, [n.variable for n in pending if isinstance(n, AccumulateGrad)], 2)
    seen = set()
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaves = []
        for place, (following, _) in enumerate(node.next_functions):
            if isinstance(following, AccumulateGrad):
                leaves.append((place, following.variable))
            elif following is not None:
                pending.append(following)
        if leaves:
            is_compiled = is_compiled_forward(node)
            _count(edges, [leaf for _, leaf in leaves], 1 if is_compiled else 2)
            if is_compiled:
                compiled[node] = leaves
    entries = _entries(outputs, seen, compiled) if with_entries else frozenset()
    return Reached(edges, compiled, entries)


def _entries(
    outputs: Sequence[Any], nodes: Iterable[Any], compiled: Collection[Any]
) -> frozenset[tuple[int, int]]:
    """Where compiled forwards are entered, from these outputs and from other nodes."""
    roots = (
        (getattr(o, "grad_fn", None) or getattr(o, "node", None), o.output_nr) for o in outputs
    )
    edges = itertools.chain(roots, *(node.next_functions for node in nodes))
    return frozenset((sequence_number(node), number) for node, number in edges if node in compiled)


def _count(edges: dict[int, tuple[Tensor, int]], leaves: Iterable[Tensor], by: int) -> None:
    for leaf in leaves:
        edges[id(leaf)] = leaf, edges.get(id(leaf), (leaf, 0))[1] + by
