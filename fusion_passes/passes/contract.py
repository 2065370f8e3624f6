"""What a pass is, and what the pipeline may rely on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

from torch import fx

from fusion_passes.passes.verify import GraphFacts
from fusion_passes.plan.placement import Placement


class GraphPass(ABC):
    """A frozen dataclass whose fields are its options, all of them plain values.

    Attributes:
        others_need_it: whether the passes after it work on what it makes: where it is switched
            off, they do not run.
    """

    others_need_it: ClassVar[bool] = False

    @property
    def name(self) -> str:
        """By which ``TORCHINDUCTOR_DISABLED_PASSES`` switches it off, and under which it is timed
        and traced."""
        return type(self).__name__

    @abstractmethod
    def __call__(self, graph: fx.Graph) -> bool:
        """Rewrite ``graph`` in place.

        Returns:
            Whether it has changed the graph: exactly then.
        """

    def facts_after(self, before: GraphFacts) -> GraphFacts:
        """What must be true of the graph after the pass: the same as before, for most."""
        return before

    def placements(self) -> Mapping[str, Sequence[Placement]]:
        """Where the pass places DDP's collectives, and why, by group name and in the order of
        their launches; empty for a pass that places none."""
        return {}
