"""Changes in torch what the fusion needs, and puts it back: what constructing a module needs while
the flag is set; what training managed modules needs while the flag is set or one of them is there.
``docs/patches.md`` has all that the package changes in torch, here and elsewhere."""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final, cast

import torch

from fusion_passes.config import FusionConfig
from fusion_passes.flag import active_config, add_flag
from fusion_passes.install.compiles import compile_graph
from fusion_passes.install.constructor import construct, enter_forward
from fusion_passes.reducer.backward import RunningBackward, reducers, register_on_node
from fusion_passes.reporting.backwards import backwards
from fusion_passes.reporting.modules import report_when_freed
from fusion_passes.state import Lifetime, process_state
from fusion_passes.torch_private import inductor_config, owner_of_name
from fusion_passes.torch_private.autograd import HOOKS_ON_NODES, backward_id
from fusion_passes.torch_private.dynamo import is_compiling_graph
from fusion_passes.torch_private.inductor import WITHOUT_TORCHS_FUSION
from fusion_passes.traced.backwards import traced_backwards
from fusion_passes.tuning.learned_layout import learn_layout
from fusion_passes.warnings import (
    warn_not_reduced,
    warn_once,
    warn_rounded,
    warn_stays_local,
)

_DDP: Final = "torch.nn.parallel.DistributedDataParallel"

replaced: Final = process_state.keep(
    dict[str, object](),
    "the functions of torch that were replaced, by name: once the flag is unset and no managed "
    "module is left, they must be there again",
    Lifetime.PROCESS,
    reset=dict.clear,
)


def install_flag() -> None:
    """Add the flag to torch's configuration, and follow it from now on."""
    reducers.on_local = warn_stays_local
    reducers.on_rounded = warn_rounded
    reducers.on_unowned = warn_not_reduced
    reducers.on_averaged = _note_averaged
    reducers.run_engine = traced_backwards.run_engine
    reducers.on_change = _installation.update
    reducers.learn_layout = learn_layout
    reducers.report_when_freed = report_when_freed
    add_flag(lambda: _installation.follow(active_config()), _warn_of_option)


def _note_averaged(run: RunningBackward, names: Sequence[str], copied: int) -> None:
    """Note a backward that reducers have averaged, for the report."""
    if run.is_traced:
        backwards.note(tuple(names), "compiled_autograd")
    else:
        backwards.note(tuple(names), "reducer", run.why_untraced, copied=copied)


def _warn_of_option() -> None:
    warn_once(
        "an option of one compile",
        "torch.compile(options={'ddp_fusion': ...}) has no effect: a module has the options that "
        "it was constructed with. Set torch._inductor.config.ddp_fusion before you construct "
        "DistributedDataParallel, and leave the option out.",
    )


class _Installation:
    """What is changed in torch now, and how to undo it."""

    def __init__(self) -> None:
        self._is_set = False
        self._undo: dict[Callable[[contextlib.ExitStack], None], contextlib.ExitStack] = {}

    def follow(self, config: FusionConfig | None) -> None:
        """The flag has these options now; ``None`` where it is off."""
        self._is_set = config is not None
        self.update()

    def update(self) -> None:
        """Make torch what the flag and the managed modules need. The collector may call this, in
        any thread, when a module is freed: the flag is what was set last, wherever that was."""
        self._switch(_for_flag, is_on=self._is_set)
        self._switch(_for_modules, is_on=self._is_set or bool(reducers.alive()))

    def _switch(self, change: Callable[[contextlib.ExitStack], None], *, is_on: bool) -> None:
        if is_on and change not in self._undo:
            with contextlib.ExitStack() as undo:
                change(undo)
                self._undo[change] = undo.pop_all()
        elif not is_on:
            self._undo.pop(change, contextlib.ExitStack()).close()

    def reset(self) -> None:
        """Undo all, before anything else is forgotten, unless something runs that needs it."""
        if reducers.running or backward_id() >= 0 or is_compiling_graph():
            raise RuntimeError(
                "fusion_passes cannot be reset while a backward runs or a graph is being compiled: "
                "its gradients would be lost. Reset it between two steps."
            )
        self._is_set = False
        for change in (_for_modules, _for_flag):
            self._switch(change, is_on=False)


def _for_flag(undo: contextlib.ExitStack) -> None:
    """Change what a module that is constructed now needs."""
    # The module gets DDP's Python reducer, whose hooks the package's take the place of.
    _wrap(undo, f"{_DDP}.__init__", construct)
    # Each forward with DDP's own reducer comes through it: a module that was constructed too early
    # is warned about.
    _wrap(undo, f"{_DDP}._inside_ddp_forward", enter_forward)
    # Torch's own fusion would fuse the same gradients.
    undo.enter_context(inductor_config.patch(**WITHOUT_TORCHS_FUSION))


def _for_modules(undo: contextlib.ExitStack) -> None:
    """Change what compiling and training managed modules needs. It leaves all other modules, and
    what is compiled of them, as they are."""
    # Tensor.backward and torch.autograd.backward come through it, which is one function with a name
    # in two modules: reducers prepare for backwards that reach parameters.
    for module in ("torch.autograd", "torch.autograd.graph"):
        _wrap(undo, f"{module}._engine_run_backward", reducers.run)
    # Each graph that torch.compile gives to Inductor comes through it.
    _wrap(undo, "torch._TorchCompileInductorWrapper.__call__", compile_graph)
    # Hooks on autograd nodes come through it, of which torch tells nobody: those on the nodes that
    # accumulate gradients must see these before they are averaged.
    _wrap(undo, HOOKS_ON_NODES, register_on_node)


def _wrap(undo: contextlib.ExitStack, what: str, replacement: Callable[..., Any]) -> None:
    """Replace a function of torch, by its dotted name, with one that is called with torch's first,
    and that a compiled region runs as it is. ``undo`` puts torch's back, unless somebody has put
    something else there since: that stays, and where it calls what has been here, that calls
    torch's function again."""
    owner, name = owner_of_name(what)
    original = getattr(owner, name)
    is_undone = threading.Event()

    @functools.wraps(original)
    def patched(*args: Any, **kwargs: Any) -> Any:
        if is_undone.is_set():
            return original(*args, **kwargs)
        return replacement(original, *args, **kwargs)

    replaced[what] = original
    before = inspect.getattr_static(owner, name)
    value = torch.compiler.disable(patched)
    if isinstance(before, staticmethod):
        value = staticmethod(cast("Callable[..., Any]", value))
    setattr(owner, name, value)

    def restore() -> None:
        is_undone.set()
        if inspect.getattr_static(owner, name) is value:
            setattr(owner, name, before)

    undo.callback(restore)


_installation: Final = process_state.keep(
    _Installation(),
    "how to undo what is changed in torch",
    Lifetime.PROCESS,
    reset=_Installation.reset,
)
