"""All state of the package in a process: each mutable global, and how long an entry of it lives.

``tests/test_state.py`` fails on a mutable global of the package that is not listed here, and on
entries that outlive the object they describe.
"""

from __future__ import annotations

import pkgutil
from enum import Enum
from typing import Any, Final


class Lifetime(Enum):
    """How long an entry is kept; the longest time, if a global has several tables."""

    MODULE = "until the DDP module that it is about is freed"
    GROUP = "until the process group that it is about is freed"
    PROCESS = "until the process ends"


GLOBALS: Final = {
    "ddp.gloo_exit.pause_at_exit": Lifetime.PROCESS,
    "ddp.module._classes": Lifetime.MODULE,
    "ddp.module._count": Lifetime.GROUP,
    "ddp.own_reducer.own_reducers": Lifetime.MODULE,
    "graph.identity.source_hash": Lifetime.PROCESS,
    "install.flag._flag_variable": Lifetime.PROCESS,
    "install.switch._installation": Lifetime.PROCESS,
    "reducer.backward.reducers": Lifetime.MODULE,
    "reducer.warnings._looked_at": Lifetime.PROCESS,
    "reducer.warnings._warned": Lifetime.PROCESS,
    "reporting.modules.backward_counts": Lifetime.PROCESS,
    "reporting.graphs.compile_log": Lifetime.PROCESS,
    "reporting.modules._gone": Lifetime.PROCESS,
    "reporting.recording.last_recording": Lifetime.PROCESS,
    "sharded.checkpoints._IS_WHOLE": Lifetime.PROCESS,
    "sharded.modules.thread": Lifetime.PROCESS,
    "sharded.norms._asked": Lifetime.PROCESS,
    "sharded.overlap._register_lowering": Lifetime.PROCESS,
    "sharded.sends.on_the_way": Lifetime.MODULE,
    "sharded.steps.IS_ALONE": Lifetime.PROCESS,
    "sharded.steps.stepped": Lifetime.PROCESS,
    "stored.store_pass._register_lowerings": Lifetime.PROCESS,
    "torch_private.registered_memory._alive": Lifetime.MODULE,
    "torch_private.registered_memory._freed": Lifetime.GROUP,
    "traced.backwards.traced_backwards": Lifetime.PROCESS,
    "traced.backwards.traced_modules": Lifetime.MODULE,
    "traced.fuse_pass._register_lowerings": Lifetime.PROCESS,
}


PATCHED: Final = (
    "torch.nn.parallel.DistributedDataParallel.__init__",
    "torch.nn.parallel.DistributedDataParallel._inside_ddp_forward",
    "torch.autograd._engine_run_backward",
    "torch.autograd.graph._engine_run_backward",
    "torch._TorchCompileInductorWrapper.__call__",
    "torch.autograd.function._HookMixin._register_hook",
)
"""The functions of torch that the package replaces until the flag is unset and no managed module is
left; ``docs/patches.md`` says why."""


def value_of(name: str) -> Any:
    """The value of one of :data:`GLOBALS`."""
    return pkgutil.resolve_name(f"fusion_passes.{name}")


def of_lifetimes(*lifetimes: Lifetime) -> set[str]:
    """The names of the globals with these lifetimes."""
    return {name for name, lives in GLOBALS.items() if lives in lifetimes}
