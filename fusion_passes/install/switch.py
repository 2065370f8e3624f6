"""Patches torch as the fusion needs it, and undoes that: the patches for constructing a module are
in place while the flag is set, the patches for training while it is set or a managed module exists.
``docs/patches.md`` lists all that the package changes in torch, here and elsewhere."""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final, cast

import torch

from fusion_passes.config import FusionConfig, active_config
from fusion_passes.ddp.constructor import construct, enter_forward
from fusion_passes.install.compiles import compile_graph
from fusion_passes.install.flag import add_flag
from fusion_passes.reducer.backward import Slices, reducers, register_on_node
from fusion_passes.reducer.warnings import (
    warn_not_reduced,
    warn_once,
    warn_rounded,
    warn_stays_local,
)
from fusion_passes.reporting.modules import backward_counts, report_when_freed
from fusion_passes.sharded import checkpoints
from fusion_passes.sharded.modules import before_backward, shard
from fusion_passes.sharded.norms import (
    by_device_and_dtype,
    clip_with_norm,
    norm_for_clipping,
    total_norm,
    unscale,
)
from fusion_passes.sharded.overlap import (
    finish_first,
    wait_for_averaged,
    wait_for_module,
    wait_for_parameter,
    wait_in_forward,
)
from fusion_passes.sharded.steps import hook_steps
from fusion_passes.torch_private import inductor_config, owner_of_name
from fusion_passes.torch_private.autograd import HOOKS_ON_NODES
from fusion_passes.torch_private.inductor import WITHOUT_TORCHS_FUSION
from fusion_passes.traced.backwards import traced_backwards
from fusion_passes.tuning.tuner import learn_layout

_DDP: Final = "torch.nn.parallel.DistributedDataParallel"


def install_flag() -> None:
    """Add the flag to torch's configuration, and patch or restore torch whenever it changes."""
    reducers.slices = Slices(
        run_engine=traced_backwards.run_engine,
        on_local=warn_stays_local,
        on_rounded=warn_rounded,
        on_averaged=backward_counts.note,
        on_unowned=warn_not_reduced,
        on_change=_installation.update,
        shard=shard,
        wait_in_forward=wait_in_forward,
        learn_layout=learn_layout,
        report_when_freed=report_when_freed,
    )
    add_flag(lambda: _installation.follow(active_config()), _warn_of_option)


def _warn_of_option() -> None:
    warn_once(
        "an option of one compile",
        "torch.compile(options={'ddp_fusion': ...}) has no effect: a module keeps the options that "
        "it was constructed with. Set torch._inductor.config.ddp_fusion before you construct "
        "DistributedDataParallel, and omit the option.",
    )


class _Installation:
    """The patches of torch that are in place now, and how to undo them."""

    def __init__(self) -> None:
        self._is_set = False
        self._undo: dict[Callable[[contextlib.ExitStack], None], contextlib.ExitStack] = {}

    def follow(self, config: FusionConfig | None) -> None:
        """Follow a change of the flag, which has these options now; ``None`` if it is off."""
        self._is_set = config is not None
        self.update()

    def update(self) -> None:
        """Patch or restore torch as the flag and the managed modules need it. The garbage collector
        may call this in any thread when a module is freed, so this takes the flag's value that was
        set last in whichever thread."""
        self._switch(_for_flag, is_on=self._is_set)
        self._switch(_for_modules, is_on=self._is_set or bool(reducers.alive()))
        options = {reducer.module.config.shard_optimizer for reducer in reducers.alive()}
        self._switch(_for_sharded, is_on=not options.issubset({False}))
        self._switch(_for_overlap, is_on="overlap" in options)

    def _switch(self, change: Callable[[contextlib.ExitStack], None], *, is_on: bool) -> None:
        if is_on and change not in self._undo:
            with contextlib.ExitStack() as undo:
                change(undo)
                self._undo[change] = undo.pop_all()
        elif not is_on:
            self._undo.pop(change, contextlib.ExitStack()).close()


def _for_flag(undo: contextlib.ExitStack) -> None:
    """Patch torch for the construction of modules."""
    # The module gets DDP's Python reducer, whose hooks the package's hooks replace.
    _wrap(undo, f"{_DDP}.__init__", construct)
    # Each forward with DDP's own reducer calls this function. The replacement warns about a module
    # that was constructed before the flag was set.
    _wrap(undo, f"{_DDP}._inside_ddp_forward", enter_forward)
    # Torch's own fusion would fuse the same gradients.
    undo.enter_context(inductor_config.patch(**WITHOUT_TORCHS_FUSION))


def _for_modules(undo: contextlib.ExitStack) -> None:
    """Patch torch for compiling and training managed modules. Other modules, and code that is
    compiled for them, do not change."""
    # Tensor.backward and torch.autograd.backward call this function, which has a name in two
    # modules. Reducers prepare for backwards that reach their parameters.
    for module in ("torch.autograd", "torch.autograd.graph"):
        _wrap(undo, f"{module}._engine_run_backward", reducers.run)
    # torch.compile calls this method with each graph that it gives to Inductor.
    _wrap(undo, "torch._TorchCompileInductorWrapper.__call__", compile_graph)
    # C++ autograd nodes call this function to register a Python hook, and torch tells nobody else
    # of the hook. Hooks on AccumulateGrad nodes must see gradients before these are averaged.
    _wrap(undo, HOOKS_ON_NODES, register_on_node)


def _for_sharded(undo: contextlib.ExitStack) -> None:
    """Patch torch for modules whose optimizers are divided by the ranks, and prepare for each
    backward."""
    reducers.slices = replace(reducers.slices, on_backward=before_backward)
    undo.callback(_prepare_no_backward)
    # After a step, owners send their parameters to all ranks.
    for handle in hook_steps():
        undo.callback(handle.remove)
    # clip_grad_norm_ calls these two, whoever has imported it before.
    _wrap(undo, "torch.nn.utils.clip_grad._get_total_norm", norm_for_clipping)
    _wrap(undo, "torch.nn.utils.clip_grad._clip_grads_with_norm_", clip_with_norm)
    # The first one of them again, as users call it.
    _wrap(undo, "torch.nn.utils.get_total_norm", total_norm)
    # clip_grad_value_ calls this one, also on a rank that owns nothing.
    _wrap(undo, "torch.nn.utils.clip_grad._group_tensors_by_device_and_dtype", by_device_and_dtype)
    # Each rank unscales its own gradients, and all must find the same infinities.
    _wrap(undo, "torch.amp.GradScaler._unscale_grads_", unscale)
    # Each rank saves the state of its own parameters, and keeps that of all that it loads.
    _wrap(undo, "torch.optim.Optimizer.state_dict", checkpoints.state_dict)
    _wrap(undo, "torch.optim.Optimizer.load_state_dict", checkpoints.load_state_dict)
    dcp = "torch.distributed.checkpoint.state_dict"
    _wrap(undo, f"{dcp}._init_optim_state", checkpoints.init_state)
    _wrap(undo, f"{dcp}._get_optim_state_dict", checkpoints.get_state)
    _wrap(undo, f"{dcp}._load_optim_state_dict", checkpoints.load_state)
    _wrap(undo, f"{dcp}._split_optim_state_dict", checkpoints.split_state)


def _for_overlap(undo: contextlib.ExitStack) -> None:
    """Patch torch for modules whose parameters arrive after a step: what is most often called
    between a step and the next forward, and reads or writes parameters, waits for them."""
    for method in ("state_dict", "load_state_dict"):
        _wrap(undo, f"torch.nn.Module.{method}", wait_for_module)
    for method in ("__deepcopy__", "__reduce_ex__"):
        _wrap(undo, f"torch.nn.Parameter.{method}", wait_for_parameter)
    _wrap(undo, "torch.optim.swa_utils.AveragedModel.update_parameters", wait_for_averaged)
    # Other ranks may be waiting for what this one sends.
    for module in ("torch.distributed", "torch.distributed.distributed_c10d"):
        _wrap(undo, f"{module}.destroy_process_group", finish_first)


def _prepare_no_backward() -> None:
    reducers.slices = replace(reducers.slices, on_backward=Slices.on_backward)


def _wrap(undo: contextlib.ExitStack, what: str, replacement: Callable[..., Any]) -> None:
    """Replace a function of torch, given by its dotted name. The replacement is called with torch's
    function as its first argument, and Dynamo does not trace it. ``undo`` puts torch's function
    back, unless somebody else has replaced ours since. Their function then stays, and if it calls
    ours, ours calls torch's."""
    owner, name = owner_of_name(what)
    original = getattr(owner, name)
    is_undone = threading.Event()

    @functools.wraps(original)
    def patched(*args: Any, **kwargs: Any) -> Any:
        if is_undone.is_set():
            return original(*args, **kwargs)
        return replacement(original, *args, **kwargs)

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


_installation: Final = _Installation()
"""How to undo what is changed in torch."""
