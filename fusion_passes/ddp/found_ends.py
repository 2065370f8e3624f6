"""What the parameters in which a backward ends say of it: whose gradients which of its graphs give.

A training loop comes to the same parameters in each step, so what was found is kept, until options,
modules, or which parameters they train are others.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from torch import nn

from fusion_passes.agreement.protocol import participants
from fusion_passes.config import FusionConfig
from fusion_passes.ddp.aot_obstacles import ALL_SPARSE, NOT_COMPILED_MOSTLY
from fusion_passes.ddp.autograd_graph import Ends
from fusion_passes.ddp.averaged import AveragedModule, kept_of, why_incomplete
from fusion_passes.ddp.comm_hooks import is_hooked, sent_as
from fusion_passes.ddp.modules import registry
from fusion_passes.ddp.prepared import Described, Lent, Numbered, PreparedForwards
from fusion_passes.torch_private.ddp import parameters_of

_KEPT: Final = 64
"""How many backwards are remembered: a step may have several, and each branch of control flow."""


@dataclass(frozen=True)
class FoundEnds:
    """What was found of a backward.

    Attributes:
        places: of the compiled forwards with dense gradients, among all that it reaches.
        described: these forwards.
        lent: whose parameters those in their graphs stand for.
        outside: numbers of the parameters whose gradients come from elsewhere, by module.
        modules: the names of all modules that it reaches.
        why_not: why it cannot be averaged by its graphs; empty if it can, for all that is seen
            here.
        obstructed: the modules whose compile may have a better reason.
    """

    places: tuple[int, ...] = ()
    described: tuple[Described, ...] = ()
    lent: tuple[Lent, ...] = ()
    outside: dict[str, frozenset[int]] = field(default_factory=dict)
    modules: tuple[str, ...] = ()
    why_not: str = ""
    obstructed: tuple[str, ...] = ()

    def parameters(self) -> list[nn.Parameter]:
        """Those whose gradients come from the compiled forwards."""
        own = {name: _parameters_of(name) for name in self.modules}
        return [own[name][number] for item in self.described for name, number in item.parameters]

    def averaged(self) -> tuple[AveragedModule, ...]:
        """The modules, with the gradients that they have now."""
        reached = [parameter for item in self.described for parameter in item.parameters]
        return tuple(
            AveragedModule(participants[name], kept_of(name, reached), self.outside[name])
            for name in self.modules
        )


@dataclass
class FoundBackwards:
    """What was found of the latest backwards that can be averaged."""

    _found: OrderedDict[object, tuple[object, FoundEnds]] = field(default_factory=OrderedDict)

    def of(self, ends: Ends, config: FusionConfig, prepared: PreparedForwards) -> FoundEnds:
        """What the ends of a backward say of it.

        Args:
            ends: where it ends.
            config: the options.
            prepared: the forwards whose backwards reduce gradients.
        """
        # An id stands for the same parameter as long as the registry, whose modules keep their
        # parameters, is the same; of any other tensor, only that it is none of them matters.
        key = tuple(
            (region is None, *[place for place, _ in edges], *[id(leaf) for _, leaf in edges])
            for region, edges in ends.by_region.items()
        )
        state, found = self._found.get(key, (None, None))
        if found is not None and state == _state_of(found.modules, config, prepared):
            return found
        found = _find(ends, config, prepared)
        self._found.pop(key, None)
        if not found.why_not:
            self._found[key] = _state_of(found.modules, config, prepared), found
            while len(self._found) > _KEPT:
                self._found.popitem(last=False)
        return found


def _state_of(names: Sequence[str], config: FusionConfig, prepared: PreparedForwards) -> object:
    """All that is read beside the ends of a backward."""
    modules = []
    for name in names:
        ddp = registry.ddp_of(name)
        if ddp is None:
            return None
        trained = [parameter.requires_grad for parameter in parameters_of(ddp)]
        modules.append((ddp.static_graph, is_hooked(ddp), sent_as(ddp), trained))
    return config, registry.version, prepared.version, modules


def _find(ends: Ends, config: FusionConfig, prepared: PreparedForwards) -> FoundEnds:
    regions = dict[int, list[tuple[int, Numbered]]]()
    outside = dict[Numbered, None]()
    place, is_shared = -1, False
    for region, edges in ends.by_region.items():
        place += region is not None
        for index, leaf in edges:
            parameter = registry.numbered(leaf)
            is_shared |= parameter is None and registry.manages(leaf)
            if parameter is None or parameter[1] in registry.module(parameter[0]).sparse:
                continue
            if region is None:  # Autograd adds up what comes to a parameter from several places.
                outside[parameter] = None
            else:
                regions.setdefault(place, []).append((index, parameter))
    if not regions:
        return FoundEnds(why_not=NOT_COMPILED_MOSTLY if outside else ALL_SPARSE)
    if is_shared:
        return FoundEnds(why_not="two DDP modules share a parameter")
    described = tuple(Described.of(inputs, config) for inputs in regions.values())
    reached = [parameter for item in described for parameter in item.parameters]
    modules = tuple(dict.fromkeys(name for name, _ in (*reached, *outside)))
    why_not = why_incomplete(described, tuple(outside))
    lent = []
    for item in described:
        found = prepared.lent_to(item)
        if isinstance(found, str):
            return FoundEnds(why_not=why_not or found, obstructed=() if why_not else item.modules)
        lent.append(found)
    return FoundEnds(
        tuple(regions),
        described,
        tuple(lent),
        {name: frozenset(n for of, n in outside if of == name) for name in modules},
        modules,
        why_not,
    )


def _parameters_of(name: str) -> list[nn.Parameter]:
    ddp = registry.ddp_of(name)
    assert ddp is not None, "it has a backward"
    return parameters_of(ddp)
