"""Follows the flag: while it is set, changes in torch what the fusion needs. Unsetting it puts
everything back."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Final

from fusion_passes.config import FusionConfig
from fusion_passes.ddp.module import warn_not_reduced, warn_stays_local
from fusion_passes.ddp.traced import traced_backwards
from fusion_passes.flag import active_config, add_flag
from fusion_passes.install.changes import set_to, wrap
from fusion_passes.install.constructor import construct, enter_forward
from fusion_passes.install.forward_compile import INDUCTOR, compile_forward
from fusion_passes.install.patch import DDP
from fusion_passes.reducer.backward import Run, reducers, register_on_node
from fusion_passes.reporting.backwards import backwards
from fusion_passes.reporting.warnings import warn_once
from fusion_passes.state import Lifetime, process_state
from fusion_passes.torch_private import clear_backward_cache, is_compiling_graph
from fusion_passes.torch_private.autograd import backward_id

_OPTION_OF_ONE_COMPILE: Final = (
    "torch.compile(options={'ddp_fusion': ...}) has no effect: a module has the options that it "
    "was constructed with. Set torch._inductor.config.ddp_fusion before you construct "
    "DistributedDataParallel, and leave the option out."
)


def _note_averaged(run: Run, labels: Sequence[str], copied: int) -> None:
    """Note a backward that reducers have averaged, for the report."""
    if run.is_traced:
        backwards.note(tuple(labels), "compiled_autograd")
    else:
        backwards.note(tuple(labels), "reducer", run.why_untraced, copied=copied)
    backwards.ended()


def _warn_of_option() -> None:
    """Warn that one compile was given the flag as its option."""
    warn_once("an option of one compile", _OPTION_OF_ONE_COMPILE)


def install_flag() -> None:
    """Add the flag to torch's configuration, and follow it from now on."""
    reducers.tell(
        on_local=warn_stays_local,
        on_unowned=warn_not_reduced,
        on_averaged=_note_averaged,
    )
    reducers.run_engine = traced_backwards.run_engine
    add_flag(lambda: _installation.follow(active_config()), _warn_of_option)


class _Installation:
    """What is switched on while the flag is set, and how to switch it off again."""

    def __init__(self) -> None:
        self._config: FusionConfig | None = None
        self._undo: contextlib.ExitStack | None = None

    def follow(self, config: FusionConfig | None) -> None:
        if config == self._config:
            return
        if config is not None and self._undo is None:
            self._switch_on()
        elif config is None and self._undo is not None:
            undo, self._undo = self._undo, None
            undo.close()
        self._config = config
        # Compiled autograd knows its graphs by the autograd nodes alone: without this, a backward
        # that was compiled under the flag's old value would go on running.
        clear_backward_cache()

    def reset(self) -> None:
        """Undo all. This comes before anything else is forgotten.

        Raises:
            RuntimeError: something runs that needs what would be undone.
        """
        if reducers.running or backward_id() >= 0 or is_compiling_graph():
            raise RuntimeError(
                "fusion_passes cannot be reset while a backward runs or a graph is being compiled: "
                "its gradients would be lost. Reset it between two steps."
            )
        self.follow(None)

    def _switch_on(self) -> None:
        with contextlib.ExitStack() as undo:
            wrap(undo, f"{DDP}.__init__", construct)
            wrap(undo, f"{DDP}._inside_ddp_forward", enter_forward)
            for module in ("torch.autograd", "torch.autograd.graph"):
                wrap(undo, f"{module}._engine_run_backward", reducers.run)
            wrap(undo, f"{INDUCTOR}.__call__", compile_forward)
            reducers.forget_hooks()
            wrap(undo, "torch.autograd.function._HookMixin._register_hook", register_on_node)
            set_to(undo, "torch._inductor.config._fuse_ddp_communication", False)
            self._undo = undo.pop_all()


_installation: Final = process_state.keep(
    _Installation(),
    "how to undo what the flag has changed",
    Lifetime.PROCESS,
    reset=_Installation.reset,
)
