"""Constructs DDP modules under the flag, refuses settings of torch that contradict it, and warns
about modules that were constructed before the flag was set."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fusion_passes.config import FusionConfig, active_config
from fusion_passes.ddp.attachment import undo_attachment
from fusion_passes.ddp.module import manage_by_reducer
from fusion_passes.ddp.own_reducer import (
    check_supported,
    own_reducers,
    warn_without_effect,
)
from fusion_passes.layout.caps import mib_to_bytes
from fusion_passes.reducer.warnings import warn_once
from fusion_passes.torch_private import inductor_config
from fusion_passes.torch_private.ddp import (
    delayed_parameters,
    none_ignored,
    registers_no_hooks,
)
from fusion_passes.torch_private.dynamo import dynamo_config, trace_rules
from fusion_passes.torch_private.inductor import torch_fuses_ddp, without_torchs_ddp_fusion


def construct(
    original: Callable[..., None], ddp: DistributedDataParallel, /, *args: Any, **kwargs: Any
) -> None:
    """Take the place of ``DistributedDataParallel.__init__``: call it, and manage the module if the
    flag is set.

    Raises:
        ValueError: settings or arguments contradict the flag; the message names the remedy.
    """
    config = active_config()
    if config is None:
        original(ddp, *args, **kwargs)
        return
    bound = inspect.signature(original).bind(ddp, *args, **kwargs)
    given = dict(bound.arguments)
    try:
        _check_reducer_mode()
        _check_conflicts()
        _check_tracing(config)
        check_supported(given)
        warn_without_effect(given)
        delayed = _take_delayed(bound.arguments)
    except Exception:
        _keep_in_step(original, ddp, bound)
        raise
    # DDP refuses bucket_cap_mb_list with its Python reducer, which has no buckets.
    caps_mb = bound.arguments.pop("bucket_cap_mb_list", None) or ()
    if caps_mb:
        bound.arguments["bucket_cap_mb"] = max(caps_mb)
    with (
        _python_reducer(),
        registers_no_hooks(ddp),
        none_ignored(bound.arguments["module"], delayed),
    ):
        original(*bound.args, **bound.kwargs)
    delayed_parameters(ddp).extend(delayed.values())
    ddp.bucket_bytes_cap_list = [mib_to_bytes(cap_mb) for cap_mb in caps_mb]
    is_in_step = given.get("init_sync", True)
    manage_by_reducer(ddp, config, is_in_step=is_in_step)
    if not is_in_step:  # DDP broadcasts delayed parameters even with init_sync=False.
        for parameter in delayed.values():
            dist.broadcast(parameter.detach(), group=ddp.process_group, group_src=0)


def _keep_in_step(
    original: Callable[..., None], ddp: DistributedDataParallel, bound: inspect.BoundArguments
) -> None:
    """Run the collectives of DDP's constructor although this rank refuses the module. Ranks that do
    not refuse it then wait for this rank in ``meet_ranks``, behind these collectives: not long."""
    for name in ("mixed_precision", "bucket_cap_mb_list", *_DELAY):
        bound.arguments.pop(name, None)
    with contextlib.suppress(Exception), _python_reducer(), registers_no_hooks(ddp):
        original(*bound.args, **bound.kwargs)
        undo_attachment(ddp)


_DELAY: Final = ("delay_all_reduce_named_params", "param_to_hook_all_reduce")


def _take_delayed(arguments: dict[str, Any]) -> dict[str, nn.Parameter]:
    """Take ``delay_all_reduce_named_params`` and ``param_to_hook_all_reduce`` out of DDP's
    arguments, and return the named parameters. DDP's constructor then treats these parameters like
    all others; the reducer launches them last."""
    named, hooked = (arguments.get(name) for name in _DELAY)
    if named is None or hooked is None:
        return {}  # DDP refuses one without the other.
    delayed = dict(named)
    known = dict(arguments["module"].named_parameters(remove_duplicate=False))
    for name, parameter in delayed.items():
        if known.get(name) is not parameter:
            raise ValueError(
                f"delay_all_reduce_named_params of DistributedDataParallel: {name!r} must be the "
                "name that module.named_parameters() has for the parameter, but is the name of "
                f"{'another' if name in known else 'no'} parameter. Pass pairs of "
                "module.named_parameters()."
            )
    if not hooked.requires_grad:
        raise RuntimeError(
            "cannot register a hook on a tensor that doesn't require gradient: "
            "param_to_hook_all_reduce of DistributedDataParallel must be a parameter that does."
        )
    for name in _DELAY:
        del arguments[name]
    return delayed


@contextlib.contextmanager
def _python_reducer() -> Iterator[None]:
    """A context in which DDP's constructor chooses the Python reducer. Other changes that the
    constructor then makes to torch, and never undoes, are undone at the end."""
    rules = trace_rules()
    inlined: set[str] = rules.LEGACY_MOD_INLINELIST
    before = set(inlined)
    # With the Python reducer, DDP's constructor switches torch's own fusion on.
    with dynamo_config().patch(optimize_ddp="python_reducer"), without_torchs_ddp_fusion():
        try:
            yield
        finally:
            # The constructor has Dynamo inline the forward of every DDP module, with the steps in
            # it that only DDP's own reducer needs.
            inlined.intersection_update(before)
            rules.get_legacy_mod_inlinelist.cache_clear()


def enter_forward(original: Callable[..., Any], ddp: DistributedDataParallel) -> Any:
    """Take the place of ``DistributedDataParallel._inside_ddp_forward``, which each forward with
    DDP's own reducer calls: warn if the module was constructed before the flag was set."""
    if active_config() is not None and ddp not in own_reducers:
        name = type(ddp.module).__name__
        warn_once(
            f"late {name}",
            f"DistributedDataParallel({name}) was constructed before "
            "torch._inductor.config.ddp_fusion was set, so its gradients are not fused: DDP's own "
            "reducer all-reduces them. Set ddp_fusion before you construct it.",
        )
    return original(ddp)


# --- What contradicts the flag -------------------------------------------------------------------


def _check_conflicts() -> None:
    """Refuse settings of Inductor that would undo or repeat the work of the passes."""
    overlap = inductor_config.aten_distributed_optimizations
    settings = {
        "bucket_all_reduces_fx": (inductor_config.bucket_all_reduces_fx, "none"),
        "aten_distributed_optimizations.enable_overlap_scheduling": (
            overlap.enable_overlap_scheduling,
            False,
        ),
        "_fuse_ddp_communication": (torch_fuses_ddp(), False),
    }
    for name, (value, needed) in settings.items():
        if value != needed:
            raise ValueError(
                f"torch._inductor.config.{name} = {value!r} cannot be combined with ddp_fusion: "
                "both would fuse and place the same gradient all-reduces. Set it to "
                f"{needed!r}, or set ddp_fusion = None."
            )


def _check_reducer_mode() -> None:
    """Refuse a value of ``optimize_ddp`` that chooses a reducer which the fusion cannot use."""
    mode = dynamo_config().optimize_ddp
    if mode not in (True, "python_reducer"):
        raise ValueError(
            f"torch._dynamo.config.optimize_ddp = {mode!r} contradicts "
            f"torch._inductor.config.ddp_fusion = {inductor_config.ddp_fusion!r}: the fusion "
            "needs DDP's Python reducer, which it enables itself. Leave optimize_ddp at its "
            "default, or set ddp_fusion = None."
        )


def _check_tracing(config: FusionConfig) -> None:
    """Refuse compiled autograd for a module whose backwards are not to be traced: compiled autograd
    cannot trace the calls of its reducer."""
    if config.backward_graph == "aot_autograd" and dynamo_config().compiled_autograd:
        raise ValueError(
            "torch._dynamo.config.compiled_autograd = True cannot be combined with "
            "FusionConfig.backward_graph = 'aot_autograd': compiled autograd cannot trace calls of "
            "the reducer. Set compiled_autograd = False, or omit backward_graph."
        )
