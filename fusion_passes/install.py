"""The one writer of torch's configuration: adds the flag, and while it is set switches on what the
fusion needs. Unsetting it puts everything back."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import os
from collections.abc import Callable
from contextvars import ContextVar, Token
from pathlib import Path
from typing import Any, Final

import torch
from torch import fx
from torch.nn.parallel import DistributedDataParallel

from fusion_passes.collectives import decode_all_reduce
from fusion_passes.config import (
    ENVIRONMENT_VARIABLE,
    HOLD_CAPS,
    FusionConfig,
    parse_environment,
    parse_flag,
)
from fusion_passes.ddp.backward import BackwardRunner
from fusion_passes.ddp.forward import prepare_forward
from fusion_passes.ddp.hooks import replace_hooks
from fusion_passes.ddp.modules import registry
from fusion_passes.ddp.refusals import check_arguments, refuse_methods
from fusion_passes.pipeline import run_pipeline
from fusion_passes.planning import MIB, BucketCaps
from fusion_passes.report.journal import Journal
from fusion_passes.report.records import report_plan
from fusion_passes.report.telling import tell_once
from fusion_passes.torch_private import (
    UNSET,
    ConfigDefinition,
    ConfigEntry,
    CustomGraphPass,
    compiled_autograd,
    disable_dynamo,
    dynamo_config,
    hash_files,
    inductor_config,
    is_compiling_graph,
    supports_pass_list,
    trace_rules,
)
from fusion_passes.version import __version__

FLAG: Final = "ddp_fusion"

journal: Final = Journal()
"""What was done to the graphs of this process."""

_runner: Final = BackwardRunner(journal)


class _FlagType(type):
    """Type of the flag's values. ``torch.compile`` checks an option with ``isinstance`` and nothing
    else: this is where a wrong ``options={"ddp_fusion": ...}`` is refused before anything runs."""

    def __instancecheck__(cls, value: object) -> bool:
        parse_flag(value, f'torch.compile(options={{"{FLAG}": ...}})')
        return True


class _FlagValue(metaclass=_FlagType):
    pass


class _FlagVariable:
    """The value that the user gave the flag, behind a config entry; checks it, and acts on it.

    Has the interface of the ``ContextVar`` that it stands in for. A thread in which the flag was
    not set sees the value that another has set last: backwards and pipeline stages may run in
    threads of their own.
    """

    def __init__(self) -> None:
        self._context: ContextVar[Any] = ContextVar(FLAG, default=UNSET)
        self._process: Any = UNSET

    def get(self) -> Any:
        value = self._context.get()
        return self._process if value is UNSET else value

    def set(self, value: Any) -> Token[Any]:
        if value is not UNSET:
            parse_flag(value)
        token = self._context.set(value)
        self._changed(value)
        return token

    def reset(self, token: Token[Any]) -> None:
        self._context.reset(token)
        self._changed(self._context.get())

    def _changed(self, value: Any) -> None:
        # While a graph is compiled, what is set holds for that compile alone.
        if not is_compiling_graph():
            self._process = value
            _follow_flag()


class _FlagEntry(ConfigEntry):  # type: ignore[misc, valid-type]
    """The flag's entry for torch 2.11, which keeps a user's value as a plain attribute."""

    @property
    def user_override(self) -> Any:
        return _flag_variable.get()

    @user_override.setter
    def user_override(self, value: Any) -> None:
        _flag_variable.set(value)


_flag_variable: Final = _FlagVariable()


def add_flag() -> None:
    """Adds ``ddp_fusion`` to ``torch._inductor.config``, with the environment's default.

    Raises:
        ValueError: the environment variable holds no value of the flag.
    """
    entries = inductor_config._config  # type: ignore[attr-defined]
    if FLAG in entries:
        return
    default = parse_environment(os.environ.get(ENVIRONMENT_VARIABLE))
    entry = _make_entry(ConfigDefinition(default=None, value_type=_FlagValue))
    if default is not None:
        entry.env_value_default = default
    entries[FLAG] = entry
    _follow_flag()


def _make_entry(definition: ConfigDefinition[Any]) -> ConfigEntry:
    if "name" not in inspect.signature(ConfigEntry.__init__).parameters:
        return _FlagEntry(definition)
    entry = ConfigEntry(definition, FLAG)
    entry.user_override = _flag_variable  # type: ignore[assignment]
    return entry


def active_config() -> FusionConfig | None:
    """The options in force here and now; ``None`` where fusion is off."""
    return parse_flag(getattr(inductor_config, FLAG))


class DdpFusionPass(CustomGraphPass):
    """The package's entry among Inductor's post-grad passes."""

    def __call__(self, graph: fx.Graph) -> None:
        config = active_config()
        if config is None:
            return
        plan = run_pipeline(graph, config, registry.owner_of, functools.partial(caps_of, config))
        if plan.buckets:
            check_conflicts()
        if plan.buckets or any(_is_average(rejection.node) for rejection in plan.rejections):
            journal.add(report_plan(plan, config.mode))

    def uuid(self) -> str:
        """Identity of what this pass does to a graph: the FX graph cache's key holds it. Another
        version of the package, option, or cap of a DDP module is another identity."""
        state = (__version__, _source_hash(), active_config(), registry.fingerprint())
        return hashlib.sha256(repr(state).encode()).hexdigest()


def _is_average(launch: fx.Node) -> bool:
    """Whether a collective that is not DDP's looks like a gradient reduction all the same."""
    call = decode_all_reduce(launch)
    return call is not None and call.tensor.target is torch.ops.aten.div.Tensor


def caps_of(config: FusionConfig, group_name: str) -> BucketCaps:
    """Caps of the module that owns ``group_name``: the user's option, else the module's own."""
    module = registry.module(group_name)
    cap_bytes, first_bytes = module.bucket_cap_bytes, module.first_bucket_cap_bytes
    if config.bucket_cap_mb is not None:
        cap_bytes = first_bytes = int(config.bucket_cap_mb * MIB)
    if config.first_bucket_cap_mb is not None:
        first_bytes = int(config.first_bucket_cap_mb * MIB)
    hold_bytes = HOLD_CAPS * cap_bytes
    if config.max_hold_mb is not None:
        hold_bytes = int(config.max_hold_mb * MIB)
    return BucketCaps(first_bytes, cap_bytes, hold_bytes)


def check_conflicts() -> None:
    """Refuses settings of torch that would undo or repeat what the passes do.

    Raises:
        ValueError: it names the setting, its value and the remedy.
    """
    overlap = inductor_config.aten_distributed_optimizations
    settings = {
        "bucket_all_reduces_fx": (inductor_config.bucket_all_reduces_fx, "none"),
        "aten_distributed_optimizations.enable_overlap_scheduling": (
            overlap.enable_overlap_scheduling,
            False,
        ),
        "_fuse_ddp_communication": (inductor_config._fuse_ddp_communication, False),
    }
    for name, (value, needed) in settings.items():
        if value != needed:
            raise ValueError(
                f"torch._inductor.config.{name} = {value!r} cannot be combined with ddp_fusion: "
                "both would fuse and place the same gradient all-reduces. Set it to "
                f"{needed!r}, or set ddp_fusion = None."
            )


def _follow_flag() -> None:
    """Brings torch's configuration into line with the flag."""
    _installation.follow(active_config())


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
        torch._C._dynamo.compiled_autograd.clear_cache()  # type: ignore[attr-defined]

    def _switch_on(self) -> None:
        with contextlib.ExitStack() as undo:
            ddp = DistributedDataParallel
            _patch(undo, ddp, "__init__", _construct)
            _patch(undo, ddp, "_inside_ddp_forward", _enter_forward)
            for module in (torch.autograd, torch.autograd.graph):
                _patch(undo, module, "_engine_run_backward", _runner.run)
            _patch(undo, compiled_autograd(), "_enable", _enable_region)
            undo.callback(_forget_inlined, _is_inlined())
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
    without_effect = check_arguments(inspect.signature(original).bind(self, *args, **kwargs).arguments)
    _check_reducer_mode()
    check_conflicts()
    _installation.configure_context()
    with (
        dynamo_config().patch(optimize_ddp="python_reducer"),
        # DDP switches torch's own fusion on.
        inductor_config.patch(  # type: ignore[attr-defined]
            _fuse_ddp_communication=False,
            _fuse_ddp_bucket_size=inductor_config._fuse_ddp_bucket_size,
        ),
    ):
        original(self, *args, **kwargs)
    module = registry.add(self)
    replace_hooks(self, module)
    prepare_forward(self, module)
    refuse_methods(self)
    if without_effect:
        tell_once(
            f"no effect {without_effect}",
            f"DistributedDataParallel({', '.join(without_effect)}) has no effect under ddp_fusion: "
            "it tunes the C++ reducer, which does not run. Leave it out.",
        )


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
    if active_config() is not None:
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


_DDP_FILE: Final = "torch.nn.parallel.distributed"


def _is_inlined() -> bool:
    return _DDP_FILE in trace_rules().LEGACY_MOD_INLINELIST


def _forget_inlined(was_inlined: bool) -> None:
    """DDP's constructor makes Dynamo inline its forward; undone where no module needs it."""
    if not was_inlined and not len(registry):
        trace_rules().LEGACY_MOD_INLINELIST.discard(_DDP_FILE)
        trace_rules().get_legacy_mod_inlinelist.cache_clear()


@functools.cache
def _source_hash() -> str:
    files = sorted(Path(__file__).parent.rglob("*.py"))
    return hash_files(tuple(str(file) for file in files)).hex()

