"""Hooks on the autograd nodes that accumulate gradients in parameters: ``register_prehook`` and
``register_hook`` of the node behind a parameter.

As with eager DDP, they see the gradient of this rank, and may change it. So a gradient that has one
is averaged when its backward has ended: a graph that was compiled with a forward would do it
before them, and a traced one before those that run when the gradient has been accumulated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from fusion_passes.ddp.modules import registry
from fusion_passes.reducer.backward import reducers
from fusion_passes.state import Lifetime, process_state
from fusion_passes.torch_private.autograd import have_hooks_on_nodes, register_unless_asked
from fusion_passes.torch_private.ddp import parameters_of


@dataclass
class NodeHooks:
    """Which managed modules have hooks on their parameters' nodes.

    To ask a node costs some microseconds, so none is asked as long as no hook has been put on any
    node of the process since the last look, and no module constructed, that found none.
    """

    _none_at: int = -1

    def register(self, register: Callable[..., Any], hooks: Any, hook: Any) -> Any:
        """Register a hook on a node, which nobody says."""
        registered = register_unless_asked(register, hooks, hook)
        # Not reached by a look of our own, which would otherwise be made again in each backward.
        self._none_at = -1
        reducers.forget_hooks()
        return registered

    def modules(self) -> frozenset[str]:
        """The names of the modules that have some."""
        if self._none_at == registry.version:
            return frozenset()
        self._none_at = registry.version
        found = frozenset(
            registry.module_of(ddp).group_name
            for ddp in registry.modules()
            if have_hooks_on_nodes(parameters_of(ddp))
        )
        if found:
            self._none_at = -1
        return found

    def forget(self) -> None:
        """Ask all nodes the next time: hooks may have been registered unseen."""
        self._none_at = -1
        reducers.forget_hooks()


node_hooks: Final = process_state.keep(
    NodeHooks(),
    "whether autograd nodes of managed modules' parameters may have hooks",
    Lifetime.PROCESS,
    reset=NodeHooks.forget,
)
