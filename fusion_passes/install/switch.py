"""Follows the flag: while it is set, changes in torch what the fusion needs. Unsetting it puts
everything back."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any, Final

from fusion_passes.agreement.protocol import forget_histories
from fusion_passes.config import FusionConfig
from fusion_passes.ddp.aot_backward import aot_backwards
from fusion_passes.ddp.backward import BackwardRunner
from fusion_passes.ddp.comm_hooks import check_flag
from fusion_passes.ddp.donation import donating
from fusion_passes.ddp.modules import registry
from fusion_passes.ddp.node_hooks import node_hooks
from fusion_passes.ddp.rounds import is_running
from fusion_passes.ddp.tracing import call_module
from fusion_passes.ddp.unfused import warn_not_reduced, warn_stays_local
from fusion_passes.flag import active_config, add_flag
from fusion_passes.install.changes import replace, set_to, value_of, wrap
from fusion_passes.install.constructor import construct, enter_forward
from fusion_passes.install.forward_compile import INDUCTOR, compile_forward
from fusion_passes.install.inductor_pass import DdpFusionPass
from fusion_passes.install.pass_slot import PassSlot
from fusion_passes.install.patch import DDP
from fusion_passes.install.regions import breaking_at_callbacks, make_region
from fusion_passes.reducer.backward import reducers
from fusion_passes.reporting.backwards import backwards
from fusion_passes.reporting.journal import journal
from fusion_passes.reporting.warnings import warn_once
from fusion_passes.state import Lifetime, process_state
from fusion_passes.torch_private import (
    clear_backward_cache,
    engine_with_queue,
    is_compiling_graph,
)
from fusion_passes.torch_private.autograd import backward_id, compile_hooks_alone

_OPTION_ALONE: Final = (
    "torch.compile(options={'ddp_fusion': ...}) fuses nothing: it chooses the fusion of one "
    "compile while torch._inductor.config.ddp_fusion is set, which it is not. Set that before you "
    "construct DistributedDataParallel."
)

_runner: Final = process_state.keep(
    BackwardRunner(journal),
    "what the next backward must know of the last ones",
    Lifetime.MODULE,
    reset=BackwardRunner.reset,
)


def _run_backward(engine: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call autograd's engine: what reducers do around it, and around that what is traced."""
    if not len(reducers):
        return _runner.run(engine, *args, **kwargs)
    run = functools.partial(_runner.run, engine) if len(registry) else engine
    return reducers.run(run, *args, **kwargs)


def _note_averaged(labels: Sequence[str], copied: int) -> None:
    """Note a backward that reducers have averaged, for the report."""
    backwards.note(tuple(labels), "reducer", outside=copied)
    backwards.ended()


def install_flag() -> None:
    """Add the flag to torch's configuration, and follow it from now on."""
    reducers.tell(
        on_local=warn_stays_local,
        on_unowned=warn_not_reduced,
        on_averaged=_note_averaged,
    )
    add_flag(lambda: _installation.follow(active_config()), check_flag, _installation.warn_off)


class _Installation:
    """What is switched on while the flag is set, and how to switch it off again."""

    def __init__(self) -> None:
        self._config: FusionConfig | None = None
        self._undo: contextlib.ExitStack | None = None
        self._slot = PassSlot(DdpFusionPass())

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
        _runner.forget_region()
        aot_backwards.forget()
        forget_histories()

    def warn_off(self) -> None:
        """Warn if one compile was given the option while the flag is not set."""
        if self._undo is None and active_config() is not None:
            warn_once("an option alone", _OPTION_ALONE)

    def reset(self) -> None:
        """Undo all. This comes before anything else is forgotten.

        Raises:
            RuntimeError: something runs that needs what would be undone.
        """
        if is_running() or backward_id() >= 0 or is_compiling_graph():
            raise RuntimeError(
                "fusion_passes cannot be reset while a backward runs or a graph is being compiled: "
                "its gradients would be lost. Reset it between two steps."
            )
        self.follow(None)

    def _switch_on(self) -> None:
        with contextlib.ExitStack() as undo:
            wrap(undo, f"{DDP}.__init__", functools.partial(construct, self.fill_slot))
            wrap(undo, f"{DDP}._inside_ddp_forward", enter_forward)
            for module in ("torch.autograd", "torch.autograd.graph"):
                wrap(undo, f"{module}._engine_run_backward", _run_backward)
            wrap(undo, f"{INDUCTOR}.__call__", functools.partial(compile_forward, self.fill_slot))
            wrap(undo, "torch.fx.Tracer.call_module", call_module)
            node_hooks.forget()
            wrap(undo, "torch.autograd.function._HookMixin._register_hook", node_hooks.register)
            regions = "torch._dynamo.eval_frame.OptimizeContext.__init__"
            wrap(undo, regions, functools.partial(make_region, _runner))
            tracer = "torch._dynamo.compiled_autograd.AutogradCompilerInstance"
            traces = donating(value_of(tracer), lambda: _runner.is_tracing, _runner.executing)
            replace(undo, tracer, traces)
            engine = "torch.autograd.Variable._execution_engine"
            replace(undo, engine, engine_with_queue(_runner.queue))
            calls = "torch._dynamo.variables.misc.AutogradEngineVariable.call_method"
            replace(undo, calls, breaking_at_callbacks(value_of(calls)))
            set_to(undo, "torch._inductor.config._fuse_ddp_communication", False)
            undo.callback(compile_hooks_alone, True)
            undo.callback(self._slot.clear)
            self._slot.fill()
            self._undo = undo.pop_all()

    def fill_slot(self) -> None:
        """Put the pass among Inductor's in this thread, too."""
        assert self._undo is not None, "only while the flag is set"
        self._slot.fill()


_installation: Final = process_state.keep(
    _Installation(),
    "how to undo what the flag has changed",
    Lifetime.PROCESS,
    reset=_Installation.reset,
)
_runner.before_traced = _installation.fill_slot
