"""The one writer of torch's configuration: adds the flag, and while it is set switches on what the
fusion needs. Unsetting it puts everything back."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch import fx
from torch.nn.parallel import DistributedDataParallel

from fusion_passes.caps import MIB
from fusion_passes.config import (
    FusionConfig,
)
from fusion_passes.ddp.backward import BackwardRunner
from fusion_passes.ddp.donation import donating
from fusion_passes.ddp.management import manage
from fusion_passes.ddp.modules import registry
from fusion_passes.ddp.own_reducer import (
    check_supported,
    reason_for_own_reducer,
    tell_own_reducer,
    tell_without_effect,
    wait_for_delayed,
)
from fusion_passes.flag import FLAG, active_config, add_flag
from fusion_passes.inductor_pass import DdpFusionPass, check_conflicts
from fusion_passes.report.journal import journal
from fusion_passes.report.telling import tell_once
from fusion_passes.torch_private import (
    CustomGraphPass,
    clear_backward_cache,
    compiled_autograd,
    disable_dynamo,
    dynamo_config,
    inductor_config,
    trace_rules,
)
from fusion_passes.torch_private.inductor import supports_pass_list

_runner: Final = BackwardRunner(journal)


def install_flag() -> None:
    """Adds the flag to torch's configuration, and follows it from now on."""
    add_flag(lambda: _installation.follow(active_config()))


class _Installation:
    """What is switched on while the flag is set, and how to switch it off again."""

    def __init__(self) -> None:
        self._config: FusionConfig | None = None
        self._undo: contextlib.ExitStack | None = None
        self._pass = DdpFusionPass()

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

    def _switch_on(self) -> None:
        with contextlib.ExitStack() as undo:
            ddp = DistributedDataParallel
            _patch(undo, ddp, "__init__", _construct)
            _patch(undo, ddp, "_inside_ddp_forward", _enter_forward)
            for module in (torch.autograd, torch.autograd.graph):
                _patch(undo, module, "_engine_run_backward", _runner.run)
            autograd = compiled_autograd()
            _patch(undo, autograd, "_enable", _enable_region)
            tracer = autograd.AutogradCompilerInstance
            _set(
                undo,
                autograd,
                "AutogradCompilerInstance",
                donating(tracer, lambda: _runner.is_running),
            )
            _set(undo, inductor_config, "_fuse_ddp_communication", False)
            self.configure_context(undo)
            self._undo = undo.pop_all()

    def configure_context(self, undo: contextlib.ExitStack | None = None) -> None:
        """Settings that torch keeps for each thread: also made where a thread has none of them
        yet, or where the user has put other passes in the place of ours."""
        undo = undo or self._undo
        assert undo is not None, "only while the flag is set"
        if not dynamo_config().compiled_autograd:
            _set(undo, dynamo_config(), "compiled_autograd", True)
            _runner.switched_on = True
            undo.callback(setattr, _runner, "switched_on", False)
        passes = _pass_list(inductor_config.post_grad_custom_post_pass)
        if self._pass not in passes:
            inductor_config.post_grad_custom_post_pass = _pass_value([*passes, self._pass])
            undo.callback(self._remove_pass)

    def _remove_pass(self) -> None:
        passes = _pass_list(inductor_config.post_grad_custom_post_pass)
        others = [item for item in passes if item is not self._pass]
        inductor_config.post_grad_custom_post_pass = _pass_value(others)


_installation: Final = _Installation()
_runner.before_traced = _installation.configure_context


def _construct(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    """``DistributedDataParallel.__init__`` under the flag."""
    if active_config() is None:
        original(self, *args, **kwargs)
        return
    bound = inspect.signature(original).bind(self, *args, **kwargs)
    given = dict(bound.arguments)
    _check_reducer_mode()
    check_conflicts()
    check_supported(given)
    reason = reason_for_own_reducer(given)
    if reason is not None:
        with dynamo_config().patch(optimize_ddp=True):
            original(self, *args, **kwargs)
        wait_for_delayed(self, given.get("param_to_hook_all_reduce"))
        tell_own_reducer(self, reason)
        return
    # DDP takes no list with the Python reducer, which has no buckets of its own.
    caps_mb = bound.arguments.pop("bucket_cap_mb_list", None) or ()
    if caps_mb:
        bound.arguments["bucket_cap_mb"] = max(caps_mb)
    _installation.configure_context()
    with (
        _kept_inline_list(),
        dynamo_config().patch(optimize_ddp="python_reducer"),
        # DDP switches torch's own fusion on.
        inductor_config.patch(
            _fuse_ddp_communication=False,
            _fuse_ddp_bucket_size=inductor_config._fuse_ddp_bucket_size,
        ),
    ):
        original(*bound.args, **bound.kwargs)
    self.bucket_bytes_cap_list = [int(cap_mb * MIB) for cap_mb in caps_mb]
    manage(self)
    tell_without_effect(given)


def _check_reducer_mode() -> None:
    mode = dynamo_config().optimize_ddp
    if mode not in (True, "python_reducer"):
        raise ValueError(
            f"torch._dynamo.config.optimize_ddp = {mode!r} contradicts "
            f"torch._inductor.config.ddp_fusion = {getattr(inductor_config, FLAG)!r}: the fusion "
            "needs DDP's Python reducer, which it switches on itself. Leave optimize_ddp at its "
            "default, or set ddp_fusion = None."
        )


def _enter_forward(original: Callable[..., Any], ddp: DistributedDataParallel) -> Any:
    """Only modules with the C++ reducer come here, in each forward."""
    if active_config() is not None and not any(map(registry.is_unfused, ddp._module_parameters)):
        tell_once(
            f"late {id(ddp)}",
            f"DistributedDataParallel({type(ddp.module).__name__}) was constructed before "
            "torch._inductor.config.ddp_fusion was set, so its gradients are not fused: DDP's own "
            "reducer sends them. Set ddp_fusion before you construct it.",
        )
    return original(ddp)


def _enable_region(
    original: Callable[..., Any], compiler_fn: Any, dynamic: bool = True, **kwargs: Any
) -> Any:
    """``compiled_autograd._enable``: every compiled region enters it with its own options."""
    _runner.remember_region(compiler_fn, dynamic)
    return original(compiler_fn, dynamic=dynamic, **kwargs)


def _patch(
    undo: contextlib.ExitStack,
    owner: Any,
    name: str,
    replacement: Callable[..., Any],
) -> None:
    """Puts ``replacement``, called with the original first, in an attribute's place. A compiled
    region that comes to call it runs it as it is."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def patched(*args: Any, **kwargs: Any) -> Any:
        return replacement(original, *args, **kwargs)

    wrapped = disable_dynamo(patched)
    setattr(owner, name, wrapped)

    def restore() -> None:
        # Whoever has wrapped it since keeps a working function: ours calls the original.
        if getattr(owner, name) is wrapped:
            setattr(owner, name, original)

    undo.callback(restore)


def _set(undo: contextlib.ExitStack, module: Any, name: str, value: object) -> None:
    undo.callback(setattr, module, name, getattr(module, name))
    setattr(module, name, value)


class _PassChain(CustomGraphPass):
    """Several passes in the one slot that torch 2.11 has."""

    def __init__(self, passes: list[Any]) -> None:
        self.passes = passes

    def __call__(self, graph: fx.Graph) -> None:
        for item in self.passes:
            item(graph)

    def uuid(self) -> Any:
        ids = [item.uuid() if isinstance(item, CustomGraphPass) else None for item in self.passes]
        return None if None in ids else repr(ids)


def _pass_list(value: Any) -> list[Any]:
    """The passes in the slot, in order."""
    if isinstance(value, _PassChain):
        return list(value.passes)
    if isinstance(value, list | tuple):
        return list(value)
    return [] if value is None else [value]


def _pass_value(passes: list[Any]) -> Any:
    if len(passes) <= 1:
        return passes[0] if passes else None
    return list(passes) if supports_pass_list() else _PassChain(passes)


@contextlib.contextmanager
def _kept_inline_list() -> Iterator[None]:
    """DDP's constructor makes Dynamo inline the forward of every DDP module, with what only its own
    reducer does in it. Modules under the flag have a forward of their own instead."""
    rules = trace_rules()
    before = set(rules.LEGACY_MOD_INLINELIST)
    yield
    rules.LEGACY_MOD_INLINELIST.intersection_update(before)
    rules.get_legacy_mod_inlinelist.cache_clear()
